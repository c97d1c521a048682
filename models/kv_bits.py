"""Keys and values in eight bits: their form in a cache, in place of an array, and how they are read.

Each slot of a head has its own scale, so a token's numbers depend on that token alone. They are written once and never
change, whatever follows.

Shapes: `H` head width.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from specjax.pretty import Pretty

Array = jax.Array

CACHE_DTYPES = ("float32", "bfloat16", "float16", "int8", "float8_e4m3fn")
"""The types of a cache; the last two have scales."""
LARGEST = {"int8": 127.0, "float8_e4m3fn": 448.0}
"""The value to which the greatest magnitude of a slot is scaled."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Scaled(Pretty):
    """`values * scale`: keys or values of a cache or a block.

    `values` come first, because the first leaf of a cache tells the cache's type.

    Attributes:
      values: `[..., H]`, int8 or float8.
      scale: `[...]` float32, one per slot and head.
    """

    values: Any
    scale: Any

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape


def empty(shape: tuple[int, ...], dtype: Any) -> Array | Scaled:
    """Zeros in the form of a cache of this type."""
    zeros = jnp.zeros(shape, dtype)
    return Scaled(zeros, jnp.zeros(shape[:-1], jnp.float32)) if zeros.dtype.name in LARGEST else zeros


def stored(x: Array, like: Array | Scaled) -> Array | Scaled:
    """Numbers `[..., H]` in the form of a cache that has `like`."""
    if not isinstance(like, Scaled):
        return x.astype(like.dtype)
    kind = like.values.dtype
    x = x.astype(jnp.float32)
    scale = jnp.max(jnp.abs(x), axis=-1) / LARGEST[kind.name]
    scaled = x / jnp.where(scale == 0, 1.0, scale)[..., None]
    return Scaled((jnp.round(scaled) if kind == jnp.int8 else scaled).astype(kind), scale)


def read(x: Array | Scaled, dtype: Any) -> Array:
    """Stored numbers as a plain array: an array as it is, anything else in `dtype`."""
    if not isinstance(x, Scaled):
        return x
    return (x.values.astype(jnp.float32) * x.scale[..., None]).astype(dtype)


def parts(x: Array | Scaled | None) -> tuple[Array | None, Array | None]:
    """Numbers and scales, as `specjax.kernels.tree_attention` takes them; a plain array has no scales."""
    return (x.values, x.scale) if isinstance(x, Scaled) else (x, None)
