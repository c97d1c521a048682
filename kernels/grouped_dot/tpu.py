"""Grouped products on a TPU, whose compiler has one that visits the groups with rows alone."""

import jax
import jax.numpy as jnp

from specjax.kernels.precision import is_usual

Array = jax.Array

_PARTS = 3  # bfloat16 holds 8 digits of a float32's 24


def dot(x: Array, kernels: Array, sizes: Array) -> Array:
    """See `api.grouped_dot`.

    The compiler takes bfloat16 matrices in its usual precision alone, in which products of numbers of bfloat16 are exact. Where
    more is asked for, float32 rows are taken apart into numbers of bfloat16 that add up to them, so that their products with
    such matrices are those of float32, and matrices are read as they lie, once.
    """
    narrow = x.dtype == kernels.dtype == jnp.bfloat16
    if is_usual() or narrow or (x.dtype, kernels.dtype) != (jnp.float32, jnp.bfloat16):
        precision = jax.lax.Precision.DEFAULT if narrow else None
        return jax.lax.ragged_dot(x, kernels, sizes, precision=precision).astype(x.dtype)
    rows = jnp.stack(_parts(x), axis=1).reshape(-1, x.shape[1])
    found = jax.lax.ragged_dot(
        rows, kernels, sizes * _PARTS, precision=jax.lax.Precision.DEFAULT, preferred_element_type=jnp.float32
    )
    return found.reshape(x.shape[0], _PARTS, -1).sum(axis=1)


def _parts(x):
    """Numbers of bfloat16 whose sum is `x`; a plain cast and back is what XLA may leave out."""
    found = []
    for _ in range(_PARTS):
        high = jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)
        found.append(high.astype(jnp.bfloat16))
        x = x - high
    return found
