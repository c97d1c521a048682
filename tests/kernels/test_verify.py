"""The Gumbel argmax: the same bits as `jax.random`, whatever the blocks, the implementation and the mesh."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from specjax.kernels.verify import gumbel_argmax
from specjax.kernels.verify.api import partial_argmax
from specjax.kernels.verify.gumbel import gumbel_noise, threefry2x32
from specjax.kernels.verify.reference import argmax
from specjax.kernels.verify.xla import merge
from specjax.sampling import Sampler, SamplingArrays, row_keys
from specjax.sampling.noise import GUMBEL, RESIDUAL, gumbel, keys_at
from specjax.sampling.sampler import best

draw = jax.jit(gumbel_argmax, static_argnames=("block", "implementation"))
slow = jax.jit(argmax)
SHAPES = {"tree": (3, 7, 3, 1000), "chain": (2, 4, 4, 530), "plain": (3, 1, 1, 777), "siblings": (1, 9, 2, 384)}


def world(batch, nodes, count, vocab, seed=0):
    """Scores with removed tokens and a greedy row, the keys of `count` depths, and each node's depth."""
    rng = np.random.default_rng(seed)
    positions = np.arange(5, 5 + batch)[:, None] + np.arange(count)[None]
    keys = keys_at(row_keys(seed, [str(row) for row in range(batch)]), jnp.asarray(positions), GUMBEL)
    scores = rng.normal(size=(batch, nodes, vocab)).astype(np.float32) * 2
    scores[rng.random(scores.shape) < 0.2] = -np.inf
    which = rng.integers(0, count, (batch, nodes)) if count < nodes else np.tile(np.arange(nodes), (batch, 1))
    return jnp.asarray(scores), keys, jnp.asarray(which, jnp.int32), jnp.arange(batch) != 1


def test_the_published_vectors_of_threefry():
    """Known answers of Random123 for 20 rounds."""
    words = np.array(
        [
            [0, 0, 0, 0, 0x6B200159, 0x99BA4EFE],
            [0xFFFFFFFF] * 4 + [0x1CB996FC, 0xBB002BE7],
            [0x13198A2E, 0x03707344, 0x243F6A88, 0x85A308D3, 0xC4923A9C, 0x483DF7A0],
        ],
        np.uint32,
    )
    got = threefry2x32(*(jnp.asarray(words[:, i]) for i in range(4)))
    np.testing.assert_array_equal(np.stack(got, axis=1), words[:, 4:])


@pytest.mark.parametrize("vocab", [1, 130, 1001])
def test_noise_is_that_of_jax_random(vocab):
    keys = keys_at(row_keys(1, ["a", "b"]), jnp.asarray([[3, 4], [90000, 1]]), RESIDUAL)
    with jax.threefry_partitionable(True):
        want = jax.vmap(jax.vmap(lambda key: jax.random.gumbel(key, (vocab,), jnp.float32)))(keys)
    words = jax.random.key_data(keys)[:, :, None]
    got = gumbel_noise(words[..., 0], words[..., 1], jnp.arange(vocab)[None, None])
    np.testing.assert_array_equal(got, want)
    again = jax.jit(gumbel, static_argnums=(2, 3))(row_keys(1, ["a", "b"]), jnp.asarray([[3, 4], [90000, 1]]), vocab, 2)
    np.testing.assert_array_equal(again, want)


