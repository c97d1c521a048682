"""The experts of a union on an NVIDIA GPU: one Triton kernel for each of the two products.

A program of the first has some columns of one expert. A program of the second has some outputs and every `PARTS`th expert
of the union, and XLA adds the parts. Programs after the union's end read nothing.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from specjax.kernels.precision import is_usual
from specjax.kernels.tree_attention.parts import product

Array = jax.Array

LEAST = 16
"""The fewest rows of a product; tensor cores take no fewer."""
COLUMNS = 64
"""Columns of a program."""
DEPTH = 64
"""Inputs that a program reads at a time."""
PARTS = 8
"""Programs that share the experts of the same outputs, so that all multiprocessors have work."""


def takes(up: Array, weights: Array) -> bool:
    """Whether the kernel supports an expert's width: whole tiles."""
    return up.shape[1] // weights.shape[1] % COLUMNS == 0


def mlp(
    x: Array, weights: Array, up: Array, down: Array, index: Array, count: Array, *, interpret: bool = False
) -> Array:
    """See `xla.mlp`. `interpret` runs it on any platform, slowly."""
    made, (rows, width), (capacity,) = x.dtype, x.shape, index.shape
    size = up.shape[1] // weights.shape[1]
    kind = jnp.bfloat16 if up.dtype == jnp.bfloat16 and is_usual() else x.dtype
    padded = max(pl.next_power_of_2(rows), LEAST)
    x = jnp.pad(x.astype(kind), ((0, padded - rows), (0, 0)))
    own = jnp.pad(jnp.take(weights, index, axis=1).T.astype(jnp.float32), ((0, 0), (0, padded - rows)))
    index, count = index.astype(jnp.int32), jnp.reshape(count, (1,)).astype(jnp.int32)
    call = functools.partial(
        pl.pallas_call, compiler_params=triton.CompilerParams(num_warps=4, num_stages=3), interpret=interpret
    )
    inner = call(
        _first,
        out_shape=jax.ShapeDtypeStruct((capacity, padded, size), kind),
        grid=(capacity, size // COLUMNS),
        name="union_mlp_up",
    )(index, count, x, own, up)
    parts = call(
        _second,
        out_shape=jax.ShapeDtypeStruct((PARTS, padded, width), jnp.float32),
        grid=(PARTS, pl.cdiv(width, COLUMNS)),
        name="union_mlp_down",
    )(index, count, inner, down)
    return parts.sum(axis=0)[:rows].astype(made)


def _first(index_ref, count_ref, x_ref, own_ref, up_ref, out_ref):
    """index `[C]`, count `[1]`, x `[N, E]`, own `[C, N]`, up `[E, X F]`, out `[C, N, F]`."""
    (rows, depth), size = x_ref.shape, out_ref.shape[2]
    place, column = pl.program_id(0), pl.program_id(1) * COLUMNS
    known = place < count_ref[0]
    first = index_ref[place] * size + column

    def part(i, total):
        inside = i * DEPTH + jax.lax.iota(jnp.int32, DEPTH) < depth
        deep = pl.ds(i * DEPTH, DEPTH)
        x = triton.load(x_ref.at[:, deep], mask=inside[None], other=jnp.zeros((), x_ref.dtype))
        up = triton.load(
            up_ref.at[deep, pl.ds(first, COLUMNS)], mask=inside[:, None], other=jnp.zeros((), up_ref.dtype)
        )
        return total + product(x, up, (1, 0))

    steps = known.astype(jnp.int32) * pl.cdiv(depth, DEPTH)
    total = jax.lax.fori_loop(0, steps, part, jnp.zeros((rows, COLUMNS), jnp.float32))
    made = total * jax.nn.sigmoid(total) * own_ref[place, :][:, None]
    written = jnp.broadcast_to(known, made.shape)
    triton.store(out_ref.at[place, :, pl.ds(column, COLUMNS)], made.astype(out_ref.dtype), mask=written)


def _second(index_ref, count_ref, inner_ref, down_ref, out_ref):
    """index `[C]`, count `[1]`, inner `[C, N, F]`, down `[X F, E]`, out `[PARTS, N, E]`."""
    (_, rows, size), width = inner_ref.shape, down_ref.shape[1]
    part, column = pl.program_id(0), pl.program_id(1) * COLUMNS
    kept = (column + jax.lax.iota(jnp.int32, COLUMNS) < width)[None]

    def add(i, total):
        place = part + i * PARTS
        first = index_ref[place] * size

        def tile(j, total):
            inner = inner_ref[place, :, pl.ds(j * COLUMNS, COLUMNS)]
            down = triton.load(
                down_ref.at[pl.ds(first + j * COLUMNS, COLUMNS), pl.ds(column, COLUMNS)],
                mask=jnp.broadcast_to(kept, (COLUMNS, COLUMNS)),
                other=jnp.zeros((), down_ref.dtype),
            )
            return total + product(inner, down, (1, 0))

        return jax.lax.fori_loop(0, size // COLUMNS, tile, total)

    own = jax.lax.div(jnp.maximum(count_ref[0] - part + PARTS - 1, 0), PARTS)
    total = jax.lax.fori_loop(0, own, add, jnp.zeros((rows, COLUMNS), jnp.float32))
    triton.store(out_ref.at[part, :, pl.ds(column, COLUMNS)], total, mask=jnp.broadcast_to(kept, total.shape))
