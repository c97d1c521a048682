"""The chain that stops: where it stops, what it costs, and its siblings."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.expand import Chain
from specjax.expand.early_stop import EarlyStop
from specjax.sampling import Sampler, SamplingArrays
from specjax.sampling.noise import gumbel

V, B, LENGTH = 7, 4, 5
TEXT = jnp.asarray(np.random.default_rng(0).integers(0, V, (B, 16)), jnp.int32)
LENGTHS = jnp.asarray([3, 6, 1, 4], jnp.int32)
ROOT = jnp.take_along_axis(TEXT, LENGTHS[:, None] - 1, axis=1)[:, 0]
SETTINGS = {"greedy": {}, "sampled": {"temperature": [1.0, 0.6, 0.0, 1.5]}}


def sampler_of(setting, live=(True,) * B):
    keys = jax.vmap(lambda i: jax.random.key(i, impl="threefry2x32"))(jnp.arange(B))
    return Sampler(keys, TEXT, LENGTHS, jnp.asarray(live), SamplingArrays.make(B, **SETTINGS[setting]))


def dists(seed):
    """Logits `[B, depth, V, V]` after a token at a depth."""
    return jnp.asarray(np.random.default_rng(seed).normal(size=(B, LENGTH + 1, V, V)) * 2, jnp.float32)


@functools.partial(jax.jit, static_argnames=("expander", "keep_q"))
def expand(expander, table, sampler, keep_q=False):
    """The tree, how many levels were scored, and (early stop alone) the confidences."""

    def grow(carry, level):
        assert level.tokens.shape == (B, 1) and level.visible.shape[-2:] == (1, level.depth)
        seen, scored = carry
        seen = seen.at[:, level.depth].set(level.tokens[:, 0])
        follow = jnp.take_along_axis(table[:, level.depth], level.tokens[:, :, None], axis=1)
        return (seen, scored + 1), follow

    first = jnp.take_along_axis(table[:, 0], ROOT[:, None, None], axis=1)[:, 0]
    carry = jnp.zeros((B, LENGTH + 1), jnp.int32), jnp.int32(0)
    if isinstance(expander, EarlyStop):
        tree, (_, scored), confidence = expander.run(ROOT, first, grow, carry, sampler, keep_q=keep_q)
        return tree, scored, confidence
    return expander(ROOT, first, grow, carry, sampler, keep_q=keep_q), LENGTH - 1, None


def expected(table, setting, threshold, width):
    """Row by row: the chain's tokens with their siblings, and how sure each was."""
    sampler = sampler_of(setting)
    noise = np.asarray(gumbel(sampler.key, LENGTHS[:, None] + jnp.arange(LENGTH)[None], V))
    heat = np.asarray(sampler.params.temperature)
    for row in range(B):
        token, nodes, sure = int(ROOT[row]), [], []
        for depth in range(LENGTH):
            scores = np.asarray(table)[row, depth, token].astype(np.float64)
            scores = scores / heat[row] + noise[row, depth] if heat[row] else scores
            order = np.argsort(-scores)[:width]
            nodes.append(order.tolist())
            sure.append(1 / np.exp(scores - scores.max()).sum())
            if sure[-1] < threshold:
                break
            token = int(order[0])
        yield nodes, sure


@pytest.mark.slow
@pytest.mark.parametrize("setting", SETTINGS)
def test_without_a_threshold_it_is_the_chain(setting):
    for seed in range(3):
        tree, scored, _ = expand(EarlyStop(LENGTH, 0.0), dists(seed), sampler_of(setting), keep_q=True)
        wanted, levels, _ = expand(Chain(LENGTH), dists(seed), sampler_of(setting), keep_q=True)
        assert tree.topology == wanted.topology and tree.is_chain and scored == levels
        jax.tree.map(np.testing.assert_array_equal, tree, wanted)


