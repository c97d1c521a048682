"""Everything over models with running states, a line of `support/hybrids.py` for every kind of mixer: every drafter, search,
step, pair and cache writes the text of passes that read all of it anew."""

import dataclasses
import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from support.conformance import but_slow, texts
from support.hybrids import MIXERS, MODELS, Reread
from support.small_target import (
    CAPACITY,
    HEATS,
    NAMES,
    NEW,
    PROMPTS,
    begin,
    eos_of,
    first_lines,
    free_texts,
    line_of,
    params_of,
    plain,
    said_by,
    scores_of,
    target_of,
    weights,
    with_layers,
)
from support.two_models import LETTERS, Letters
from support.verifiers import expander_for, verifier_of

import specjax
from specjax import decoder as decoding
from specjax.assembly.registry import VERIFIERS
from specjax.diffusion import diffusion
from specjax.draft import DiffusionDrafter, ModelDrafter
from specjax.expand import Chain
from specjax.lm import Block, Wants
from specjax.models import LlamaLM, Model, quantised
from specjax.models.contrastive import Contrastive
from specjax.models.dola import Dola
from specjax.models.mixers import committed
from specjax.sampling import row_keys
from specjax.search import AStar, EntropyAdaptive, Ralm, SelfAgreement, SpecReason, SpeculativeThinking
from specjax.search.stepwise import Asked
from specjax.search.writer import Writer
from specjax.sharding.mesh import make_mesh
from specjax.state import Finish

READS_BOTH_WAYS = ("diffusion_draft", "diffuspec", "self_diffusion")
"""Drafters whose own model, or whose target, sees a text in both directions."""


ELSEWHERE = ("none", "forced", "iad")
"""Drafters that these prompts give nothing to draft right: without a constraint, or without a copy of the prompt."""

OVER = {
    "stand": "short_conv", "sam": "gated_delta", "aded": "gated_delta", "lookahead": "gated_delta", "spec_reason": "short_conv",
}  # fmt: skip
"""Lines that draft right, or go back, over this mixer, and not over the one whose turn it is."""


REFUSED = ("gad", "magicdec")
"""Lines that take their turn and are not run: `gad`'s model has the target's layers here, and must read both ways;
`magicdec` reads slots alone."""


def pairs(lines, *fast):
    """Every line with one kind of mixer, in turn, and every kind with as many lines."""
    kinds = itertools.cycle(MIXERS)
    marks = lambda name: () if name in fast else pytest.mark.slow
    own = [(name, kind) for name, kind in zip(lines, kinds, strict=False) if name not in REFUSED]
    return [pytest.param(OVER.get(name, kind), name, marks=marks(name), id=f"{name}") for name, kind in own]


def finished(kind, name, mesh=None, **options):
    """A batch of three rows, decoded by a drafter over a kind of mixer, and the target."""
    target = target_of(name, MODELS[kind])
    drafter = line_of(name, target)
    model = params_of(drafter, target, said_by(target))
    return decoded(target, drafter, model, mesh=mesh, eos=eos_of(target), **options), target


def decoded(target, drafter, model, verifier=None, mesh=None, **options):
    """The last state of three rows."""
    decoder = dataclasses.replace(specjax.speculative(target, drafter, verifier, mesh=mesh), whole=True)
    own = decoder.verifier.init_params(jax.random.key(9), model["target"])
    model = model if own is None else model | {"verify": own}
    if mesh is not None:
        model = jax.device_put(model, decoder.param_shardings(model))
    return decoding.run(decoder, model, begin(decoder, model, **options))


def ended(state):
    return list(zip(texts(state), map(Finish, state.finish.tolist()), strict=True))


LAST = ("main_experts",)
"""Lines whose turn comes after the others', so that these stay over the mixers that they had."""
DRAFTED = [
    *(name for name in first_lines() if name.partition("-")[0] not in (*READS_BOTH_WAYS, *LAST)),
    *LAST,
]


@pytest.mark.parametrize(("kind", "name"), pairs(DRAFTED, "token_recycling"))
def test_a_drafter_writes_plain_decodings_text(kind, name):
    state, target = finished(kind, name)
    assert ended(state) == plain(target)
    assert name in ELSEWHERE or np.sum(state.stats.accepted, axis=0)[1:].sum(), "nothing is drafted right"


