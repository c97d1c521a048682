"""Parallel prompt decoding: whose slots see what, what a state remembers, and how its trees are found."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.conformance import TARGET, params

from specjax.draft import PPD, Verdict, View
from specjax.draft.ppd import PPDState
from specjax.draft.ppd.trees import parse, search_states, tables, tokens_per_step
from specjax.lm import Block, Output, Wants
from specjax.models.tabular import TabularLM
from specjax.reference import trees
from specjax.sampling import Sampler, SamplingArrays, row_keys

TREES = "3 @ 3 1x2 0; 2 | 1 @ 2x2 1 3; 1 | 2 | 1 @ 0 2 1 3 2"
PAIR = PPD(TREES, ensembles=2).bind(TARGET)
ONE = PPD(TREES).bind(TARGET)
M, B, SIZE = 3, 4, 16
WEIGHTS = params("ppd")["target"]


def view_and_sampler(temperature=0.0):
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 96, (B, SIZE)), jnp.int32)
    length, live = jnp.asarray([5, 1, 9, 7]), jnp.ones(B, bool)
    view = View(tokens, length, live, (), max_depth=3)
    return view, Sampler(
        row_keys(0, "abcd"), tokens, length, live, SamplingArrays.make(B, temperature=[temperature] * B)
    )


def state_of(seed=0, states=(0, 1, 2, 3)):
    logits = jnp.asarray(np.random.default_rng(seed).normal(size=(B, M, 96)), jnp.float32)
    return PPDState(logits, jnp.asarray(states))


@jax.jit
def read(draft, state, view, sampler):
    """One pass of `PAIR` over a cache that holds the text before the root."""
    weights = {"target": WEIGHTS, "draft": draft}
    positions = jnp.broadcast_to(jnp.arange(SIZE)[None], (B, SIZE))
    cache = TARGET.init_cache(B, SIZE)
    delta = TARGET(WEIGHTS, Block(view.tokens, positions, jnp.zeros(B, int)), None, wants=Wants()).delta
    cache = TARGET.commit(cache, delta, None, jnp.zeros(B, int))
    view = dataclasses.replace(view, cache=cache)
    proposal = PAIR.propose(weights, state, view, sampler)
    return proposal, TARGET(WEIGHTS, proposal.block(view), cache, wants=PAIR.wants)


def embeddings(seed):
    return {"embeddings": jnp.asarray(np.random.default_rng(seed).normal(size=(M, 2, 64)), jnp.float32)}


@pytest.mark.slow
def test_real_slots_are_bit_identical_with_other_prompt_embeddings():
    view, sampler = view_and_sampler()
    first, second = (read(embeddings(seed), state_of(), view, sampler)[1].logits for seed in (0, 1))
    assert (first[:, : PAIR.nodes] == second[:, : PAIR.nodes]).all()
    assert (first[:, PAIR.nodes :] != second[:, PAIR.nodes :]).any(axis=(1, 2)).all()


@jax.jit
def line_logits(tokens, embeddings, embedded, length):
    block = Block(tokens, jnp.arange(SIZE)[None], jnp.zeros(1, jnp.int32), None, embeddings[None], embedded[None])
    logits = TARGET(WEIGHTS, block, None, wants=Wants(logits=True)).logits
    return logits[0, length - 1]


def test_a_prompt_slot_says_what_the_prompt_tokens_say_after_its_nodes_path():
    """Every used slot against a plain pass over: text, the node's path, its prompt tokens so far."""
    view, sampler = view_and_sampler()
    draft = embeddings(2)
    proposal, output = read(draft, state_of(), view, sampler)
    checked = 0
    for row in range(B):
        tree, slot = parse(TREES)[row], PAIR.nodes
        paths = trees.path_tokens(proposal.tree.tokens[row], np.asarray(proposal.tree.parent)[row], M)
        for node, count in enumerate(tree.prompts):
            for step in range(count):
                for member in range(2):
                    text = view.tokens[row, : view.length[row]].tolist() + [t for t in paths[node] if t >= 0]
                    width = len(text) + step + 1
                    tokens = jnp.asarray([np.resize(text, SIZE)])
                    place = jnp.arange(SIZE) - len(text)
                    inputs = draft["embeddings"][jnp.clip(place, 0, M - 1), member]
                    want = line_logits(tokens, inputs, (place >= 0) & (place <= step), width)
                    np.testing.assert_allclose(output.logits[row, slot], want, atol=2e-4)
                    slot, checked = slot + 1, checked + 1
    assert checked == 2 * sum(sum(tree.prompts) for tree in parse(TREES))


