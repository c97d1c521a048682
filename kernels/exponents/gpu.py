"""Coded exponents on an NVIDIA GPU: Triton programs that decode a run of some outputs, one lane per thread.

Words and table are read when a lane needs them. Neighbouring lanes are at about the same word, so their reads share
cache lines.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from specjax.kernels.exponents.xla import FOUR, LONGEST, joined, window

Array = jax.Array

LANES = 128
"""Lanes of a program."""


def numbers(rest: Array, codes: Array, table: Array, *, interpret: bool = False) -> Array:
    """See `api.numbers`, of one matrix. `interpret` runs it on any platform, slowly."""
    words, runs, outputs = codes.shape
    count = rest.shape[0] // runs
    bits = pl.pallas_call(
        functools.partial(_kernel, words=words, runs=runs, outputs=outputs, count=count),
        out_shape=jax.ShapeDtypeStruct((rest.size,), jnp.uint16),
        grid=(runs, pl.cdiv(outputs, LANES)),
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="coded_exponents",
    )(rest.reshape(-1), codes.reshape(-1), table.reshape(-1).astype(jnp.int32))
    return jax.lax.bitcast_convert_type(bits, jnp.bfloat16).reshape(rest.shape)


def _kernel(rest_ref, codes_ref, table_ref, out_ref, *, words, runs, outputs, count):
    """Decodes lanes; all operands are flat."""
    run = pl.program_id(0)
    output = pl.program_id(1) * LANES + jax.lax.iota(jnp.int32, LANES)
    own = output < outputs

    def read(i, at):
        word = at >> 5
        places = ((jnp.minimum(word + j, words - 1) * runs + run) * outputs + output for j in (0, 1))
        first, second = (triton.load(codes_ref.at[place], mask=own, other=jnp.uint32(0)) for place in places)
        bits = window(first, second, at)
        for j in range(FOUR):
            entry = triton.load(table_ref.at[(bits >> (32 - LONGEST)).astype(jnp.int32)])
            place = (run * count + i * FOUR + j) * outputs + output
            there = own & (i * FOUR + j < count)
            rest = triton.load(rest_ref.at[place], mask=there, other=jnp.uint8(0)).astype(jnp.int32)
            triton.store(out_ref.at[place], joined(rest, entry & 255).astype(jnp.uint16), mask=there)
            bits, at = bits << (entry >> 8).astype(jnp.uint32), at + (entry >> 8)
        return at

    jax.lax.fori_loop(0, -(-count // FOUR), read, jnp.zeros((LANES,), jnp.int32))
