"""Medusa, Hydra, Clover, Clover-2 and Chimera: what each head may look at."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import small_training as tiny
from support.conformance import DRAFTERS, TARGET, complete, params, plain, same
from support.steps_seen import read_pairs, read_text, row_texts, steps

import specjax
from specjax.draft import Chimera, Clover, Clover2, Hydra, Medusa, View
from specjax.draft.chimera.network import interleaved
from specjax.draft.hydra import head_logits as hydra_logits
from specjax.draft.medusa import head_logits as medusa_logits
from specjax.expand import Static
from specjax.lm import Block
from specjax.sampling import Sampler

TREE = Static(((0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (1, 0, 0)))


def propose(drafter, model, state=None):
    """The tree of a state, by default the one after two steps, and that state."""
    decoder = specjax.speculative(TARGET, drafter)
    state = steps(drafter, model, 2)[1][-1] if state is None else state
    view = View(state.tokens, state.length, ~state.done, state.cache, max_depth=drafter.depth)
    sampler = Sampler(state.key, state.tokens, state.length, ~state.done, state.sampling)
    return jax.jit(decoder.drafter.propose)(model, state.draft, view, sampler).tree, state


def noisy(drafter):
    """Parameters away from their symmetric start."""
    target = params()["target"]
    own = drafter.bind(TARGET).init_params(jax.random.key(3), target)
    leaves, tree = jax.tree.flatten(own)
    keys = jax.random.split(jax.random.key(4), len(leaves))
    moved = [x + 0.3 * jax.random.normal(k, x.shape) * x.std().clip(0.05) for x, k in zip(leaves, keys, strict=True)]
    return {"target": target, "draft": jax.tree.unflatten(tree, moved)}


@pytest.mark.parametrize("name", ["medusa", pytest.param("eagle3", marks=pytest.mark.slow)])
def test_a_head_in_bfloat16_drafts_for_a_target_in_bfloat16(name):
    """Its state is in its own type from the first step on; the target's features are in float32."""
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16) if x.dtype == jnp.float32 else x, params(name))
    model = tiny.model(TARGET, half["target"])
    texts = [
        [
            record.tokens
            for record in specjax.generate(model, [[1, 2, 3], [5, 6, 7, 8]], drafter=drafter, max_new_tokens=8)
        ]
        for drafter in (None, (DRAFTERS[name], half["draft"]))
    ]
    assert texts[0] == texts[1]


def test_fresh_medusa_heads_are_the_base_head():
    """Blocks start as the identity (bias and kernel 0), kernels as the target's head."""
    drafter, target = Medusa().bind(TARGET), params()["target"]
    h = jax.random.normal(jax.random.key(0), (2, 64))
    base = TARGET.unembed(target, h[:, None])[:, 0]
    heads = drafter.init_params(jax.random.key(1), target)["heads"]
    for head in heads:
        np.testing.assert_allclose(medusa_logits(head, h), base, rtol=1e-5, atol=1e-5)
    assert len(heads) == drafter.heads


@pytest.mark.parametrize("kind", [Medusa, Hydra])
def test_heads_without_an_output_layer_of_their_own_share_the_targets(kind):
    """They draft what heads with copies of it draft, also over a part of the vocabulary; and nothing of it is stored."""
    own, shared = (kind(TREE, heads=3, own_head=own_head).bind(TARGET) for own_head in (True, False))
    model = noisy(shared)
    blocks = model["draft"]
    assert all("kernel" not in head for head in blocks["heads"]) and "kernel" not in blocks
    completed = shared.completed(blocks, model["target"])
    copies = {"heads": [{**head, "kernel": completed["kernel"]} for head in blocks["heads"]]}
    tree, state = propose(shared, {**model, "draft": completed})
    assert np.array_equal(tree.tokens, propose(own, {**model, "draft": copies}, state)[0].tokens)
    ids = np.arange(0, TARGET.vocab_size, 3)
    few = shared.completed({**shared.trimmed(blocks, model["target"], ids)[1]}, model["target"])
    assert few["kernel"].shape[1] == len(ids)
    trimmed = shared.trimmed(completed, model["target"], ids)[1]
    jax.tree.map(np.testing.assert_array_equal, few, trimmed)
    drafted = np.asarray(propose(shared, {**model, "draft": few}, state)[0].tokens[:, 1:])
    assert np.isin(drafted, ids).all()


