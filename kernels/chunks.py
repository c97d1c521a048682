"""Computes over some slots at a time, so that intermediate results never exist as a whole, also in the gradient."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

PyTree = Any

QUERIES = 512
"""Queries of a row whose scores over all keys exist at the same time."""


def chunked(make: Callable[[PyTree], PyTree], inputs: PyTree, size: int) -> PyTree:
    """`make(inputs)`, computed for at most `size` slots at a time, and recomputed for the gradient.

    Args:
      make: maps arrays `[B, size, ...]` to others `[B, size, ...]`, each slot independently. Other values that it reads
        may have gradients.
      inputs: arrays `[B or 1, T, ...]`. Except for the first, an array may have a single slot, `[B or 1, 1, ...]`,
        which is passed to each chunk. The last chunk is padded with zeros.
      size: at least 1.
    """
    length = jax.tree.leaves(inputs)[0].shape[1]
    if length <= size:
        return jax.checkpoint(make)(inputs)
    count = -(-length // size)

    def cut(x):
        if x.shape[1] == 1:
            return jnp.broadcast_to(x[None], (count, *x.shape))
        x = jnp.pad(x, ((0, 0), (0, count * size - length), *[(0, 0)] * (x.ndim - 2)))
        return jnp.moveaxis(x.reshape(x.shape[0], count, size, *x.shape[2:]), 1, 0)

    def joined(x):
        x = jnp.moveaxis(x, 0, 1)
        return x.reshape(x.shape[0], count * size, *x.shape[3:])[:, :length]

    return jax.tree.map(joined, jax.lax.map(jax.checkpoint(make), jax.tree.map(cut, inputs)))
