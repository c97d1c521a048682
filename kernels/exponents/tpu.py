"""Coded exponents on a TPU: a Mosaic kernel whose registers are eight runs of 128 outputs.

A lane's next word is selected among all words of the lane by comparison, once per four codes, so nothing is gathered
from memory. The table is two registers, which lanes look up by number. Four exponents fill a word, like four bytes of
`rest`, so both are combined one word at a time.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from specjax.kernels.exponents.xla import FOUR, LONGEST, joined, window

Array = jax.Array

RUNS, LANES = 8, 128
TILE = 32
"""Rows of a tile of bytes; a run fills a tile."""


def serves(rest: tuple[int, ...], codes: tuple[int, ...]) -> bool:
    """Whether the kernel can decode matrices of these shapes; see `api.numbers`."""
    runs, outputs = codes[-2:]
    return runs >= RUNS and outputs >= LANES and rest[-2] // runs % TILE == 0


def numbers(rest: Array, codes: Array, table: Array, *, interpret: bool = False) -> Array:
    """See `api.numbers`, of one matrix. `interpret` runs it on any platform, slowly."""
    words, runs, outputs = codes.shape
    count = rest.shape[0] // runs
    block = pl.BlockSpec((RUNS, count, LANES), lambda i, j: (i, 0, j))
    found = pl.pallas_call(
        functools.partial(_kernel, words=words, count=count),
        out_shape=jax.ShapeDtypeStruct((runs, count, outputs), jnp.bfloat16),
        grid=(pl.cdiv(runs, RUNS), pl.cdiv(outputs, LANES)),
        in_specs=[
            block,
            pl.BlockSpec((words, RUNS, LANES), lambda i, j: (0, i, j)),
            pl.BlockSpec((2, LANES), lambda i, j: (0, 0)),
        ],
        out_specs=block,
        scratch_shapes=[
            pltpu.VMEM((count // FOUR, RUNS, LANES), jnp.uint32),
            pltpu.VMEM((count // 2, LANES), jnp.uint32),
        ],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel")),
        interpret=interpret,
        name="coded_exponents",
    )(rest.reshape(runs, count, outputs), codes, table.reshape(2, LANES).astype(jnp.int32))
    return found.reshape(rest.shape)


def _kernel(rest_ref, codes_ref, table_ref, out_ref, exponents_ref, pairs_ref, *, words, count):
    halves = [jnp.broadcast_to(table_ref[i : i + 1], (RUNS, LANES)) for i in (0, 1)]

    def read(i, at):
        word = at >> 5
        first = second = jnp.zeros((RUNS, LANES), jnp.uint32)
        for j in range(words):
            here = codes_ref[j]
            first, second = jnp.where(word == j, here, first), jnp.where(word == j - 1, here, second)
        bits, four = window(first, second, at), jnp.zeros((RUNS, LANES), jnp.uint32)
        for j in range(FOUR):
            index = (bits >> (32 - LONGEST)).astype(jnp.int32)
            low, high = (jnp.take_along_axis(half, index & (LANES - 1), axis=1) for half in halves)
            entry = jnp.where(index < LANES, low, high)
            four = four | (entry & 255).astype(jnp.uint32) << (8 * j)
            bits, at = bits << (entry >> 8).astype(jnp.uint32), at + (entry >> 8)
        exponents_ref[i] = four
        return at

    jax.lax.fori_loop(0, count // FOUR, read, jnp.zeros((RUNS, LANES), jnp.int32))
    byte = lambda x, i: x >> (8 * i) & 255
    for run in range(RUNS):
        exponents, rest = exponents_ref[:, run, :], pltpu.bitcast(rest_ref[run], jnp.uint32)
        for i in (0, 1):
            low, high = (joined(byte(rest, j), byte(exponents, j)) for j in (2 * i, 2 * i + 1))
            pairs_ref[pl.ds(i, count // FOUR, stride=2), :] = low | high << 16
        out_ref[run] = pltpu.bitcast(pairs_ref[...], jnp.bfloat16)
