"""Grouped products on a TPU, whose compiler has a product that visits only groups with rows."""

import jax
import jax.numpy as jnp

from specjax.kernels.precision import is_usual

Array = jax.Array

_PARTS = 3  # bfloat16 holds 8 of a float32's 24 bits


def dot(x: Array, kernels: Array, sizes: Array) -> Array:
    """See `api.grouped_dot`.

    The compiler takes bfloat16 matrices only at its default precision, in which products of bfloat16 numbers are exact.
    For a higher precision, float32 rows are split into bfloat16 numbers that add up to them. Then the products equal
    those of float32, and the matrices are still read once and unchanged.
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
    """bfloat16 numbers whose sum is `x`. XLA may remove a plain cast there and back, so none is used."""
    found = []
    for _ in range(_PARTS):
        high = jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)
        found.append(high.astype(jnp.bfloat16))
        x = x - high
    return found