@pytest.mark.parametrize(("kind", "name"), pairs(VERIFIERS, "typical"))
def test_a_verifier_leaves_the_states_of_what_it_wrote(kind, name):
    """One pass over each row's text makes the same states, whatever was rejected. A greedy row is plain decoding's, if the
    verifier keeps that, and all rows if it declares the same text."""
    target, verifier = MODELS[kind], verifier_of(name)
    drafter = ModelDrafter(with_layers(target, 1), expander_for(verifier))
    model, rng = params_of(drafter, target, ()), np.random.default_rng(0)
    blurred = jax.tree.map(lambda x: x + np.float32(0.3 * x.std()) * rng.normal(size=x.shape), model["draft"])
    model["draft"] = jax.tree.map(lambda x: x.astype(jnp.float32), blurred)
    state = decoded(target, drafter, model, verifier)
    accepted = np.sum(state.stats.accepted, axis=0)
    assert accepted[1:].sum() and accepted[:-1].sum(), "nothing is accepted, or nothing rejected"
    same = len(PROMPTS) if VERIFIERS[name].guarantee == "same text" else int(verifier.keeps_greedy)
    assert texts(state)[:same] == [list(text) for text in free_texts(target)[:same]]
    read = state.length - 1
    at = jnp.broadcast_to(jnp.arange(state.tokens.shape[1])[None], state.tokens.shape)
    block = Block(state.tokens, at, jnp.zeros_like(read))
    cache = target.init_cache(*state.tokens.shape)
    delta = target(model["target"], block, cache, wants=Wants()).delta
    wanted = target.states(target.commit(cache, delta, None, jnp.zeros_like(read), read))
    for own, other in zip(*map(jax.tree.leaves, (target.states(state.cache), wanted)), strict=True):
        np.testing.assert_allclose(own, other, atol=1e-4 * float(np.abs(other).max()))


