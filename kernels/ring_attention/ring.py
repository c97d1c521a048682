"""One device's work in the ring, inside `shard_map` (Liu et al. 2023, arXiv:2310.01889)."""

import jax
import jax.numpy as jnp

from specjax.kernels.tree_attention.blocked import BLOCK, add
from specjax.kernels.tree_attention.parts import scores


def around(axis, held, visit, found):
    """Passes every device's part to all devices of the axis, one after the other.

    Args:
      axis: the mesh axis.
      held: a pytree, this device's part.
      visit: takes the result so far, a part and its owner's index; returns the new result.
      found: the initial result.
    """
    size = jax.lax.axis_size(axis)
    me = jax.lax.axis_index(axis)
    following = [(i, (i + 1) % size) for i in range(size)]

    def hop(i, carry):
        held, found = carry
        coming = jax.lax.ppermute(held, axis, following)  # in transit while this part is read
        return coming, visit(found, held, (me - i) % size)

    held, found = jax.lax.fori_loop(0, size - 1, hop, (held, found))
    return visit(found, held, (me + 1) % size)


def read(found, queries, key, value, seen, *, scale, soft_cap=None, block=BLOCK):
    """Adds keys to a result, some of them at a time.

    Args:
      found: see `specjax.kernels.tree_attention.parts.Found`.
      queries: `[B, K, M, H]`.
      key: `[B, K, S, H]`.
      value: as `key`.
      seen: maps the indices `[b]` of some keys to whether each query sees them, `[B or 1, T or 1, b]` bool.
      scale: the factor of the scores.
      soft_cap: see `specjax.kernels.tree_attention.parts.capped`.
      block: how many keys at a time.
    """
    keys = key.shape[2]
    size = min(block, keys)

    @jax.checkpoint
    def some(i, found):
        start = jnp.minimum(i * size, keys - size)  # the last keys may overlap the previous ones
        index = start + jnp.arange(size)
        visible = seen(index) & (index >= i * size)[None, None]
        cut = lambda x: jax.lax.dynamic_slice_in_dim(x, start, size, axis=2)
        return add(found, scores(queries, cut(key), visible, scale, soft_cap), cut(value))

    return jax.lax.fori_loop(0, -(-keys // size), some, found)
