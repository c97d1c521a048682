"""Keys and values in eight bits: their form in a cache, in place of an array, and how they are read.

Each slot of a head has its own scale, so a token's numbers depend on that token alone. They are written once and never
change, whatever follows. Where channels differ in range (latents and rotated channels, `specjax.models.latent`), equal parts
of a head have scales of their own.

Shapes: `K` kv-heads, `H` head width, `G` parts of a head.
"""

import dataclasses
import math
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
      values: `[B, K, S, H]` of a cache or `[B, T, K, H]` of a block, int8 or float8.
      scale: `[B, K G, S]` or `[B, T, K G]` float32, one per slot and part of a head.
    """

    values: Any
    scale: Any

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape


def empty(shape: tuple[int, ...], dtype: Any, count: int = 1) -> Array | Scaled:
    """Zeros `[..., K, S, H]` in the form of a cache of this type, with `count` scales for each slot of a head."""
    zeros = jnp.zeros(shape, dtype)
    of_scales = shape[:-1] if count == 1 else (*shape[:-3], shape[-3] * count, shape[-2])
    return Scaled(zeros, jnp.zeros(of_scales, jnp.float32)) if zeros.dtype.name in LARGEST else zeros


def stored(x: Array, like: Array | Scaled) -> Array | Scaled:
    """A block's numbers `[..., K, H]` in the form of a cache that has `like` `[..., K, S, H]`."""
    if not isinstance(like, Scaled):
        return x.astype(like.dtype)
    kind = like.values.dtype
    by_parts = _by_parts(x.astype(jnp.float32), like)
    scale = jnp.max(jnp.abs(by_parts), axis=-1) / LARGEST[kind.name]
    scaled = (by_parts / jnp.where(scale == 0, 1.0, scale)[..., None]).reshape(x.shape)
    return Scaled((jnp.round(scaled) if kind == jnp.int8 else scaled).astype(kind), scale)


def read(x: Array | Scaled, dtype: Any) -> Array:
    """A block's stored numbers `[..., K, H]` as a plain array: an array as it is, anything else in `dtype`."""
    if not isinstance(x, Scaled):
        return x
    by_parts = _by_parts(x.values.astype(jnp.float32), x)
    return (by_parts * x.scale[..., None]).reshape(x.shape).astype(dtype)


def _by_parts(x: Array, like: Scaled) -> Array:
    """`[..., K, H]` as `[..., K G, H / G]`, for the scales of `like`."""
    width = math.prod(like.values.shape) // math.prod(like.scale.shape)
    return x.reshape(*x.shape[:-2], -1, width)


def parts(x: Array | Scaled | None) -> tuple[Array | None, Array | None]:
    """Numbers and scales, as `specjax.kernels.tree_attention` takes them; a plain array has no scales."""
    return (x.values, x.scale) if isinstance(x, Scaled) else (x, None)