WARPED = specjax.Sampling(
    temperature=1.0, top_k=12, top_p=0.9, min_p=0.01, repetition_penalty=1.2, frequency_penalty=0.3, dry_multiplier=1.0,
    dry_sequence_breakers=[4], mirostat=2,
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("kind", MIXERS)
def test_sampled_texts_of_a_seed(kind):
    """Filters and penalties of a tree's nodes are those of plain decoding that reads each text anew."""
    prompts = [list(prompt) for prompt in PROMPTS]
    said = lambda anew, how: [
        own.tokens
        for own in specjax.generate(
            models(kind, 2, anew), prompts, decode=how, max_new_tokens=16, seed=3, progress=False, sampling=WARPED
        )
    ]
    assert said(False, "speculate:drafter=token_recycling") == said(True, "plain")


STEERED = {
    "dola": lambda lm: (Dola(lm, (-1, 0), 0.2), weights(lm)),
    "contrastive": lambda lm: (
        Contrastive(lm, with_layers(lm, 1), 0.3, 0.8),
        {"lm": weights(lm), "amateur": weights(lm) | {"layers": {0: weights(lm)["layers"][0]}}},
    ),
}
"""By steer, the target that it makes of a model, and its parameters."""


@pytest.mark.slow
@pytest.mark.parametrize("kind", MIXERS)
@pytest.mark.parametrize("steer", STEERED)
def test_a_steered_text_is_that_of_a_whole_pass(kind, steer):
    """Every token is the best of its scores and its place's noise, in one pass over the whole text."""
    (target, params), drafter = STEERED[steer](MODELS[kind]), line_of("token_recycling")
    state = decoded(target, drafter, {"target": params, "draft": None})
    right = np.sum(state.stats.accepted, axis=0)[1:].sum()
    assert right or (steer, kind) == ("dola", "mamba"), "nothing is drafted right"  # whose texts repeat nothing
    scores = np.asarray(scores_of(target, params, state.tokens, row_keys(0, NAMES), jnp.asarray(HEATS)))
    for row, (prompt, text) in enumerate(zip(PROMPTS, texts(state), strict=True)):
        assert text == scores[row, len(prompt) - 1 : len(prompt) - 1 + NEW].argmax(axis=-1).tolist()
    assert texts(state) != [list(text) for text in free_texts(MODELS[kind])]


@pytest.mark.slow
@pytest.mark.parametrize("kind", MIXERS)
def test_rings_beside_states(kind):
    """A layer with a window of three under one with states, in a ring that texts go round."""
    config, window = MODELS[kind].config, lambda layer: dataclasses.replace(layer.mixer, window=3)
    first, last = config.layers
    target = LlamaLM(dataclasses.replace(config, layers=(first, dataclasses.replace(last, mixer=window(last)))))
    drafter = line_of("token_recycling")
    ring = dataclasses.replace(target, ahead=8)
    assert ring.init_cache(1, CAPACITY).key[-1].shape != target.init_cache(1, CAPACITY).key[-1].shape
    state = decoded(ring, drafter, params_of(drafter, target, said_by(target)), eos=eos_of(target))
    assert ended(state) == plain(target)


@pytest.mark.slow
@pytest.mark.parametrize("kind", MIXERS)
def test_a_shared_prefix_is_read_once(kind):
    alike = tuple((*PROMPTS[0][:5], *prompt[:3]) for prompt in ((), *PROMPTS[1:]))
    shared, whole = (ended(finished(kind, "token_recycling", prompts=alike, prefix=n)[0]) for n in (5, 0))
    assert shared == whole


@pytest.mark.slow
@pytest.mark.parametrize("kind", MIXERS)
@pytest.mark.parametrize("axes", ("data=2,model=4", "data=4,model=2"))
def test_a_mesh_writes_the_same_text(kind, axes):
    state, target = finished(kind, "prompt_lookup", mesh=make_mesh(axes), rows=(0, 1, 2), count=4)
    assert ended(state)[:3] == plain(target)


@functools.cache
def models(kind, layers=2, anew=False):
    """A model of a kind, as it is or one that reads every text anew; with one layer, the draft of the other."""
    lm, params = with_layers(MODELS[kind], layers), weights(MODELS[kind])
    params = {**params, "layers": {i: params["layers"][i] for i in range(layers)}}
    own = Reread(lm) if anew else lm
    return Model(own, params, Words(), (7,), kind, None, np.dtype("float32"))


class Words(Letters):
    """Letters by their ids, as soft thinking asks for them."""

    def get_vocab(self):
        return {letter: number for number, letter in enumerate(LETTERS)}


class First:
    """Retrieves the first document; every second guess is another, so that texts go back to what the first was read with."""

    def __call__(self, queries, k):
        return [[0, 1, 2][:k] for _ in queries]

    def among(self, queries, documents):
        return [len(query) // 3 % 2 for query in queries]


DRAWN = {"temperature": 1.0}
WAYS = {
    "beam": lambda small: ("beam:num_beams=3", {}),
    "diverse_beam": lambda small: ("diverse_beam:num_beams=4,num_beam_groups=2,diversity_penalty=0.5", {}),
    "stochastic_beam": lambda small: ("stochastic_beam:stochastic_beams=3", DRAWN),
    "superposed": lambda small: ("superposed", {}),
    "asap": lambda small: ("asap:samples=3,nodes=32", DRAWN),
    "smc": lambda small: ("smc:particles=2", DRAWN),
    "soft_thinking": lambda small: ("soft_thinking", DRAWN),
    "entropy_adaptive": lambda small: (EntropyAdaptive(small=small, threshold=1.0, window=2, least=1, block=4), {}),
    "astar": lambda small: (AStar(2, 5, 4, separator=(22, 17, 4), step_tokens=4), DRAWN),
    "spec_reason": lambda small: (SpecReason(small, 0.1, "likelihood", "nnm", separator=(22, 4), step_tokens=4), {}),
    "speculative_thinking": lambda small: (
        SpeculativeThinking(small=small, trigger=(22, 17, 4), peek=3, turn=4, help="ab", begin=2, always=False),
        {},
    ),
    "self_agreement": lambda small: (
        SelfAgreement(2, before="n", each="m{answer}", after="l", reply="k{answer}"),
        DRAWN,
    ),
    "ralm": lambda small: (
        Ralm([[3, 4], [6, 1, 5], [2]], First(), stride=3, ahead=4, document_tokens=8, separator=""),
        {},
    ),
    "guidance": lambda small: ("plain:steer=guidance:scale=2", {}),
    "completions": lambda small: ("plain", DRAWN | {"num_return_sequences": 2}),
    "refilled": lambda small: ("speculate:drafter=none", DRAWN | {"batch_size": 2}),
    "hide_message": lambda small: ("hide_message:message=a", DRAWN),
}
"""Ways to decode and their options."""


def said(way, kind, anew):
    how, options = WAYS[way](models(kind, 1, anew))
    prompts = [list(prompt) for prompt in PROMPTS] * (1 + (way == "refilled"))
    prompts = [Words().decode(prompt) for prompt in prompts] if way == "self_agreement" else prompts
    found = specjax.generate(models(kind, 2, anew), prompts, decode=how, max_new_tokens=10, progress=False, **options)
    return [own.tokens for own in found]


GOES_BACK = ("ralm", "spec_reason", "speculative_thinking")


@pytest.mark.parametrize(("kind", "way"), pairs(WAYS))
def test_a_way_to_decode_writes_what_passes_over_the_whole_text_say(kind, way, monkeypatch):
    """Those that go back do so."""
    back, again = [], Writer._again
    monkeypatch.setattr(
        Writer, "_again", lambda self, shorter: (back.append(self.length - shorter), again(self, shorter))
    )
    assert said(way, kind, False) == said(way, kind, True)
    assert bool(back) == (way in GOES_BACK)


@pytest.mark.slow
@pytest.mark.parametrize("kind", MIXERS)
def test_rows_go_back_to_any_length(kind):
    """To within what was written last, to what was read before that, and to a prompt's beginning; the others stay."""
    heard = []
    for anew in (False, True):
        model = models(kind, 2, anew)
        asked = Asked.of([model], [list(prompt) for prompt in PROMPTS], 40, 0, {})
        writer = Writer(model, 3, asked, (), room=64)
        writer.enter(asked)
        begin = writer.length.copy()
        writer.write(np.ones(3, bool), 6)
        writer.read([[3, 4, 5], [6], []])
        for back in (writer.length - [1, 0, 2], begin + [3, 2, 6], begin - [4, 0, 3], np.asarray([1, 9, 2])):
            writer.back(back)
            said = writer.read([[1, 2], [], [3]])
            heard.append([x for row in said.logprobs for x in row])
        heard.append(np.concatenate([np.asarray(x) for x in writer.write(np.ones(3, bool), 5)]))
    for own, wanted in zip(heard[:5], heard[5:], strict=True):
        np.testing.assert_allclose(own, wanted, atol=1e-4)


def tree_after(lm, params, cache, tokens, length):
    """A root with two branches of two nodes, after `length` committed tokens."""
    parent = [-1, 0, 0, 1, 2]
    visible = np.eye(5, dtype=bool)
    for node in range(1, 5):
        visible[node] |= visible[parent[node]]
    depth = jnp.asarray([[0, 1, 1, 2, 2]])
    block = Block(tokens, length[:, None] + depth, length, visible=jnp.asarray(visible)[None])
    return lm(params, block, cache, wants=Wants(logits=True))


@pytest.mark.parametrize("kind", MIXERS)
def test_a_rejected_node_leaves_nothing(kind):
    """Large numbers in what it would have added change no bit of the state, and a row without tokens keeps its own."""
    lm, params = MODELS[kind], weights(MODELS[kind])
    rng, length = np.random.default_rng(0), jnp.asarray([4, 4], jnp.int32)
    text, nodes = jnp.asarray(rng.integers(0, 24, (2, 4))), jnp.asarray(rng.integers(0, 24, (2, 5)))
    start = lm.init_cache(2, 32)

    @jax.jit
    def after(params, poison):
        at = jnp.broadcast_to(jnp.arange(4)[None], text.shape)
        read = lm(params, Block(text, at, jnp.zeros(2, jnp.int32)), start, wants=Wants()).delta
        cache = lm.commit(start, read, None, jnp.zeros(2, jnp.int32), length)
        delta = tree_after(lm, params, cache, nodes, length).delta
        rejected = jnp.asarray([False, True, False, True, False])
        spoil = lambda x: jnp.where(poison & rejected.reshape(1, 5, *[1] * (x.ndim - 2)), 1e6, x)
        delta = dataclasses.replace(delta, states=jax.tree.map(spoil, delta.states))
        path = jnp.asarray([[0, 2, 4], [0, 1, 3]])
        return lm.states(cache), lm.states(lm.commit(cache, delta, path, length, jnp.asarray([3, 0])))

    before, kept = after(params, False)
    _, spoilt = after(params, True)
    for old, new, dirty in zip(*map(jax.tree.leaves, (before, kept, spoilt)), strict=True):
        np.testing.assert_array_equal(new, dirty)
        np.testing.assert_array_equal(new[1], old[1])
        assert not np.array_equal(new[0], old[0])


def random_trees(rng, rows, nodes):
    """Which nodes each node follows, `[B, T, T]`, and a path from a root in each tree: its nodes and how many they are."""
    visible, path, count = (
        np.zeros((rows, nodes, nodes), bool),
        np.zeros((rows, nodes), np.int32),
        np.zeros(rows, np.int32),
    )
    for row in range(rows):
        for node in range(nodes):
            parent = rng.integers(-1, node)
            visible[row, node] = visible[row, parent] if parent >= 0 else False
            visible[row, node, node] = True
        found = np.flatnonzero(visible[row, rng.integers(nodes)])
        path[row, : len(found)], count[row] = found, len(found)
    return visible, path, count


@pytest.mark.slow
@pytest.mark.parametrize("kind", MIXERS)
def test_paths_of_ten_thousand_trees_are_texts(kind):
    """What a path's nodes get, and the state after it, are those of its tokens one after the other."""
    mixer, rows, nodes, width = MIXERS[kind], 1000, 12, 32
    graph, params = nnx.split(mixer.build(width, jnp.float32, nnx.Rngs(0)))
    spread = lambda at, x: jax.random.normal(jax.random.key(at), x.shape) / 3
    params = jax.tree.unflatten(
        jax.tree.structure(params), map(spread, *zip(*enumerate(jax.tree.leaves(params)), strict=True))
    )

    def mixed(x, visible, state):
        zeros = jnp.zeros(x.shape[:2], jnp.int32)
        block = Block(zeros, zeros, jnp.full(len(x), 5, jnp.int32), visible=visible)
        return nnx.merge(graph, params)(x, None, block, state, None, zeros)

    @jax.jit
    def compared(x, state, visible, path, count):
        out, delta = mixed(x, visible, state)
        after, one = (
            committed(mixer, state, delta, path, jnp.zeros(rows, jnp.int32), count),
            jnp.ones((rows, 1, 1), bool),
        )

        def step(now, at):
            token = jnp.take_along_axis(x, path[:, at, None, None], axis=1)
            got, own = mixed(token, one, now)
            return mixer.commit(now, own, (at < count).astype(jnp.int32)), got[:, 0]

        last, got = jax.lax.scan(step, state, jnp.arange(nodes))
        wanted = jnp.take_along_axis(out, path[:, :, None], axis=1)
        real = (jnp.arange(nodes)[None] < count[:, None])[:, :, None]
        far = lambda a, b: jnp.max(jnp.abs(a - b)) / jnp.max(jnp.abs(b))
        apart = [far(a, b) for a, b in zip(jax.tree.leaves(after), jax.tree.leaves(last), strict=True)]
        return jnp.max(jnp.stack(apart)), far(jnp.where(real, wanted, 0), jnp.where(real, got.swapaxes(0, 1), 0))

    rng = np.random.default_rng(0)
    blank = mixer.init(width, rows, jnp.float32)
    for _ in range(10):
        state = jax.tree.map(lambda leaf: rng.normal(size=leaf.shape).astype(np.float32), blank)
        x = rng.normal(size=(rows, nodes, width)).astype(np.float32)
        assert max(map(float, compared(x, state, *random_trees(rng, rows, nodes)))) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("kind", MIXERS)
def test_a_long_text_in_one_block_is_that_of_small_blocks(kind):
    """Longer than what a mixer reads at once."""
    lm, params = MODELS[kind], weights(MODELS[kind])
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 24, (2, 150)))

    @functools.partial(jax.jit, static_argnums=0)
    def read(size, params):
        cache, made = lm.init_cache(2, 160), []
        for first in range(0, 150, size):
            part, begin = tokens[:, first : first + size], jnp.full(2, first, jnp.int32)
            at = jnp.broadcast_to(first + jnp.arange(part.shape[1])[None], part.shape)
            out = lm(params, Block(part, at, begin), cache, wants=Wants(logits=True))
            cache = lm.commit(cache, out.delta, None, begin, jnp.full(2, part.shape[1], jnp.int32))
            made.append(out.logits)
        return jnp.concatenate(made, axis=1), cache.states

    (whole, state), (small, after) = read(150, params), read(15, params)
    np.testing.assert_allclose(whole, small, atol=1e-4)
    for a, b in zip(*map(jax.tree.leaves, (state, after)), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5 * float(np.abs(b).max()))


