"""Tree attention over the used part of the cache, block by block: the fast path on a CPU.

A row's cache has a fixed capacity, of which a step may see little. Blocks of slots are read one at a time, only as many
as the longest row has filled, with a running softmax (Milakov and Gimelshein 2018, arXiv:1805.02867). Slots that a row
does not see add exactly nothing to its result, whatever their number.
"""

import jax
import jax.numpy as jnp

from specjax.kernels.tree_attention.parts import (
    Found,
    Operands,
    finished,
    mix,
    nothing,
    prefix_visible,
    running,
    scores,
)

BLOCK = 128
"""Cache slots read at a time."""


def attend(operands: Operands, **options) -> jax.Array:
    """See `api.attend_with`. Needs a cache."""
    return finished(find(operands, **options), operands.sinks)


def find(operands: Operands, *, scale, window, soft_cap) -> Found:
    """The same as `Found`."""
    o = operands
    scored = scores(o.queries, o.key, o.visible, scale, soft_cap, added=o.added(o.key_positions))
    own = add(nothing(o.result_shape), scored, o.values)
    return prefix(own, operands, scale=scale, window=window, soft_cap=soft_cap)


def add(found, scored, value, value_scale=None, dtype=None):
    """Adds keys with the scores `[B, K, M, S]` to a result; see `parts.mix`."""
    (peak, total), weights, keep = running(found[:2], scored)
    return Found(peak, total, found.sums * keep + mix(weights, value, value_scale, dtype))


def prefix(found: Found, operands: Operands, *, scale, window, soft_cap) -> Found:
    """Adds the cache to a result; only the type of the block's own keys is read."""
    o = operands
    capacity = o.cache_key.shape[2]
    cache_value, value_scale = o.cache_values
    size = min(BLOCK, capacity)

    def read(i, found):
        start = jnp.minimum(i * size, capacity - size)  # the last block may overlap the previous one
        cut = lambda x, axis: None if x is None else jax.lax.dynamic_slice_in_dim(x, start, size, axis)
        slots = start + jnp.arange(size)[None]
        held = cut(o.cache_positions, 1)
        seen = prefix_visible(slots, o.length, o.query_positions, cut(o.unseen, 1), window, held)
        seen = seen & (slots >= i * size)[None]
        added = o.added(slots if held is None else held)
        scored = scores(o.queries, cut(o.cache_key, 2), seen, scale, soft_cap, cut(o.key_scale, 2), added)
        return add(found, scored, cut(cache_value, 2), cut(value_scale, 2), o.values.dtype)

    near = window is not None and o.cache_positions is None  # the slots of a ring are not ordered
    first = 0 if not near else jnp.maximum(jnp.min(o.query_positions) - window + 1, 0) // size
    last = -(-jnp.max(jnp.minimum(o.length, capacity)) // size)
    return jax.lax.fori_loop(first, last, read, found)