@pytest.mark.slow
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("width", (1, 3))
def test_a_row_stops_below_its_first_unsure_token(setting, width):
    lengths = set()
    for seed in range(6):
        tree, scored, confidence = expand(EarlyStop(LENGTH, 0.5, width), dists(seed), sampler_of(setting))
        deepest = 1
        for row, (nodes, sure) in enumerate(expected(dists(seed), setting, 0.5, width)):
            flat = sum(nodes, [])
            assert tree.tokens[row, 1:].tolist() == flat + [-1] * (LENGTH * width - len(flat))
            assert (tree.valid[row] == (tree.tokens[row] >= 0)).all()
            np.testing.assert_allclose(confidence[row, : len(sure)], sure, rtol=1e-4)
            deepest = max(deepest, len(nodes))
            lengths.add(len(nodes))
        assert scored == deepest - 1  # the deepest row alone decides what is computed
    assert len(lengths) > 2


@pytest.mark.slow
@pytest.mark.parametrize("setting", SETTINGS)
def test_a_sure_level_of_a_narrowing_tree_has_fewer_siblings(setting):
    """SWIFT's candidate sets: 10, 8, 5, 3 nodes in greedy rows and 10, 5, 3, 1 in sampled ones; here there is room for 6."""
    hot, seen = np.asarray(sampler_of(setting).params.temperature) > 0, set()
    for seed in range(3):
        table = dists(seed) * 1.5
        tree, _, confidence = expand(EarlyStop(LENGTH, 0.0, 6, narrowing=True), table, sampler_of(setting))
        whole, _, same = expand(EarlyStop(LENGTH, 0.0, 6), table, sampler_of(setting))
        np.testing.assert_array_equal(confidence, same)
        for row, depth in np.ndindex(B, LENGTH):
            sure = sum(float(confidence[row, depth]) > bound for bound in (0.5, 0.8, 0.95))
            width = ((6, 5, 3, 1) if hot[row] else (6, 6, 5, 3))[sure]
            level = slice(1 + 6 * depth, 7 + 6 * depth)
            assert tree.tokens[row, level].tolist() == whole.tokens[row, level].tolist()[:width] + [-1] * (6 - width)
            seen.add(width)
    assert len(seen) >= 3


def test_finished_rows_keep_no_level_alive():
    table = dists(0).at[0].mul(50.0).at[1:].mul(0.01)  # the first row is always sure, the others never
    assert expand(EarlyStop(LENGTH, 0.5), table, sampler_of("greedy"))[1] == LENGTH - 1
    tree, scored, _ = expand(EarlyStop(LENGTH, 0.5), table, sampler_of("greedy", (False, True, True, True)))
    assert scored == 0 and (tree.valid[1:].sum(axis=1) == 2).all()


@pytest.mark.slow
def test_a_carry_that_grows():
    """Drafters that append to their carry get the same tree."""

    @jax.jit
    def run(table, sampler):
        def grow(past, level):
            follow = jnp.take_along_axis(table[:, level.depth], level.tokens[:, :, None], axis=1)
            return level.tokens if past is None else jnp.concatenate([past, level.tokens], axis=1), follow

        first = jnp.take_along_axis(table[:, 0], ROOT[:, None, None], axis=1)[:, 0]
        return EarlyStop(LENGTH, 0.5)(ROOT, first, grow, None, sampler)

    for seed in range(3):
        wanted, *_ = expand(EarlyStop(LENGTH, 0.5), dists(seed), sampler_of("sampled"))
        np.testing.assert_array_equal(run(dists(seed), sampler_of("sampled")).tokens, wanted.tokens)


def test_shapes():
    wide = EarlyStop(LENGTH, 0.5, 3)
    assert wide.nodes == 16 and wide.depth == 5 and not wide.is_chain and wide.rungs == (4, 7, 13, 16)
    assert wide.topology.parents[:10] == (-1, 0, 0, 0, 1, 1, 1, 4, 4, 4)
    assert EarlyStop(4).rungs == (2, 3, 5) and EarlyStop(1).rungs == (2,) and EarlyStop(6).is_chain
    for bad in ({"length": 0}, {"width": 0}, {"threshold": 1.5}):
        with pytest.raises(ValueError, match="early_stop needs"):
            EarlyStop(**bad)
