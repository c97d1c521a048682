"""A pass over a part of the canvas: what is computed anew, in the narrowest static size that holds every row's.

A pass may read several drafts of a canvas at once: one behind the other, each sees itself and the cache, and no other draft.
In the shape descriptions `K` denotes the drafts of a canvas, `L` the canvas, `W` the positions whose features are asked for.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from specjax.diffusion.cache.base import positions_of
from specjax.lm import LM, Block, Wants

Array = jax.Array


def read_drafts(
    target: LM, weights: Any, cache: Any, drafts: Array, active: Array, seen: Array, source: Array, sizes: tuple[int, ...],
    whole: Callable[[], tuple[Array, Any]], everything: Array,
) -> tuple[Array, Any]:  # fmt: skip
    """Features `[B, K, W, E]`, and the cache with what was computed of the first draft.

    Args:
      target: the model.
      weights: its parameters.
      cache: keys and values of every position of the canvas.
      drafts: `[B, K, L]` int32.
      active: `[B, K, L]` bool, what is computed anew; that of a later draft is that of the first, or nothing.
      seen: `[B]` int32, where what a pass sees ends.
      source: `[B, W]` int32, the positions whose features are returned; garbage where a draft is not active.
      sizes: static widths of a pass; the last one holds all.
      whole: what a pass over the whole first draft returns: features `[B, W, E]` and the cache.
      everything: whether that is asked for.
    """
    batch, count, size = drafts.shape
    flat = active.reshape(batch, -1)
    slots = jnp.cumsum(flat, axis=1) - 1
    sources = (jnp.arange(count)[None, :, None] * size + source[:, None]).reshape(batch, -1)

    def part(width):
        at = positions_of(flat, width)
        known = at < count * size
        clipped = jnp.minimum(at, count * size - 1)
        place, draft = clipped % size, clipped // size
        visible = jnp.broadcast_to((known & (place < seen[:, None]))[:, None, :], (batch, width, width))
        if count > 1:
            visible = visible & (draft[:, :, None] == draft[:, None, :])
        tokens = jnp.take_along_axis(drafts.reshape(batch, -1), clipped, axis=1)
        block = Block(tokens, place, seen, visible, unseen=active[:, 0], causal=False)
        output = target(weights, block, cache, wants=Wants(final=True))
        slot = jnp.take_along_axis(slots, sources, axis=1, mode="clip")
        features = jnp.take_along_axis(output.final, slot[:, :, None], axis=1, mode="clip")
        written = target.commit(cache, output.delta, None, jnp.where(at < size, at, size))
        return features.reshape(batch, count, -1, features.shape[-1]), written

    def all_of_the_first():
        features, written = whole()
        return jnp.repeat(features[:, None], count, axis=1), written

    branches = [*[lambda width=width: part(width) for width in sizes], all_of_the_first]
    narrowest = (jnp.max(flat.sum(axis=1)) > jnp.asarray(sizes)).sum()
    return jax.lax.switch(jnp.where(everything, len(sizes), narrowest), branches)
