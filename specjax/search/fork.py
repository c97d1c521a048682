"""Several texts a row: leaves `[B, K, ...]`, and caches whose texts go on from other ones.

In the shape descriptions `B` denotes rows (prompts), `K` texts of a row.
"""

from typing import Any

import jax
import jax.numpy as jnp

from specjax.lm import LM

Array = jax.Array
PyTree = Any

BLOCK = 32
"""Cache slots that are forked together."""


def spread(x: Array, count: int) -> Array:
    """Each row of `[B, ...]` so many times, `[B, count, ...]`."""
    return jnp.broadcast_to(x[:, None], (x.shape[0], count, *x.shape[1:]))


def chosen(x: Array, at: Array) -> Array:
    """The entries `at` `[B, M]` of every row of `[B, K, ...]`, as `[B, M, ...]`."""
    return jax.vmap(lambda row, at: row[at])(x, at)


def merged(tree: PyTree) -> PyTree:
    """Leaves `[B, K, ...]` as `[B * K, ...]`, as a model reads them."""
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), tree)


def parted(tree: PyTree, count: int) -> PyTree:
    """Leaves `[B * K, ...]` as `[B, K, ...]`."""
    return jax.tree.map(lambda x: x.reshape(-1, count, *x.shape[1:]), tree)


def forked_axes(target: LM, cache: PyTree) -> PyTree:
    """Logical axis names of a cache with leaves `[B, K, ...]`."""
    axes = target.cache_axes(jax.eval_shape(merged, cache))
    return jax.tree.map(lambda _, names: (names[0], None, *names[1:]), cache, axes)


def fork(cache: PyTree, axes: PyTree, source: Array, first: Array, last: Array) -> PyTree:
    """Every text of a row takes over the cache of another one.

    Only what may differ is moved, in place and some slots at a time, where the axes name the slots; else all of it.

    Args:
      cache: leaves `[B, K, ...]`.
      axes: of them, see `forked_axes`.
      source: `[B, K]` int32, of which text each goes on.
      first: below this slot all texts of a row are alike.
      last: slots from this one on hold nothing yet.
    """

    leaves, form = jax.tree.flatten(cache)
    names = form.flatten_up_to(axes)
    split = [i for i, own in enumerate(names) if "slots" in own]
    leaves = [leaf if i in split else chosen(leaf, source) for i, leaf in enumerate(leaves)]
    if not split:
        return form.unflatten(leaves)
    capacity = leaves[split[0]].shape[names[split[0]].index("slots")]
    size = min(BLOCK, capacity)

    def move(i, parts):
        start = jnp.minimum(i * size, capacity - size)  # the last block may begin inside the one before
        new = start + jnp.arange(size) >= i * size
        return [
            _moved(part, names[at].index("slots"), source, start, new) for at, part in zip(split, parts, strict=True)
        ]

    moved = jax.lax.fori_loop(first // size, -(-last // size), move, [leaves[i] for i in split])
    for i, leaf in zip(split, moved, strict=True):
        leaves[i] = leaf
    return form.unflatten(leaves)


def _moved(leaf, axis, source, start, new):
    """A leaf whose slots `start` and on, those of them that are `new`, are those of `source`."""
    old = jax.lax.dynamic_slice_in_dim(leaf, start, new.shape[0], axis)
    new = new.reshape((1,) * axis + new.shape + (1,) * (leaf.ndim - axis - 1))
    return jax.lax.dynamic_update_slice_in_dim(leaf, jnp.where(new, chosen(old, source), old), start, axis)
