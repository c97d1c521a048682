"""Mamba and Mamba-2 under trees: outputs and states are those of decoding a path token by token, in transformers and here."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType
from support.conformance import Rows, start, texts
from support.margin import Margin, teacher_forced
from support.random_weights import drawn

import specjax
from specjax.draft import TokenRecycling
from specjax.lm import Block
from specjax.models.mixers import committed
from specjax.models.norms import NormConfig
from specjax.models.states import mamba, paths
from specjax.models.states.mamba import MambaConfig
from specjax.models.states.mamba2 import Mamba2Config

FAMILIES = ("mamba", "falcon_mamba", "mamba2", "jamba", "bamba", "granite4_h", "falcon_h1", "nemotron_h")
MIXERS = {
    "mamba": MambaConfig(10, 3, 4, 3, bias=True, norm=NormConfig(1e-5)),
    "mamba2": Mamba2Config(4, 3, 5, 2, scales=(0.9, 1.1, 0.7, 1.3, 0.8), time_step_limit=(0.05, 1.5)),
}
WIDTH, NODES, ROWS = 6, 12, 1500


def made(name):
    """A mixer's functions of parameters and, by jit, of a block `[B, T, E]`."""
    graph, params = nnx.split(MIXERS[name].build(WIDTH, jnp.float32, nnx.Rngs(0)))
    return graph, jax.tree.map(jnp.asarray, drawn(params, seed=4))


def passed(graph, params, x, state, visible=None, past=None):
    size = x.shape[1] + (0 if past is None else jax.tree.leaves(past)[0].shape[1])
    block = Block(
        jnp.zeros(x.shape[:2], jnp.int32), jnp.zeros(x.shape[:2], jnp.int32), jnp.zeros(len(x), jnp.int32), visible
    )
    return nnx.merge(graph, params)(x, None, block, state, past, jnp.zeros((len(x), size), jnp.int32))


def one_by_one(config, graph, params, x, state, count):
    """Outputs `[B, M, E]` and the state after the first `count` tokens of `x` `[B, M, E]`, one token in each pass."""

    def step(state, at):
        token, i = at
        out, delta = passed(graph, params, token[:, None], state)
        return config.commit(state, delta, (i < count).astype(jnp.int32)), out[:, 0]

    after, out = jax.lax.scan(step, state, (jnp.moveaxis(x, 1, 0), jnp.arange(x.shape[1])))
    return jnp.moveaxis(out, 0, 1), after


def close(got, want, least=1e-5):
    """Both are equal but for rounding of the largest entry."""
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=least * max(1.0, np.abs(b).max()))


def random_state(config, rows, key):
    shapes = config.init(WIDTH, rows, jnp.float32)
    keys = iter(jax.random.split(key, 3))
    return jax.tree.map(lambda leaf: jax.random.normal(next(keys), leaf.shape), shapes)


def random_trees(rng):
    """Parents of random trees `[B, T]`, their ancestor masks, and a random path `[B, T]` from a root with its length."""
    parents = np.stack(
        [rng.integers(-1, np.maximum(i, 1), ROWS) if i else np.full(ROWS, -1) for i in range(NODES)], axis=1
    )
    parents[:, 1:][rng.random((ROWS, NODES - 1)) < 0.4] = 0
    parents = np.minimum(parents, np.arange(NODES) - 1)
    visible = np.zeros((ROWS, NODES, NODES), bool)
    rows = np.arange(ROWS)
    for node in range(NODES):
        above = parents[:, node]
        visible[:, node] = np.where((above >= 0)[:, None], visible[rows, above], False)
        visible[:, node, node] = True
    last = rng.integers(0, NODES, ROWS)
    path = np.zeros((ROWS, NODES), int)
    for row in rows:
        own = np.flatnonzero(visible[row, last[row]])
        path[row, : len(own)] = own
    return visible, path, visible[rows, last].sum(axis=1)