def test_a_rows_first_tree_is_made_of_prompt_tokens_behind_its_last_token_but_one():
    """Their distributions are those of a plain pass over the text without its last token; a row of one token has none
    to read."""
    view, sampler = view_and_sampler()
    draft, fresh = embeddings(2), state_of(states=(-1, -1, -1, 2))
    proposal, _ = read(draft, fresh, view, sampler)
    assert proposal.draft.state.tolist() == [3, 0, 3, 2]  # the second row is one token long, the last had begun
    np.testing.assert_array_equal(proposal.draft.logits[3], fresh.logits[3])
    for row in (0, 2):
        text = view.tokens[row, : view.length[row] - 1].tolist()
        tokens, place = jnp.asarray([np.resize(text, SIZE)]), jnp.arange(SIZE) - len(text)
        for step in range(M):
            said = []
            for member in range(2):
                inputs = draft["embeddings"][jnp.clip(place, 0, M - 1), member]
                said.append(line_logits(tokens, inputs, (place >= 0) & (place <= step), len(text) + step + 1))
            np.testing.assert_allclose(proposal.draft.logits[row, step], sum(said) / 2, atol=2e-4)
        assert proposal.tree.valid[row].sum() == len(parse(TREES)[3].prompts)


def test_nodes_are_the_candidates_of_their_depth_and_state():
    view, sampler = view_and_sampler()
    state = state_of()
    tree = read(embeddings(0), state, view, sampler)[0].tree
    best = np.argsort(-np.asarray(state.logits), axis=-1)
    for row, shape in enumerate(parse(TREES)):
        topology, count = shape.topology, len(shape.prompts)
        want = [
            best[row, depth - 1, rank] if depth else view.root[row]
            for depth, rank in zip(topology.depths, topology.ranks, strict=True)
        ]
        assert tree.tokens[row, :count].tolist() == want
        assert tree.parent[row, :count].tolist() == list(topology.parents)
        assert tree.depth[row, :count].tolist() == list(topology.depths)
        assert tree.valid[row].tolist() == [i < count for i in range(PAIR.nodes)]


def test_candidates_are_ranked_with_the_positions_own_noise():
    view, sampler = view_and_sampler(1.5)
    state = state_of(states=(3, 3, 3, 3))
    tree = read(embeddings(0), state, view, sampler)[0].tree
    for depth in range(M):
        scores = sampler.scores(state.logits[:, depth, None], depth)[:, 0]
        first = tree.depth[0].tolist().index(depth + 1)
        assert tree.tokens[:, first].tolist() == jnp.argmax(scores, axis=-1).tolist()
    assert (tree.tokens != read(embeddings(0), state, *view_and_sampler())[0].tree.tokens).any()


def test_a_candidate_that_cannot_be_drawn_takes_its_children_along():
    view, sampler = view_and_sampler()
    state = state_of(states=(2, 2, 2, 2))
    only = jnp.where(jnp.arange(96)[None] == 7, 0.0, -jnp.inf)
    state = dataclasses.replace(state, logits=state.logits.at[:2, 0].set(only))
    nothing = state.logits.at[2, 0].set(-jnp.inf).at[3].set(jnp.nan)
    tree = read(embeddings(0), dataclasses.replace(state, logits=nothing), view, sampler)[0].tree
    # the tree of state 2: root, ranks 0 and 1, then a child of rank 0
    assert tree.valid[:, :4].tolist() == [[True, True, False, True]] * 2 + [[True, False, False, False]] * 2


def observed(drafter, state, leaf, logits, depth):
    tree = parse(TREES)
    path = jnp.full((B, drafter.depth + 1), -1).at[jnp.arange(B), jnp.asarray(depth)].set(jnp.asarray(leaf))
    assert all(leaf[i] < len(tree[int(state.state[i])].prompts) for i in range(B))
    verdict = Verdict(path, jnp.asarray(depth), jnp.zeros(B, int), jnp.ones(B, int))
    return drafter.observe({}, state, None, Output((), logits=logits), verdict)


@pytest.mark.parametrize("drafter", [ONE, PAIR], ids=["one", "pair"])
def test_the_accepted_nodes_prompts_make_the_next_state(drafter):
    """Every node of every state: its count of prompt tokens, and their logits averaged over the ensembles."""
    members = drafter.ensembles
    width = drafter.nodes + drafter.slots
    logits = jnp.asarray(np.random.default_rng(3).normal(size=(B, width, 96)), jnp.float32)
    for number, tree in enumerate(parse(TREES)):
        for leaf, count in enumerate(tree.prompts):
            depth = tree.topology.depths[leaf]
            new = observed(drafter, state_of(states=(number,) * B), [leaf] * B, logits, [depth] * B)
            assert new.state.tolist() == [count] * B
            first = drafter.nodes + members * sum(tree.prompts[:leaf])
            want = logits[:, first : first + members * count].reshape(B, count, members, 96).mean(axis=2)
            np.testing.assert_allclose(new.logits[:, :count], want, rtol=1e-6, atol=1e-6)
    mixed = observed(drafter, state_of(), [0, 2, 3, 4], logits, [0, 1, 2, 3])
    assert mixed.state.tolist() == [3, 1, 3, 2]


