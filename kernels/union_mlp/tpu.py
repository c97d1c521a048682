"""The experts of a union on a TPU: a Mosaic kernel whose grid is the list of them.

The list is known before the kernel begins, so the next expert's matrices are fetched while the last one's are multiplied. After
the union's end the list repeats its last expert. Its block is then the same as before, so nothing is fetched, and nothing is
multiplied.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from specjax.kernels.precision import is_usual
from specjax.kernels.tree_attention.parts import product

Array = jax.Array

TILE = 16
"""Rows are padded to a multiple of this number, the rows of a register of bfloat16."""
LANES = 128
MEMORY = 10 * 2**20
"""The most bytes of two experts and of all rows."""


def takes(x: Array, weights: Array, up: Array) -> bool:
    """Whether the kernel supports these shapes."""
    width, size = up.shape[0], up.shape[1] // weights.shape[1]
    held = 2 * 2 * width * size * up.dtype.itemsize + 2 * x.shape[0] * width * 4
    return size % LANES == 0 and width % LANES == 0 and held <= MEMORY


def mlp(
    x: Array, weights: Array, up: Array, down: Array, index: Array, count: Array, *, interpret: bool = False
) -> Array:
    """See `xla.mlp`. `interpret` runs it on any platform, slowly."""
    made, (rows, width), (capacity,) = x.dtype, x.shape, index.shape
    size = up.shape[1] // weights.shape[1]
    if up.dtype == jnp.bfloat16 and is_usual():
        x = x.astype(jnp.bfloat16)
    more = -rows % TILE
    x = jnp.pad(x, ((0, more), (0, 0)))
    own = jnp.pad(jnp.take(weights, index, axis=1).T.astype(jnp.float32), ((0, 0), (0, more)))[:, :, None]
    last = jnp.take(index, jnp.maximum(count - 1, 0))
    index = jnp.where(jnp.arange(capacity) < count, index, last).astype(jnp.int32)
    out = pl.pallas_call(
        functools.partial(_kernel, usual=is_usual()),
        out_shape=jax.ShapeDtypeStruct((rows + more, width), jnp.float32),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(capacity,),
            in_specs=[
                pl.BlockSpec((rows + more, width), lambda i, index, count: (0, 0)),
                pl.BlockSpec((1, rows + more, 1), lambda i, index, count: (i, 0, 0)),
                pl.BlockSpec((width, size), lambda i, index, count: (0, index[i])),
                pl.BlockSpec((size, width), lambda i, index, count: (index[i], 0)),
            ],
            out_specs=pl.BlockSpec((rows + more, width), lambda i, index, count: (0, 0)),
        ),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",)),
        interpret=pltpu.InterpretParams(uninitialized_memory="nan") if interpret else False,
        name="union_mlp",
    )(index, jnp.reshape(count, (1,)).astype(jnp.int32), x, own, up, down)
    return out[:rows].astype(made)


def _kernel(index, count, x, own, up, down, out, *, usual):
    """index `[C]`, count `[1]`, x `[N, E]`, own `[1, N, 1]`, up `[E, F]`, down `[F, E]`, out `[N, E]`."""

    @pl.when(pl.program_id(0) == 0)
    def _():
        out[...] = jnp.zeros(out.shape, out.dtype)

    @pl.when(pl.program_id(0) < count[0])
    def _():
        inner = jax.nn.silu(product(x[...], up[...], (1, 0))) * own[0]
        narrow = down.dtype == jnp.bfloat16 and usual
        out[...] += product(inner.astype(down.dtype) if narrow else inner, down[...], (1, 0))
