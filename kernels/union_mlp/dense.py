"""All experts for all rows: two products, and the definition of the others."""

import jax
import jax.numpy as jnp

from specjax.kernels.precision import by_tensor_cores

Array = jax.Array


def mlp(x: Array, weights: Array, up: Array, down: Array) -> Array:
    """See `api.union_mlp`."""
    inner = weighted(product(x, up), weights)
    return product(inner.astype(x.dtype), down).astype(x.dtype)


def weighted(inner: Array, weights: Array) -> Array:
    """What the second product reads, in float32, of inner vectors `[N, X F]` before their activation, and weights `[N, X]`."""
    by_expert = jax.nn.silu(inner.astype(jnp.float32)).reshape(*weights.shape, -1)
    return (by_expert * weights.astype(jnp.float32)[:, :, None]).reshape(inner.shape)


def product(x: Array, kernel: Array) -> Array:
    """Rows times a matrix, in float32."""
    last = (((1,), (0,)), ((), ()))
    dot = lambda x: jax.lax.dot_general(x, kernel.astype(x.dtype), last, preferred_element_type=jnp.float32)
    return by_tensor_cores(dot, x, kernel.dtype)