@pytest.mark.slow
@pytest.mark.parametrize("kind", MIXERS)
def test_a_long_block_after_uncommitted_tokens(kind):
    """Gets what it gets after committed ones; no array of all pairs of its tokens is made."""
    mixer, size, width = MIXERS[kind], 150, 32
    made = mixer.build(width, jnp.float32, nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(0), (2, 3 + size, width))

    def passed(x, state, past=None):
        zeros = jnp.zeros(x.shape[:2], jnp.int32)
        return made(x, None, Block(zeros, zeros, jnp.zeros(2, jnp.int32)), state, past, zeros)

    def both(x):
        start = mixer.init(width, 2, jnp.float32)
        _, past = passed(x[:, :3], start)
        return passed(x[:, 3:], start, past)[0], passed(x[:, 3:], mixer.commit(start, past, jnp.full(2, 3)))[0]

    own, wanted = jax.jit(both)(x)
    np.testing.assert_allclose(own, wanted, atol=1e-5 * float(np.abs(wanted).max()))
    text = str(jax.make_jaxpr(both)(x))
    assert not re.search(rf"\[2,(\d+,)*{size},({size}|{size + 3})\b", text)


@pytest.mark.slow
@pytest.mark.parametrize("kind", MIXERS)
def test_texts_with_a_cache_of_eight_bits(kind):
    """Drafts change nothing, whatever the cache keeps."""
    eight = dataclasses.replace(models(kind).lm, cache_dtype="int8")
    small = dataclasses.replace(models(kind), lm=eight)
    prompts = [list(prompt) for prompt in PROMPTS]
    said = lambda line: specjax.generate(small, prompts, decode=line, max_new_tokens=10, progress=False)
    drafted = [own.tokens for own in said("speculate:drafter=token_recycling")]
    assert drafted == [own.tokens for own in said("plain")]


