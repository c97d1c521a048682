"""The Gumbel argmax as one Mosaic kernel: scores are read once, and noise exists only in registers.

A program reads a block of columns of one row's nodes. It keeps a running maximum for each of the 128 lanes, so nothing
crosses lanes until XLA reduces `[B, N, 128]` at the end.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from specjax.kernels.verify.gumbel import gumbel_noise
from specjax.kernels.verify.xla import merge

LANES = 128
WIDTH = 512
"""Columns whose noise is computed at a time; independent chains of integer operations hide each other's latency."""
BLOCK_BYTES = 2**21
"""Scores of a block; two blocks are in memory at a time."""
INTERPRETER = pltpu.InterpretParams(uninitialized_memory="nan", detect_races=True)


def argmax(scores, words, which, noisy, columns, *, block=None, interpret=False):
    """See `xla.argmax`. `block` is rounded up to a multiple of `WIDTH`.

    Args:
      scores: `[B, N, V]` float32.
      words: `[B, C, 2]` uint32.
      which: `[B, N]` int32.
      noisy: `[B]` bool.
      columns: `[V]` int32 or None.
      block: columns per program, or None.
      interpret: whether to run it in an interpreter.
    """
    batch, nodes, vocab = scores.shape
    count = words.shape[1]
    shared = nodes > count
    if not shared:
        words = jnp.take_along_axis(words, which[:, :, None], axis=1)
    sampled = jnp.broadcast_to(noisy[:, None], (batch, nodes)).astype(jnp.int32)
    if nodes == 1:  # rows become nodes: a single node would use one sublane of eight
        scores, words, which, sampled = (jnp.swapaxes(x, 0, 1) for x in (scores, words, which, sampled))
    rows, nodes = scores.shape[:2]
    any_noise = sampled.max(axis=1)
    padded = -(-nodes // 8) * 8
    block = block or max(BLOCK_BYTES // (4 * padded), WIDTH)
    block = min(-(-block // WIDTH), -(-vocab // WIDTH)) * WIDTH

    row = lambda *shape: pl.BlockSpec((1, *shape), lambda b, v, _: (b, *[0] * len(shape)))
    specs = [pl.BlockSpec((1, nodes, block), lambda b, v, _: (b, 0, v))]
    specs += [row(words.shape[1], 1), row(words.shape[1], 1), row(nodes, 1), row(nodes, 1)]
    operands = [scores, words[:, :, :1], words[:, :, 1:], which[:, :, None], sampled[:, :, None]]
    if columns is not None:
        specs.append(pl.BlockSpec((1, block), lambda b, v, _: (0, v)))
        operands.append(columns[None].astype(jnp.int32))
    lanes = rows, nodes, LANES
    peak, index = pl.pallas_call(
        functools.partial(_kernel, vocab=vocab, block=block, shared=shared, mapped=columns is not None),
        out_shape=(jax.ShapeDtypeStruct(lanes, jnp.float32), jax.ShapeDtypeStruct(lanes, jnp.int32)),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(rows, -(-vocab // block)),
            in_specs=specs,
            out_specs=(row(nodes, LANES), row(nodes, LANES)),
        ),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        interpret=INTERPRETER if interpret else False,
        name="gumbel_argmax",
    )(any_noise, *operands)
    index, peak = merge(peak, index)
    return (index, peak) if rows == batch else (index.T, peak.T)


def _kernel(any_noise, scores, first, second, which, sampled, *rest, vocab, block, shared, mapped):
    columns = rest[0] if mapped else None
    peak, index = rest[-2:]
    start = pl.program_id(1) * block

    @pl.when(pl.program_id(1) == 0)
    def _():
        peak[...] = jnp.full(peak.shape, -jnp.inf, jnp.float32)
        index[...] = jnp.full(index.shape, vocab, jnp.int32)

    def read(i, noise):
        at = pl.ds(pl.multiple_of(i * WIDTH, WIDTH), WIDTH)
        column = start + i * WIDTH + jax.lax.broadcasted_iota(jnp.int32, (1, WIDTH), 1)
        total = scores[0, :, at]
        if noise:
            ids = columns[:, at] if columns is not None else column
            total = jnp.where(sampled[0] > 0, total + _noise(first[0], second[0], which[0], ids, shared), total)
        total = jnp.where(total != total, jnp.inf, total)
        total = jnp.where(column < vocab, total, -jnp.inf)  # values beyond the vocabulary are undefined
        best, where = peak[0], index[0]
        for lane in range(0, WIDTH, LANES):
            piece = total[:, lane : lane + LANES]
            better = piece > best
            best = jnp.where(better, piece, best)
            where = jnp.where(better, column[:, lane : lane + LANES], where)
        peak[0], index[0] = best, where

    def scan(noise):
        jax.lax.fori_loop(0, block // WIDTH, lambda i, _: read(i, noise), None)

    noisy = any_noise[pl.program_id(0)] > 0
    pl.when(noisy)(lambda: scan(True))
    pl.when(~noisy)(lambda: scan(False))


def _noise(first, second, which, ids, shared):
    """`[N, W]`: the noise of every node at `ids` `[1, W]`."""
    noise = gumbel_noise(first, second, ids)  # [C, W], or [N, W] if each node has its own key
    if not shared:
        return noise
    own = jnp.broadcast_to(noise[:1], (which.shape[0], noise.shape[1]))
    for key in range(1, noise.shape[0]):
        own = jnp.where(which == key, noise[key : key + 1], own)
    return own
