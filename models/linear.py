"""The linear layer of models, whose matrix may have few bits, and its outputs by heads."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from specjax.models.few_bits import dot

Array = jax.Array


class Linear(nnx.Linear):
    """`nnx.Linear` whose kernel may have few bits.

    Attributes:
      reduce_dtype: the type of its products. If a mesh splits its inputs, the parts are summed over the mesh in this
        type. None: `dtype`.
    """

    reduce_dtype: Any = None

    def __call__(self, x: Array) -> Array:
        y = dot(x.astype(self.dtype), self.kernel.get_value(), self.reduce_dtype).astype(self.dtype)
        if self.bias is None:
            return y
        return y + jnp.reshape(self.bias[...].astype(self.dtype), (1,) * (y.ndim - 1) + (-1,))


def apart(x: Array) -> Array:
    """`x` `[B, T, E]`, for products of a few outputs per head beside wider ones.

    XLA's compiler for GPUs joins products of the same rows. With outputs that fill no tile, it copies all of their matrices
    side by side in every step. Rows after a barrier are other rows."""
    return jax.lax.platform_dependent(x, cuda=jax.lax.optimization_barrier, default=lambda x: x)


def by_heads(x: Array, width: int) -> Array:
    """A projection `[B, T, K H]` as `[B, T, K, H]`, where H is `width`.

    The barrier keeps a TPU's compiler from splitting the matrix instead, which would copy it in every step."""
    return jax.lax.optimization_barrier(x).reshape(*x.shape[:2], -1, width)
