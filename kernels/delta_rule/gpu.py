"""The gated delta rule on an NVIDIA GPU: Triton programs, each for some value channels of a head. None needs another."""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from specjax.kernels.delta_rule.head import outputs

Array = jax.Array

COLUMNS = 32
"""Value channels of a program."""
FEWEST, MOST = 16, 32
"""The fewest rows of a product, and the most tokens that the kernel takes: they stay in registers."""


def rounded(tokens: int) -> int:
    """How many rows the kernel has for some tokens."""
    return max(pl.next_power_of_2(tokens), FEWEST)


def takes(tokens: int, sums: tuple[int, ...]) -> bool:
    """Whether the kernel supports so many tokens and states of this shape."""
    width, out = sums[-2:]
    return tokens <= MOST and width & (width - 1) == 0 and FEWEST <= width <= 256 and out % COLUMNS == 0


def attend(query, key, value, strength, log_decay, known, seen, sums, *, interpret: bool = False) -> Array:
    """See `api.operands`; returns `[2, B, N, R, A, V]`, outputs and corrections.

    `interpret` runs it on any platform, slowly."""
    batch, heads, served, width, out = sums.shape
    return pl.pallas_call(
        functools.partial(_kernel, served=served, shared=len(seen) == 1),
        out_shape=jax.ShapeDtypeStruct((2, *value.shape), jnp.float32),
        grid=(out // COLUMNS, heads * served, batch),
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="delta_rule",
    )(query, key, value, strength, log_decay, known, seen, sums)


def _kernel(query, key, value, strength, log_decay, known, seen, sums, out, *, served, shared):
    columns = pl.ds(pl.program_id(0) * COLUMNS, COLUMNS)
    n, r, b = pl.program_id(1) // served, pl.program_id(1) % served, pl.program_id(2)
    query, key = (triton.load(x.at[b, n]) for x in (query, key))
    strength, log_decay = (triton.load(x.at[b, n, r]) for x in (strength, log_decay))
    value, known, sums = (triton.load(x.at[b, n, r, :, columns]) for x in (value, known, sums))
    seen = triton.load(seen.at[jnp.int32(0) if shared else b])
    made = outputs(query, key, value, strength, log_decay, known, seen, sums, _substituted)
    for which, x in enumerate(made):
        triton.store(out.at[jnp.int32(which), b, n, r, :, columns], x)


def _substituted(below: Array, wanted: Array) -> Array:
    """Forward substitution: as soon as a row is known, the rows after it lose its share. Registers have no index, so a row
    and a column are sums with one term."""
    row = jax.lax.broadcasted_iota(jnp.int32, wanted.shape, 0)
    column = jax.lax.broadcasted_iota(jnp.int32, below.shape, 1)

    def step(j, wanted):
        share = jnp.where(column == j, below, 0.0).sum(axis=1)
        known = jnp.where(row == j, wanted, 0.0).sum(axis=0)
        return wanted - share[:, None] * known[None]

    return jax.lax.fori_loop(0, below.shape[0] - 1, step, wanted)