@pytest.mark.slow
def test_a_medusa_depth_listens_to_its_own_head():
    drafter = Medusa(TREE)
    model = noisy(drafter)
    tree, state = propose(drafter, model)
    heads = list(model["draft"]["heads"])
    heads[0] = {**heads[0], "kernel": jnp.roll(heads[0]["kernel"], 7, axis=1)}
    other, _ = propose(drafter, {**model, "draft": {"heads": heads}}, state)
    depth = np.asarray(tree.depth)[0]
    same_tokens = np.asarray(tree.tokens) == np.asarray(other.tokens)
    assert same_tokens[:, depth >= 2].all() and not same_tokens[0, depth == 1].all()
    for row, text in enumerate(row_texts(state)):
        final = read_text(text, drafter.bind(TARGET).feature_wants).final[0]
        if len(text) > 1:  # the feature whose distribution produced the root
            np.testing.assert_allclose(state.draft.feature[row], final[-2], rtol=1e-3, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("prefix_layer", [False, True])
def test_hydra_heads_see_their_ancestors_and_no_other_node(prefix_layer):
    """Every node's distribution, computed on its own from feature, root and ancestors, gives that node's children."""
    drafter = Hydra(TREE, prefix_layer=prefix_layer)
    model = noisy(drafter)
    tree, state = propose(drafter, model)
    tokens, parents = np.asarray(tree.tokens), TREE.topology.parents
    embed = lambda token: TARGET.embed(model["target"], jnp.asarray([[token]]))[0, 0]
    for row in (0, 1):  # greedy rows
        penalty = float(state.sampling["repetition_penalty"][row])
        if penalty != 1:
            continue
        for node in range(tree.nodes):
            children = [n for n, parent in enumerate(parents) if parent == node]
            if not children:
                continue
            line, at = [], node
            while at >= 0:
                line, at = [embed(tokens[row, at]), *line], parents[at]
            dist = hydra_logits(
                model["draft"]["heads"][len(line) - 1], jnp.concatenate([state.draft.feature[row], *line])
            )
            ranked = np.argsort(-np.asarray(dist), kind="stable")
            assert [tokens[row, c] for c in children] == ranked[[TREE.topology.ranks[c] for c in children]].tolist()


def drafted_lines(tree, state):
    """Of every greedy row without a penalty: each node with children, the tokens from the root to it, and the children."""
    tokens, parents = np.asarray(tree.tokens), TREE.topology.parents
    for row in (0, 1):
        if float(state.sampling["repetition_penalty"][row]) != 1:
            continue
        for node in range(tree.nodes):
            children = [n for n, parent in enumerate(parents) if parent == node]
            line, at = [], node
            while at >= 0:
                line, at = [int(tokens[row, at]), *line], parents[at]
            if children:
                yield row, line, tokens[row, children].tolist(), [TREE.topology.ranks[c] for c in children]


def ranked(dist, ranks):
    return np.argsort(-np.asarray(dist), kind="stable")[np.asarray(ranks)].tolist()


@pytest.mark.slow
def test_clover_mixes_a_nodes_ancestors_one_by_one_into_the_state():
    """Every node's distribution, written out in float64, from what the augmenting block makes of the text."""
    drafter = Clover(TREE).bind(TARGET)
    model = noisy(drafter)
    tree, state = propose(drafter, model)
    own = jax.tree.map(lambda x: np.asarray(x, np.float64), model["draft"])
    embed = lambda token: np.asarray(TARGET.embed(model["target"], jnp.asarray([[token]]))[0, 0], np.float64)
    normed = lambda x, of: x / np.sqrt((x**2).mean() + 1e-6) * of["scale"]
    linear = lambda x, of: x @ of["kernel"] + of["bias"]

    def mixed(h, e):
        next_ = own["next"]
        q, k = linear(normed(h, next_["norm"]), next_["q"]).reshape(8, 8), linear(e, next_["k"]).reshape(8, 8)
        gate = (q * k).sum(-1) / np.linalg.norm(q, axis=-1) / np.linalg.norm(k, axis=-1)
        return h + (gate[:, None] * linear(e, next_["v"]).reshape(8, 8)).reshape(-1)

    mute = {**model["draft"], "next": {**model["draft"]["next"], "v": jax.tree.map(jnp.zeros_like, own["next"]["v"])}}
    texts, seen = row_texts(state), 0
    for row, line, children, ranks in drafted_lines(tree, state):
        h = np.asarray(read_pairs(drafter, {**model, "draft": mute}, texts[row])[0][0, -1], np.float64)
        for token in line:
            h = mixed(h, embed(token))
        block = linear(h, own["blocks"][len(line) - 1])
        out = normed(h + block / (1 + np.exp(-block)), own["head_norm"])
        assert children == ranked(
            TARGET.unembed(model["target"], jnp.asarray(out[None, None], jnp.float32))[0, 0], ranks
        )
        seen += 1
    assert seen


def test_a_fresh_clover_whose_layer_adds_nothing_is_the_targets_head():
    """Its residual blocks start as the identity, its last norm as the target's; values of 0 mix no token in."""
    drafter, target = Clover(TREE).bind(TARGET), params()["target"]
    own = drafter.init_params(jax.random.key(1), target)
    own["next"]["v"] = jax.tree.map(jnp.zeros_like, own["next"]["v"])
    text = tuple(range(3, 12))
    output = read_text(text, drafter.feature_wants | specjax.lm.Wants(logits=True))
    h = drafter.features(output)
    e = jax.random.normal(jax.random.key(2), h.shape)
    for depth in range(drafter.heads):
        h = drafter.head.advance(own, h, e)
        dist = drafter.dist({"target": target, "draft": own}, h, e, depth)
        np.testing.assert_allclose(dist, output.logits, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_a_chimera_node_is_what_its_line_would_be_as_text():
    """The line from the root to a node is written after the text and read at once; features that were not there are hidden."""
    drafter = Chimera(TREE).bind(TARGET)
    model = noisy(drafter)
    tree, state = propose(drafter, model)
    texts, seen = row_texts(state), 0
    for row, line, children, ranks in drafted_lines(tree, state):
        text, late = [*texts[row], *line[1:]], len(line) - 1
        width = len(text) - 1
        if width <= late:
            continue  # a row of one token has no pair
        tokens = jnp.asarray([text])
        final = read_text(tuple(text), drafter.feature_wants).final
        embeds = drafter.embed(model, tokens)
        before = jnp.concatenate([embeds[:, :1], embeds[:, :-1]], axis=1)
        pairs = Block(tokens[:, 1:], jnp.arange(width)[None], jnp.zeros((1,), jnp.int32))
        x, slots = drafter.slots_of(model, drafter.joined(final, embeds, before)[:, :-1], pairs)
        at = jnp.arange(width)
        known = jnp.broadcast_to((at < width - late)[None], (width, width))
        past = at[None] <= at[:, None]
        visible = jnp.repeat(interleaved((known & past)[..., None], past[..., None])[..., 0], 2, axis=0)[None]
        out, _ = drafter.head(model["draft"], x, Block(slots.tokens, slots.positions, slots.length, visible), None)
        both = jnp.concatenate([final[0, width - late - 1], out[0, -1]])
        assert children == ranked(drafter.dist(model["draft"], late, both), ranks)
        seen += 1
    assert seen


def test_hydra_listens_to_the_drafted_token():
    drafter = Hydra(TREE)
    model = noisy(drafter)
    head = model["draft"]["heads"][1]
    x = jax.random.normal(jax.random.key(1), (3 * 64,))
    moved = x.at[2 * 64 :].add(1.0)
    assert not np.allclose(hydra_logits(head, x), hydra_logits(head, moved), atol=1e-3)


@pytest.mark.slow
def test_the_prefix_layer_is_cached_like_one_more_layer():
    drafter, model = DRAFTERS["hydra-prefix"].bind(TARGET), params("hydra-prefix")
    _, states, _ = steps(drafter, model, 4)
    state = states[-1]
    for row, text in enumerate(row_texts(state)):
        count = len(text) - 1
        h, delta = read_pairs(drafter, model, text)
        np.testing.assert_allclose(state.draft.feature[row], h[0, -1], rtol=1e-3, atol=1e-4)
        np.testing.assert_allclose(
            np.asarray(state.draft.cache.key[0])[row, :, :count], delta.key[0][0].swapaxes(0, 1), atol=1e-4
        )


def test_clover_gates_are_cosines():
    drafter = Clover2(TREE).bind(TARGET)
    model = noisy(drafter)
    module = drafter.head.bind(model["draft"])
    x, e = jax.random.normal(jax.random.key(5), (2, 1, 9, 64)) * 10
    for block in (module.first, module.next):
        gate = np.asarray(block.gate(x, e))
        assert gate.shape == (1, 9, 8) and (np.abs(gate) <= 1 + 1e-5).all() and gate.std() > 0.01
        assert np.isfinite(block.gate(jnp.zeros_like(x), jnp.zeros_like(e))).all()


def test_without_values_clover_hears_a_token_in_the_augmenting_block_alone():
    drafter = Clover2(TREE).bind(TARGET)
    own = noisy(drafter)["draft"]
    mute = {**own, "next": {**own["next"], "v": jax.tree.map(jnp.zeros_like, own["next"]["v"])}}
    h, a, b = jax.random.normal(jax.random.key(6), (3, 1, 4, 64))
    np.testing.assert_array_equal(drafter.head.advance(mute, h, a), drafter.head.advance(mute, h, b))
    assert not np.allclose(drafter.head.advance(own, h, a), drafter.head.advance(own, h, b))
    assert not np.allclose(drafter.head.outputs(mute, h, a), drafter.head.outputs(mute, h, b))


@pytest.mark.slow
@pytest.mark.parametrize("drafter", [Medusa(TREE), Hydra(TREE), Clover(TREE), Clover2(TREE), Chimera(TREE)])
def test_noisy_heads_keep_the_text(drafter):
    got, _ = complete(drafter, model=noisy(drafter))
    same(got, plain())


@pytest.mark.parametrize("kind", [Medusa, Hydra, Clover])
def test_a_tree_needs_heads(kind):
    with pytest.raises(ValueError, match="depth 3 needs as many heads, there are 2"):
        kind(TREE, heads=2)