def test_padding_is_computed_and_means_nothing():
    table = tables(TREES, 2)
    assert table.real.sum(axis=1).tolist() == [1, 4, 4, 5] and table.step.shape == (4, 16)
    used = [2 * sum(tree.prompts) for tree in parse(TREES)]
    for state, count in enumerate(used):
        among = table.visible[state, :, 5:]
        assert not among[:count, count:].any() and not among[count:, :count].any()
        assert among.diagonal().all()
    assert (table.parent[:, 1:] >= 0).all() and (table.position >= 1).all()


def test_steps_in_the_long_run_match_a_simulation():
    rng = np.random.default_rng(4)
    accuracy = np.asarray([[0.5, 0.2, 0.1], [0.4, 0.2, 0.1], [0.3, 0.2, 0.1]])
    text = search_states(accuracy, 5, 7)
    shapes = parse(text)
    state, tokens, steps = 0, 0, 20000
    for _ in range(steps):
        topology, node = shapes[state].topology, 0
        while True:
            rank = (
                rng.choice(4, p=[*accuracy[topology.depths[node]], 1 - accuracy[topology.depths[node]].sum()])
                if topology.depths[node] < 3
                else 3
            )
            below = [i for i, (p, r) in enumerate(zip(topology.parents, topology.ranks, strict=True))
                     if p == node and r == rank]  # fmt: skip
            tokens += 1
            if not below:
                break
            node = below[0]
        state = shapes[state].prompts[node]
    assert tokens / steps == pytest.approx(tokens_per_step(text, accuracy), rel=0.02)


def test_searched_states_keep_to_their_room_and_more_room_is_no_worse():
    accuracy = np.asarray([[0.5, 0.15, 0.08, 0.04], [0.35, 0.1, 0.06, 0.04], [0.3, 0.1, 0.06, 0.04]])
    speeds = []
    for nodes, slots in ((4, 5), (6, 9), (8, 14), (12, 30)):
        text = search_states(accuracy, nodes, slots)
        shapes = parse(text)
        assert max(len(tree.prompts) for tree in shapes) <= nodes
        assert max(sum(tree.prompts) for tree in shapes) <= slots
        assert all(tree.prompts[0] for tree in shapes)  # decoding stops at the root most often
        speeds.append(tokens_per_step(text, accuracy))
    assert speeds == sorted(speeds)
    everywhere = "3 @ 2x4; 3 @ 2x4"
    fewer = "3 @ 2 1x2 0; 3 @ 2 1x2 0"
    assert tokens_per_step(fewer, accuracy) < tokens_per_step(everywhere, accuracy)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("2 @ 1x2", "3 nodes, got 2"),
        ("2 @ 2 1 1", "from 0 to 1"),
        ("2 | 1 @ 1x4", "state 1 must have 1 to 1 levels"),
        ("@ 1", "state 1 must have 1 to 1 levels, got 0"),
        ("2 @ 1 a 1", "'a'"),
        ("x @ 1", "'x'"),
    ],
)
def test_lines_that_are_no_trees_are_refused(text, message):
    with pytest.raises(ValueError, match=message):
        PPD(text)


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="2 nodes and 3 prompt slots"):
        search_states([[0.5, 0.1]] * 3, 4, 2)
    with pytest.raises(ValueError, match="ensembles"):
        PPD(ensembles=0)
    with pytest.raises(ValueError, match="only 3 tokens"):
        PPD(TREES.replace("3 @ 3 1x2 0", "4 @ 3 1x2 0x2")).bind(TabularLM(3))
    drafter = PPD().bind(TARGET)
    fresh = drafter.init_params(jax.random.key(0), WEIGHTS)
    assert drafter.init({"target": WEIGHTS, "draft": fresh}, 2, 8).logits.shape == (2, drafter.prompts, 96)
    with pytest.raises(ValueError, match=r"\(3, 1, 64\).*need \(2, 1, 64\)"):
        drafter.init({"target": WEIGHTS, "draft": {"embeddings": jnp.zeros((3, 1, 64))}}, 2, 8)
    with pytest.raises(ValueError, match=r"need \(2, 1, 64\)"):
        drafter.init({"target": WEIGHTS, "draft": {"embeddings": jnp.zeros((2, 1, 32))}}, 2, 8)
