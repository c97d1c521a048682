"""Matrices as a file packs them: the leaf for one in a params pytree, with the file's own codes and scales.

Shapes: `E` inputs, `F` outputs, `G` groups of inputs that share a scale, `S` larger groups that share a step size.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from specjax.kernels.scaled_dot.codes import decoded
from specjax.models.matrix import Matrix

Array = jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Steps:
    """Scales or minima in two levels: a number of steps for each group, and a step size for several groups.

    Attributes:
      size: `[..., S, F]`, a float type.
      count: `[..., G, F]`, int8, uint8 or a float type of 8 bits.
    """

    size: Any
    count: Any

    @property
    def shape(self) -> tuple[int, ...]:
        return self.count.shape

    @property
    def T(self) -> "Steps":  # noqa: N802
        return Steps(self.size.swapaxes(-1, -2), self.count.swapaxes(-1, -2))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Packed(Matrix):
    """The matrix `(code - zero) * scale + minimum`, in the types of its file.

    Attributes:
      like: `[..., 1, 1]`, one number of the type in which the matrix is used.
      values: the codes, `[..., E, F]` of a kernel, `[V, E]` of a table of embeddings; of 4 or 8 bits.
      scale: `[..., G, F]`, or `[V, G]`: floats or `Steps`, one for each group of adjacent codes.
      zero: integers like the codes, shaped like the scales; None: codes are not shifted.
      minimum: the addend, floats or `Steps` shaped like the scales; None: nothing is added.
      table: the number that each of 16 codes stands for, before scaling; empty: the code itself.
    """

    like: Any
    values: Any
    scale: Any
    zero: Any = None
    minimum: Any = None
    table: tuple[float, ...] = dataclasses.field(default=(), metadata={"static": True})

    @property
    def stored(self) -> Any:
        return self.values

    def astype(self, dtype: Any) -> "Packed":
        return dataclasses.replace(self, like=self.like.astype(dtype))

    def take(self, ids: Array) -> "Packed":
        return dataclasses.replace(super().take(ids), like=self.like)

    def factors(self) -> tuple[Array, Array | None]:
        """The scales in their own type, and the addends in float32, shaped like the scales (None if nothing is
        added)."""
        added = None if self.minimum is None else levels(self.minimum)
        if self.zero is not None:
            shift = -self.zero.astype(jnp.float32) * levels(self.scale)
            added = shift if added is None else added + shift
        if isinstance(self.scale, Steps):
            return levels(self.scale), added
        return self.scale, added

    def numbers(self) -> Array:
        codes = decoded(self.values, self.table, jnp.float32)
        spread = lambda x: repeated(x, codes.shape)
        if self.zero is not None:
            codes = codes - spread(self.zero.astype(jnp.float32))
        numbers = codes * spread(levels(self.scale))
        return numbers if self.minimum is None else numbers + spread(levels(self.minimum))


def levels(x: Any) -> Array:
    """Scales or minima in float32."""
    if not isinstance(x, Steps):
        return x.astype(jnp.float32)
    return repeated(x.size.astype(jnp.float32), x.count.shape) * x.count.astype(jnp.float32)


def repeated(x: Array, shape: tuple[int, ...]) -> Array:
    """Repeats each number along its axis until the array has this shape."""
    for axis, (whole, groups) in enumerate(zip(shape, x.shape, strict=True)):
        x = jnp.repeat(x, whole // groups, axis=axis) if whole != groups else x
    return x
