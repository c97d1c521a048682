"""The experts of a union in plain XLA: their columns are gathered into two smaller matrices."""

import jax
import jax.numpy as jnp

from specjax.kernels.union_mlp import dense

Array = jax.Array


def mlp(x: Array, weights: Array, up: Array, down: Array, index: Array, count: Array) -> Array:
    """See `api.union_mlp`. `index` `[C]` has the union's `count` experts first; further ones have no weight."""
    (width, _), experts = up.shape, weights.shape[1]
    columns = jnp.take(up.reshape(width, experts, -1), index, axis=1).reshape(width, -1)
    rows = jnp.take(down.reshape(experts, -1, width), index, axis=0).reshape(-1, width)
    chosen = jnp.where((jnp.arange(len(index)) < count)[None], jnp.take(weights, index, axis=1), 0)
    return dense.mlp(x, chosen, columns, rows)