@pytest.mark.parametrize("kind", but_slow(MIXERS, "short_conv"))
def test_weights_of_eight_bits(kind):
    """Products get them, and taps of convolutions stay plain; the logits of a text are nearly the same."""
    own = models(kind)
    small = quantised(own, "int8")
    tokens = jnp.asarray([PROMPTS[0]])
    at = jnp.arange(tokens.shape[1])[None]
    read = lambda one: (
        one.lm(one.params, Block(tokens, at, jnp.zeros(1, jnp.int32)), None, wants=Wants(logits=True)).logits
    )
    plain, got = jax.jit(lambda: (read(own), read(small)))()
    assert 0 < np.abs(got - plain).max() < 0.25 * np.abs(plain).max()


@pytest.mark.parametrize("kind", MIXERS)
def test_what_reads_both_ways_or_forgets_is_refused_when_it_is_made(kind):
    lm = MODELS[kind]
    both = "a diffusion model reads a text both ways, and layers with .* read it from left to right"
    with pytest.raises(ValueError, match=both):
        specjax.speculative(lm, DiffusionDrafter(lm, 5, Chain(2)))
    with pytest.raises(ValueError, match=both):
        diffusion(lm, 5)
    with pytest.raises(ValueError, match="must do so by plain attention, and this model has layers with "):
        specjax.generate(models(kind), [[1, 2]], decode="plain:cache=gear", max_new_tokens=2)
