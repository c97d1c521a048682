"""The product of each row with the matrix of its group, in any form; rows are sorted by group.

Shapes: `R` rows, `X` groups, `E` inputs, `F` outputs.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from specjax.kernels.grouped_dot import grouped_dot as plain_dot
from specjax.kernels.grouped_dot import loop
from specjax.kernels.products import split
from specjax.models.few_bits import Quantised, dot_of, is_quantised, plain
from specjax.models.hobbit import tiers

Array = jax.Array


def grouped_dot(x: Array, kernels: Any, sizes: Array) -> Array:
    """See `specjax.kernels.grouped_dot`. Kernels of few bits have no derivatives.

    Args:
      x: `[R, E]`, sorted by group.
      kernels: `[X, E, F]`, plain, `Quantised`, `Coded` or `Tiered`.
      sizes: how many rows each group has, `[X]` int32, at most R in all; `[2 X]` for `Tiered` ones.

    Returns:
      `[R, F]`; rows after those of all groups are undefined.
    """
    if isinstance(kernels, tiers.Tiered):
        return tiers.grouped_dot(x, kernels, sizes, dot_of)
    return (_few_bits_dot if is_quantised(kernels) else plain_dot)(x, kernels, sizes)


def _few_bits_dot(x: Array, kernels: Any, sizes: Array) -> Array:
    """A TPU's grouped product and a GPU's kernel take int8 directly, but other types only as plain matrices. For those
    the loop is better there too, as long as no mesh splits them."""
    taken = isinstance(kernels, Quantised) and kernels.values.dtype == jnp.int8 and kernels.scale.shape[1] == 1
    if split():
        return _scaled(x, kernels, sizes) if taken else jax.lax.ragged_dot(x, plain(kernels, x.dtype), sizes)
    if not taken:
        return _looped(x, kernels, sizes)
    in_tiles = functools.partial(_scaled, product=plain_dot)
    return jax.lax.platform_dependent(x, kernels, sizes, cpu=_looped, cuda=in_tiles, default=_scaled)


def _looped(x: Array, kernels: Any, sizes: Array) -> Array:
    return loop.dot(x, kernels, sizes, dot_of)


_ragged = functools.partial(jax.lax.ragged_dot, preferred_element_type=jnp.float32)


def _scaled(x: Array, kernels: Quantised, sizes: Array, product: Callable[..., Array] = _ragged) -> Array:
    """The product with the stored values, multiplied by the scale of each row's group."""
    found = product(x, kernels.values, sizes).astype(jnp.float32)
    scale = jnp.repeat(kernels.scale[:, 0].astype(jnp.float32), sizes, axis=0, total_repeat_length=x.shape[0])
    return (found * scale).astype(x.dtype)