@pytest.mark.parametrize("name", MIXERS)
def test_random_trees(name):
    """What is rejected may be large, whether it is a sibling or comes in a later block; a row of none keeps its state."""
    config, (graph, params), rng = MIXERS[name], made(name), np.random.default_rng(0)
    visible, path, count = random_trees(rng)
    kept = np.zeros((ROWS, NODES), bool)
    for row in range(ROWS):
        kept[row, path[row, : count[row]]] = True
    x = rng.normal(size=(ROWS, NODES, WIDTH)).astype(np.float32)
    x = np.where(kept[:, :, None], x, 1e6 * np.sign(x))
    state = random_state(config, ROWS, jax.random.key(1))
    split = 5

    @jax.jit
    def runs(params, x, state, visible, path, count):
        whole, delta = passed(graph, params, x, state, visible)
        first, past = passed(graph, params, x[:, :split], state, visible[:, :split, :split])
        second, own = passed(graph, params, x[:, split:], state, visible[:, split:], past)
        commit = lambda delta, count: committed(config, state, delta, path, jnp.zeros(ROWS, int), count)
        parts = jnp.concatenate([first, second], axis=1), commit(paths.every(past, own), count)
        along = jnp.take_along_axis(x, path[:, :, None], axis=1)
        plain = one_by_one(config, graph, params, along, state, count)
        return whole, commit(delta, count), parts, plain, commit(delta, jnp.zeros(ROWS, jnp.int32))

    given = map(jnp.asarray, (x, visible, path, count))
    whole, after, (parts, parts_after), (plain, plain_after), none = runs(params, next(given), state, *given)
    at = np.arange(NODES)[None] < count[:, None]
    for out in (whole, parts):
        along = np.take_along_axis(np.asarray(out), path[:, :, None], axis=1)
        close(along[at], np.asarray(plain)[at])
    close(after, plain_after)
    close(parts_after, plain_after)
    assert all(map(np.array_equal, jax.tree.leaves(none), jax.tree.leaves(state)))


@pytest.mark.parametrize("name", MIXERS)
def test_a_long_text_is_read_in_chunks(name):
    """After three uncommitted tokens; of the second row only 100 tokens are real."""
    config, (graph, params) = MIXERS[name], made(name)
    x = jax.random.normal(jax.random.key(2), (2, 150, WIDTH))
    state, count = random_state(config, 2, jax.random.key(3)), jnp.asarray([150, 100])

    @jax.jit
    def runs(params):
        first, past = passed(graph, params, x[:, :3], state)
        second, own = passed(graph, params, x[:, 3:], state, None, past)
        after = config.commit(state, paths.every(past, own), count)
        return (jnp.concatenate([first, second], axis=1), after), one_by_one(config, graph, params, x, state, count)

    (out, after), (plain, plain_after) = runs(params)
    close((out[0], out[1, :100]), (plain[0], plain[1, :100]))
    close(after, plain_after)


