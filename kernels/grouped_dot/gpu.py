"""Grouped products on an NVIDIA GPU: Triton programs that divide every group's rows and its matrix's columns.

XLA's own lowering multiplies every row with every matrix. Here a group without rows has no program, so its matrix is
not read. If a group has more rows than a tile, programs of the same columns are adjacent and find them in the cache.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from specjax.kernels.grouped_dot.width import width
from specjax.kernels.precision import is_usual
from specjax.kernels.tree_attention.parts import product

TILE = (16, 64)
"""The fewest and the most rows of a program; tensor cores take no fewer than 16."""
COLUMNS = 64
"""Columns of a program: a line of a GPU's cache in bfloat16, few enough that narrow experts keep all multiprocessors
busy."""
DEPTH = 64
"""Inputs that a program reads at a time."""


def dot(x: jax.Array, kernels: jax.Array, sizes: jax.Array, *, interpret: bool = False) -> jax.Array:
    """See `api.grouped_dot`. `interpret` runs it on any platform, slowly."""
    (rows, _), (count, _, columns), made = x.shape, kernels.shape, x.dtype
    if kernels.dtype == jnp.bfloat16 and is_usual():  # else tensor cores would take both as float32
        x = x.astype(jnp.bfloat16)
    tile = min(max(width(rows, count), TILE[0]), TILE[1])
    filled = min(rows, count)  # at most so many groups have a tile, and every further tile is full
    return pl.pallas_call(
        functools.partial(_kernel, tile=tile),
        out_shape=jax.ShapeDtypeStruct((rows, columns), made),
        grid=(filled + (rows - filled) // tile, pl.cdiv(columns, COLUMNS)),
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=3),
        interpret=interpret,
        name="grouped_dot",
    )(x, kernels, sizes)


def _kernel(x_ref, kernels_ref, sizes_ref, out_ref, *, tile):
    """x `[R, E]`, kernels `[X, E, F]`, sizes `[X]`, out `[R, F]`."""
    count, depth, columns = kernels_ref.shape
    groups = jax.lax.iota(jnp.int32, pl.next_power_of_2(count))
    sizes = triton.load(sizes_ref.at[groups], mask=groups < count, other=0)
    tiles = pl.cdiv(sizes, tile)
    group = jnp.sum((jnp.cumsum(tiles) <= pl.program_id(0)).astype(jnp.int32))
    before = groups < group
    start = jnp.sum(jnp.where(before, sizes, 0)) + (pl.program_id(0) - jnp.sum(jnp.where(before, tiles, 0))) * tile
    end = jnp.sum(jnp.where(groups <= group, sizes, 0))  # after the last group, the end precedes the start
    own = (start + jax.lax.iota(jnp.int32, tile) < end)[:, None]
    first = pl.program_id(1) * COLUMNS
    kept = (first + jax.lax.iota(jnp.int32, COLUMNS) < columns)[None]

    nothing = lambda ref: jnp.zeros((), ref.dtype)

    def part(i, total):
        inputs = i * DEPTH + jax.lax.iota(jnp.int32, DEPTH) < depth
        deep = pl.ds(i * DEPTH, DEPTH)
        rows = triton.load(x_ref.at[pl.ds(start, tile), deep], mask=own & inputs[None], other=nothing(x_ref))
        kernel = triton.load(
            kernels_ref.at[group, deep, pl.ds(first, COLUMNS)], mask=inputs[:, None] & kept, other=nothing(kernels_ref)
        )
        return total + product(rows, kernel, (1, 0))

    steps = (start < end).astype(jnp.int32) * pl.cdiv(depth, DEPTH)
    total = jax.lax.fori_loop(0, steps, part, jnp.zeros((tile, COLUMNS), jnp.float32))
    triton.store(out_ref.at[pl.ds(start, tile), pl.ds(first, COLUMNS)], total.astype(out_ref.dtype), mask=own & kept)
