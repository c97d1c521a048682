"""Grouped products on a CPU: a loop over the groups that have rows, a few rows at a time."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from specjax.kernels.grouped_dot.width import width

Array = jax.Array

SCOPE = "groups_by_turns"
"""The scope of the loop, by which a plan recognises it."""
_MOST = 64  # the most rows that one round of the loop multiplies


def _product(x: Array, kernels: Array, group: Array) -> Array:
    """Rows `[M, E]` times one of the matrices `[X, E, F]`."""
    return x @ jax.lax.dynamic_index_in_dim(kernels, group, keepdims=False)


def dot(x: Array, kernels: Any, sizes: Array, product: Callable[[Array, Any, Array], Array] = _product) -> Array:
    """See `api.grouped_dot`. With a custom `product`, it takes kernels of any form with shape `[X, E, F]`.

    A round multiplies a slice of fixed width, whose first rows belong to one group, and writes all of it. The next
    round begins where that group's rows end, so it overwrites the results for rows of other groups.
    """
    rows, wide = x.shape[0], min(_MOST, width(x.shape[0], kernels.shape[0]))
    ends = jnp.cumsum(sizes)
    padded = jnp.pad(x, ((0, wide), (0, 0)))

    def part(state):
        at, out = state
        group = jnp.searchsorted(ends, at, side="right")
        made = product(jax.lax.dynamic_slice_in_dim(padded, at, wide), kernels, group).astype(x.dtype)
        return jnp.minimum(at + wide, ends[group]), jax.lax.dynamic_update_slice_in_dim(out, made, at, 0)

    out = jnp.zeros((rows + wide, kernels.shape[2]), x.dtype)
    with jax.named_scope(SCOPE):
        return jax.lax.while_loop(lambda state: state[0] < ends[-1], part, (jnp.zeros_like(ends[0]), out))[1][:rows]
