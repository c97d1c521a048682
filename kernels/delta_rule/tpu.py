"""The gated delta rule on a TPU: a Mosaic kernel that reads the state of some heads once and keeps the rest in registers."""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from specjax.kernels.delta_rule.head import outputs

Array = jax.Array

ROWS = 8
"""Tokens are padded to a multiple of this number, the rows of a register."""
MOST = 64
"""The most tokens that the kernel takes: its program is as long as the substitution."""
STATE_BYTES = 2**19
"""States that a program reads at a time, at most, if a key head's are fewer."""


def rounded(tokens: int) -> int:
    """How many rows the kernel has for some tokens."""
    return -(-tokens // ROWS) * ROWS


def takes(tokens: int, sums: tuple[int, ...]) -> bool:
    """Whether the kernel supports so many tokens and states of this shape."""
    return tokens <= MOST and sums[-2] % 128 == 0 and sums[-1] % 128 == 0


def attend(query, key, value, strength, log_decay, known, seen, sums, *, interpret: bool = False) -> Array:
    """See `api.operands`; returns `[2, B, N, R, A, V]`, outputs and corrections.

    `interpret` runs it on any platform, slowly."""
    batch, heads, served, width, out = sums.shape
    fit = max(STATE_BYTES // (served * width * out * 4), 1)
    some = max(n for n in range(1, min(fit, heads) + 1) if heads % n == 0)
    of_heads = lambda x: pl.BlockSpec((1, some, *x.shape[2:]), lambda b, n: (b, n, *[0] * (x.ndim - 2)))
    of_row = pl.BlockSpec((1, *seen.shape[1:]), lambda b, n: (b if seen.shape[0] > 1 else 0, 0, 0))
    given = query, key, value, strength, log_decay, known
    return pl.pallas_call(
        _kernel,
        out_shape=jax.ShapeDtypeStruct((2, *value.shape), jnp.float32),
        grid=(batch, heads // some),
        in_specs=[*map(of_heads, given), of_row, of_heads(sums)],
        out_specs=pl.BlockSpec((2, 1, some, *value.shape[2:]), lambda b, n: (0, b, n, *[0] * (value.ndim - 2))),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel")),
        interpret=pltpu.InterpretParams(uninitialized_memory="nan", detect_races=True) if interpret else False,
        name="delta_rule",
    )(*given, seen, sums)


def _kernel(query, key, value, strength, log_decay, known, seen, sums, out):
    for n in range(sums.shape[1]):
        for r in range(sums.shape[2]):
            out[0, 0, n, r], out[1, 0, n, r] = outputs(
                query[0, n], key[0, n], value[0, n, r], strength[0, n, r], log_decay[0, n, r], known[0, n, r], seen[0],
                sums[0, n, r], _substituted,
            )  # fmt: skip


def _substituted(below: Array, wanted: Array) -> Array:
    """Forward substitution: as soon as a row is known, the rows after it lose its share."""
    for j in range(len(below) - 1):
        wanted = wanted - below[:, j : j + 1] * wanted[j : j + 1]
    return wanted