@pytest.mark.parametrize("implementation", ["xla", "pallas_tpu_interpreted"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_ids_and_scores_are_the_reference(shape, implementation):
    operands = world(*shape)
    for got, want in zip(draw(*operands, implementation=implementation), slow(*operands), strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("block", [1, 64, 100, 999, 5000])
def test_any_block_is_the_same(block):
    operands = world(*SHAPES["tree"])
    for got, want in zip(draw(*operands, block=block), slow(*operands), strict=True):
        np.testing.assert_array_equal(got, want)


def test_blocks_of_the_kernel_are_the_same():
    operands = world(1, 3, 2, 1300)
    for got, want in zip(
        draw(*operands, block=512, implementation="pallas_tpu_interpreted"), slow(*operands), strict=True
    ):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("implementation", ["xla", "pallas_tpu_interpreted"])
def test_ties_failures_and_columns(implementation):
    """The lowest index wins; NaN, +inf and rows without a token give -1; columns have the noise of their tokens."""
    scores, keys, which, _ = world(2, 6, 2, 600)
    tied = jnp.zeros((2, 6, 600)).at[:, 0, 599].set(jnp.nan).at[:, 1].set(-jnp.inf).at[:, 2, 40].set(jnp.inf)
    tied = tied.at[:, 3, :7].set(-jnp.inf).at[:, 4, 512:].set(1.0).at[:, 5, 3].set(jnp.nan)
    run = functools.partial(draw, implementation=implementation)
    ids, peak = run(tied, keys, which, jnp.asarray([False, False]))
    assert ids[0].tolist() == ids[1].tolist() == [-1, -1, -1, 7, 512, -1]
    assert peak[0, :3].tolist() == [np.inf, -np.inf, np.inf]
    assert run(tied, keys, which, jnp.asarray([True, True]))[0][:, [0, 1, 2, 5]].tolist() == [[-1] * 4] * 2
    columns = jnp.asarray(np.random.default_rng(1).permutation(2000)[:600], jnp.int32)
    noisy = jnp.asarray([True, False])
    got = run(scores, keys, which, noisy, columns=columns)
    for mine, want in zip(got, argmax(scores, keys, which, noisy, columns), strict=True):
        np.testing.assert_array_equal(mine, want)


@pytest.mark.parametrize("implementation", ["xla", "pallas_tpu_interpreted"])
def test_parts_of_a_vocabulary_merge(implementation):
    scores, keys, which, noisy = world(2, 3, 2, 1024)
    half = jax.jit(lambda scores, columns: partial_argmax(
        scores, keys, which, noisy, columns=columns, implementation=implementation
    ))  # fmt: skip
    parts = [half(scores[:, :, at : at + 512], jnp.arange(at, at + 512)) for at in (0, 512)]
    index = jnp.stack([parts[0][0], parts[1][0] + 512], axis=-1)
    got = merge(jnp.stack([peak for _, peak in parts], axis=-1), index)
    for mine, want in zip(got, slow(scores, keys, which, noisy), strict=True):
        np.testing.assert_array_equal(mine, want)


@pytest.mark.parametrize("shape", [(1, 8), (2, 4)], ids=["1x8", "2x4"])
def test_a_sharded_vocabulary_is_the_same_and_stays_where_it_is(shape):
    mesh = jax.make_mesh(shape, ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    scores, keys, which, noisy = world(2, 5, 3, 4096)
    placed = jax.device_put(scores, NamedSharding(mesh, P("data", None, "model")))
    got = draw(placed, keys, which, noisy, block=1024)
    for mine, want in zip(got, slow(scores, keys, which, noisy), strict=True):
        np.testing.assert_array_equal(mine, want)
    text = draw.lower(placed, keys, which, noisy, block=1024).compile().as_text()
    gathered = [[int(n) for n in re.findall(r"\d+", m)] for m in re.findall(r"= \w+\[([\d,]*)\]\S* all-gather\(", text)]
    assert all(np.prod(sizes) < 1000 for sizes in gathered), gathered  # keys and partial results, no scores, no noise
    assert "all-reduce" in text


def test_memory_is_that_of_a_block():
    scores, keys, which, noisy = world(4, 16, 5, 32768)

    def whole(scores, keys, which, noisy):
        noise = jax.vmap(jax.vmap(lambda key: jax.random.gumbel(key, scores.shape[-1:], jnp.float32)))(keys)
        noise = jnp.take_along_axis(noise, which[:, :, None], axis=1)
        return best(jnp.where(noisy[:, None, None], scores + noise, scores))

    def temporary(function, **options):
        compiled = jax.jit(functools.partial(function, **options)).lower(scores, keys, which, noisy).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    before, after = temporary(whole), temporary(gumbel_argmax, block=2048)
    assert before > 4 * scores.size  # a float for every score, and more
    assert after < before / 8, (before, after)


@pytest.mark.slow
def test_the_sampler_draws_the_argmax_of_its_scores():
    """A mixed batch: filters, a penalty, a greedy row, and a head over some of the tokens."""
    rows, nodes, vocab = 4, 5, 300
    rng = np.random.default_rng(2)
    sampler = Sampler(
        row_keys(4, ["a", "b", "c", "d"]),
        jnp.asarray(rng.integers(0, vocab, (rows, 20))),
        jnp.asarray([3, 9, 4, 7]),
        jnp.ones(rows, bool),
        SamplingArrays.make(
            rows, temperature=[1.0, 0.0, 0.6, 2.0], top_p=[0.9, 1, 1, 1], top_k=[0, 0, 7, 0],
            repetition_penalty=[1, 1.3, 1, 1.2],
        ),
    )  # fmt: skip
    logits = jnp.asarray(rng.normal(size=(rows, nodes, vocab)), jnp.float32) * 3
    depth = jnp.asarray(rng.integers(0, 4, (rows, nodes)))

    @jax.jit
    def both(sampler, logits, depth):
        fixed = sampler.scores(logits, 2), sampler.draw(logits, 2)
        return fixed, (sampler.scores(logits, depth, None, 3), sampler.draw(logits, depth, None, 3))

    columns = jnp.asarray(rng.permutation(900)[:vocab], jnp.int32)
    for one in (sampler, sampler.restricted(columns, 900)):
        for scores, drawn in both(one, logits, depth):
            np.testing.assert_array_equal(best(scores), drawn)


@pytest.mark.parametrize("vocab", [16, 600, 20000])
def test_one_nan_fails_a_draw_whatever_the_vocabulary(vocab):
    scores = jnp.zeros((1, 4, vocab)).at[0, jnp.arange(3), jnp.asarray([0, vocab // 2, vocab - 1])].set(jnp.nan)
    assert jax.jit(best)(scores).tolist() == [[-1, -1, -1, 0]]


def test_bad_input():
    operands = world(1, 2, 2, 64)
    with pytest.raises(ValueError, match="no implementation 'cuda'"):
        gumbel_argmax(*operands, implementation="cuda")
    rbg = jax.random.key(0, impl="rbg").reshape(1, 1)
    with pytest.raises(ValueError, match="threefry2x32 keys, not"):
        gumbel_argmax(operands[0], rbg, *operands[2:])
