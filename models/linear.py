"""The linear layer of models, whose matrix may be of few bits."""

import jax
import jax.numpy as jnp
from flax import nnx

from specjax.models.few_bits import dot

Array = jax.Array


class Linear(nnx.Linear):
    """`nnx.Linear`, whose kernel may be one of few bits."""

    def __call__(self, x: Array) -> Array:
        y = dot(x.astype(self.dtype), self.kernel.get_value())
        if self.bias is None:
            return y
        return y + jnp.reshape(self.bias[...].astype(self.dtype), (1,) * (y.ndim - 1) + (-1,))
