"""Keys and values in eight bits: what stands for them in a cache, in the place of an array, and how they are read again.

Each slot of a head has a scale, so that a token's numbers are decided by that token alone: written once, they are never touched
again, whatever comes after. Shapes: `H` head width.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from specjax.pretty import Pretty

Array = jax.Array

CACHE_DTYPES = ("float32", "bfloat16", "float16", "int8", "float8_e4m3fn")
"""Types of a cache; the last two are kept with scales."""
LARGEST = {"int8": 127.0, "float8_e4m3fn": 448.0}
"""What the greatest magnitude of a slot becomes."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Scaled(Pretty):
    """`values * scale`: keys or values of a cache or a block.

    The numbers come first: the first leaf of a cache says of which type it is.

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
    """Zeros, as a cache of this type holds them."""
    zeros = jnp.zeros(shape, dtype)
    return Scaled(zeros, jnp.zeros(shape[:-1], jnp.float32)) if zeros.dtype.name in LARGEST else zeros


def stored(x: Array, like: Array | Scaled) -> Array | Scaled:
    """Numbers `[..., H]` as what has `like` holds them."""
    if not isinstance(like, Scaled):
        return x.astype(like.dtype)
    kind = like.values.dtype
    x = x.astype(jnp.float32)
    scale = jnp.max(jnp.abs(x), axis=-1) / LARGEST[kind.name]
    scaled = x / jnp.where(scale == 0, 1.0, scale)[..., None]
    return Scaled((jnp.round(scaled) if kind == jnp.int8 else scaled).astype(kind), scale)


def read(x: Array | Scaled, dtype: Any) -> Array:
    """What was stored, as plain numbers: of an array itself, else in `dtype`."""
    if not isinstance(x, Scaled):
        return x
    return (x.values.astype(jnp.float32) * x.scale[..., None]).astype(dtype)


def parts(x: Array | Scaled | None) -> tuple[Array | None, Array | None]:
    """Numbers and scales, as `specjax.kernels.tree_attention` takes those of a cache; of an array no scales."""
    return (x.values, x.scale) if isinstance(x, Scaled) else (x, None)
