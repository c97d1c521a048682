"""The experts of a union on a CPU: a loop that reads one of them at a time, so that no matrix is copied."""

import jax
import jax.numpy as jnp

from specjax.kernels.union_mlp import dense

Array = jax.Array

SCOPE = "union_by_turns"
"""The scope of the loop."""


def mlp(x: Array, weights: Array, up: Array, down: Array, index: Array, count: Array) -> Array:
    """See `xla.mlp`."""
    size = up.shape[1] // weights.shape[1]

    def add(i, total):
        expert = index[i]
        columns = jax.lax.dynamic_slice_in_dim(up, expert * size, size, axis=1)
        rows = jax.lax.dynamic_slice_in_dim(down, expert * size, size, axis=0)
        own = jax.lax.dynamic_slice_in_dim(weights, expert, 1, axis=1)
        inner = dense.weighted(dense.product(x, columns), own)
        return total + dense.product(inner.astype(x.dtype), rows)

    with jax.named_scope(SCOPE):
        total = jax.lax.fori_loop(0, count, add, jnp.zeros((x.shape[0], down.shape[1]), jnp.float32))
    return total.astype(x.dtype)