def test_by_hand():
    """A tree of four nodes, whose parents are none, 0, 0 and 1."""
    visible = jnp.asarray([[[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1]]], bool)
    many = lambda *rows: jnp.asarray([rows], jnp.float32)
    sums, rates, x = many((1, 2), (3, -1)), many((-1, -2), (-0.5, -1)), many((1, -1), (2, 0), (0, 3), (-1, 1))
    b, c = many((0.6, 0.8), (1, 0), (0, 1), (0.8, -0.6)), many((1, 0), (0.5, 0.5), (0, 1), (0.3, -0.4))
    dt = many((0.5, 1), (0.1, 0.2), (1, 0.3), (0.2, 0.4))
    ancestors = paths.Ancestors(visible, False)
    assert paths.parents(ancestors).tolist() == [[-1, 0, 0, 1]]
    every = mamba.Tokens(x * dt, b, dt)
    got = mamba.read(sums, every, c, rates[0], ancestors) + 0.5 * x
    want = [(1.406531, 0.719592), (1.975072, 0.073677), (0.153708, 1.534814), (-0.594731, 1.219427)]
    np.testing.assert_allclose(got[0], want, atol=2e-6)
    path = np.array([0, 1, 3])
    after = mamba.after(sums, jax.tree.map(lambda one: one[:, path], every), rates, jnp.asarray([3]))
    np.testing.assert_allclose(after[0], [(0.675321, 0.743318), (1.223496, -0.880946)], atol=2e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_texts_are_those_of_transformers_token_by_token(references, name):
    """Which reads the prompt too one token at a time. Its passes over several tokens differ with a cache, in some families."""
    import torch
    import transformers

    reference = references(name)
    model = specjax.models.load(reference.folder)
    rng, wanted, logits, eps = np.random.default_rng(1), [], [], 0.0
    prompts = [rng.integers(3, 128, n).tolist() for n in (5, 1, 17)]
    for prompt in prompts:
        text, cache, seen = list(prompt), transformers.DynamicCache(config=reference.torch.config), []
        with torch.no_grad():
            for i in range(len(prompt) + 39):  # Bamba counts positions from 0 in every pass, unless it is told them
                told = {"position_ids": torch.as_tensor([[i]])} if name == "bamba" else {}
                out = reference.torch(torch.as_tensor([[text[i]]]), use_cache=True, cache=cache, **told)
                seen.append(out.logits[0, -1].numpy())
                if i + 1 >= len(prompt):
                    text.append(int(seen[-1].argmax()))
        wanted.append(text[len(prompt) :])
        logits.append(np.stack(seen))
        eps = max(eps, float(np.abs(logits[-1] - teacher_forced(model.lm, model.params, text[:-1])).max()))
    margin = Margin(eps, float(logits[0].std()))
    rows = Rows(tuple(map(tuple, prompts)), ("a", "b", "c"), ({},) * 3, 40)
    decoder, params = specjax.speculative(model.lm, TokenRecycling(k=4)), {"target": model.params, "draft": None}
    got = texts(specjax.run(decoder, params, start(decoder, rows, model=params, capacity=64)))
    for text, own, seen, prompt in zip(got, wanted, logits, prompts, strict=True):
        margin.compare(text, own, seen, len(prompt))
    margin.close()


@pytest.mark.slow
def test_limits_of_steps(references):
    """Which transformers applies in passes over several tokens alone, for Granite 4."""
    reference = references("granite4_h", time_step_limit=(0.4, 0.6))
    model, text = specjax.models.load(reference.folder), np.arange(20) * 7 % 128
    want = reference.logits(text[None])[0]
    assert np.abs(want - references("granite4_h").logits(text[None])[0]).max() > 0.1
    np.testing.assert_allclose(teacher_forced(model.lm, model.params, text), want, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", ("nemotron_h", "jamba"))
def test_texts_on_a_mesh(references, name):
    """Heads of state spaces are split over `model`, rows over `data`."""
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4])
    rng, found = np.random.default_rng(5), []
    rows = Rows(tuple(tuple(rng.integers(3, 128, n).tolist()) for n in (9, 2, 5, 14)), tuple("abcd"), ({},) * 4, 24)
    for place in (None, mesh):
        model = specjax.models.load(references(name).folder, mesh=place)
        decoder = specjax.speculative(model.lm, TokenRecycling(k=4), mesh=place)
        params = {"target": model.params, "draft": None}
        state = specjax.run(decoder, params, start(decoder, rows, model=params, capacity=48))
        found.append(texts(state))
        sums = next(leaf for leaf in jax.tree.leaves(state.cache.states) if leaf.ndim > 3 or name == "jamba")
    assert sums.addressable_shards[0].data.shape[:2] == (sums.shape[0] // 2, sums.shape[1] // 2)
    assert found[0] == found[1]
