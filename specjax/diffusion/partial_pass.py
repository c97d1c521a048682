"""A pass over a part of the canvas: what is recomputed, in the narrowest static size that holds every row's part.

Rows that ask for all of their canvas (they enter a block) are read separately, a few at a time, so that the others need
not be as wide. A pass may read several drafts of a canvas at once, one after the other: each sees itself and the cache,
but no other draft.

In the shape descriptions `K` denotes the drafts of a canvas, `L` the canvas, `W` the positions whose features are asked
for.
"""

from typing import Any

import jax
import jax.numpy as jnp

from specjax.diffusion.cache.base import positions_of
from specjax.lm import LM, Block, Output, Wants
from specjax.sharding.ambient import known_mesh
from specjax.sharding.rules import parts

Array = jax.Array

TOGETHER = 512
"""At least so many tokens of whole canvases are read together: enough to share a read of the weights, but only a few rows."""


def read_whole(target: LM, weights: Any, tokens: Array, seen: Array, groups: Array | None = None) -> Output:
    """A pass over canvases `[B, L]`, of which the positions below `seen` `[B]` count; the output has `final`.

    With `groups` `[B, L]` a position sees only those of its own group and of lower ones.
    """
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32)[None], tokens.shape)
    visible = (positions < seen[:, None])[:, None, :]
    if groups is not None:
        visible = visible & (groups[:, None] <= groups[:, :, None])
    block = Block(tokens, positions, jnp.zeros_like(seen), visible, causal=False)
    return target(weights, block, None, wants=Wants(final=True))


def read_drafts(
    target: LM, weights: Any, cache: Any, drafts: Array, active: Array, seen: Array, source: Array, sizes: tuple[int, ...],
    wide: Array, groups: Array | None = None,
) -> tuple[Array, Any]:  # fmt: skip
    """Features `[B, K, W, E]`, and the cache with what was computed for the first draft.

    Args:
      target: the model.
      weights: its parameters.
      cache: keys and values of every position of the canvas.
      drafts: `[B, K, L]` int32.
      active: `[B, K, L]` bool, what is recomputed; for a later draft the same as for the first, or nothing.
      seen: `[B]` int32, the end of the positions that a pass sees.
      source: `[B, W]` int32, the positions whose features are returned; garbage where a draft is not active.
      sizes: static widths of a pass; the last one holds all.
      wide: `[B]` bool, rows that ask for all of the first draft, and for no other draft.
      groups: `[B, L]` int32, see `Cache.groups`.
    """
    batch, count, size = drafts.shape
    all_seen, active = seen, active & ~wide[:, None, None]
    if groups is not None:  # what the cache holds after the last active position is of later groups
        last = jnp.max(jnp.where(active[:, 0], jnp.arange(size, dtype=jnp.int32)[None] + 1, 0), axis=1)
        seen = jnp.minimum(seen, last)
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
        if groups is not None:
            own = jnp.take_along_axis(groups, place, axis=1)
            visible = visible & (own[:, None] <= own[:, :, None])
        tokens = jnp.take_along_axis(drafts.reshape(batch, -1), clipped, axis=1)
        block = Block(tokens, place, seen, visible, unseen=active[:, 0], causal=False)
        output = target(weights, block, cache, wants=Wants(final=True))
        slot = jnp.take_along_axis(slots, sources, axis=1, mode="clip")
        features = jnp.take_along_axis(output.final, slot[:, :, None], axis=1, mode="clip")
        written = target.commit(cache, output.delta, None, jnp.where(at < size, at, size))
        return features.reshape(batch, count, -1, features.shape[-1]), written

    shape = jax.eval_shape(lambda: part(sizes[0])[0])
    nothing = lambda: (jnp.zeros(shape.shape, shape.dtype), cache)
    narrowest = (jnp.max(flat.sum(axis=1)) > jnp.asarray(sizes[:-1], jnp.int32)).sum()
    branches = [nothing, *[lambda width=width: part(width) for width in sizes]]
    features, cache = jax.lax.switch(jnp.where(jnp.any(flat), 1 + narrowest, 0), branches)
    return _anew(target, weights, cache, drafts[:, 0], all_seen, source, wide, features, groups)


def _anew(target, weights, cache, tokens, seen, source, wide, features, groups) -> tuple[Array, Any]:
    """Features and cache, with those of the rows `wide`, which are read in full."""
    batch, size = tokens.shape
    rows = -(-TOGETHER // size)

    def read(tokens, seen, source, groups, cache, dst):
        output = read_whole(target, weights, tokens, seen, groups)
        found = jnp.take_along_axis(output.final, source[:, :, None], axis=1, mode="clip")
        return found[:, None], target.commit(cache, output.delta, None, dst)

    if rows >= batch or parts(known_mesh(), "batch") > 1:  # rows stay where a mesh has placed them

        def together():
            dst = jnp.where(wide[:, None], jnp.arange(size)[None], size)
            found, written = read(tokens, seen, source, groups, cache, dst)
            return jnp.where(wide[:, None, None, None], found, features), written

        return jax.lax.cond(jnp.any(wide), together, lambda: (features, cache))

    order = jnp.argsort(~wide, stable=True)
    total = wide.sum()

    def some(index, carry):
        features, cache = carry
        place = index * rows + jnp.arange(rows)
        chosen = order[jnp.minimum(place, batch - 1)]
        own = jax.tree.map(lambda leaf: leaf[chosen], cache)
        group = None if groups is None else groups[chosen]
        found, written = read(tokens[chosen], seen[chosen], source[chosen], group, own, jnp.zeros_like(chosen))
        into = jnp.where(place < total, chosen, batch)
        put = lambda leaf, new: leaf.at[into].set(new, mode="drop")
        found = jnp.broadcast_to(found, (rows, *features.shape[1:]))
        return put(features, found), jax.tree.map(put, cache, written)

    return jax.lax.fori_loop(0, -(-total // rows), some, (features, cache))
