"""Several texts per row: leaves `[B, K, ...]`, and caches whose texts continue others.

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
    """Each row of `[B, ...]` repeated, `[B, count, ...]`."""
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
    """Gives every text of a row the cache of another text.

    If the axes name the slots, only slots that may differ are moved, in place and some at a time; otherwise all of
    them. What belongs to the row's source (`specjax.lm.LM.encode`) is alike in all texts, and stays.

    Args:
      cache: leaves `[B, K, ...]`.
      axes: its axis names, see `forked_axes`.
      source: `[B, K]` int32, the text that each one continues.
      first: below this slot all texts of a row are alike.
      last: slots from this one on hold nothing yet.
    """

    leaves, form = jax.tree.flatten(cache)
    names = form.flatten_up_to(axes)
    split = [i for i, own in enumerate(names) if "slots" in own]
    stays = [i for i, own in enumerate(names) if "slots" in own or "source" in own]
    leaves = [leaf if i in stays else chosen(leaf, source) for i, leaf in enumerate(leaves)]
    if not split:
        return form.unflatten(leaves)
    capacity = leaves[split[0]].shape[names[split[0]].index("slots")]
    size = min(BLOCK, capacity)

    def move(i, parts):
        start = jnp.minimum(i * size, capacity - size)  # the last block may start within the one before
        new = start + jnp.arange(size) >= i * size
        return [
            _moved(part, names[at].index("slots"), source, start, new) for at, part in zip(split, parts, strict=True)
        ]

    moved = jax.lax.fori_loop(first // size, -(-last // size), move, [leaves[i] for i in split])
    for i, leaf in zip(split, moved, strict=True):
        leaves[i] = leaf
    return form.unflatten(leaves)


def _moved(leaf, axis, source, start, new):
    """A leaf in which, of the slots from `start` on, those that are `new` come from `source`."""
    old = jax.lax.dynamic_slice_in_dim(leaf, start, new.shape[0], axis)
    new = new.reshape((1,) * axis + new.shape + (1,) * (leaf.ndim - axis - 1))
    return jax.lax.dynamic_update_slice_in_dim(leaf, jnp.where(new, chosen(old, source), old), start, axis)
