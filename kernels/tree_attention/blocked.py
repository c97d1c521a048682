"""Tree attention over the used part of the cache, block by block: the fast path on a CPU.

A row's cache has a fixed capacity, of which a step may see little. Blocks of slots are read one at a time, only as many as
the longest row has filled, with a running softmax (Milakov and Gimelshein 2018, arXiv:1805.02867). Slots that a row does not
see add exactly nothing to it, however many there are.
"""

import jax
import jax.numpy as jnp

from specjax.kernels.tree_attention.parts import Found, finished, mix, nothing, prefix_visible, running, scores

BLOCK = 128
"""Cache slots read at a time."""


def attend(*operands, **options):
    """See `api.attend_with`. Needs a cache."""
    return finished(find(*operands, **options))


def find(
    queries, key, value, cache_key, cache_value, length, visible, query_positions, unseen, key_scale, value_scale,
    *, scale, window, soft_cap,
):  # fmt: skip
    """The same as `Found`."""
    found = add(nothing(queries.shape), scores(queries, key, visible, scale, soft_cap), value)
    return prefix(
        found, queries, cache_key, cache_value, length, query_positions, unseen, key_scale, value_scale,
        scale=scale, window=window, soft_cap=soft_cap, dtype=value.dtype,
    )  # fmt: skip


def add(found, scored, value, value_scale=None, dtype=None):
    """What was found, and among keys with these scores `[B, K, M, S]` besides; see `parts.mix`."""
    (peak, total), weights, keep = running(found[:2], scored)
    return Found(peak, total, found.sums * keep + mix(weights, value, value_scale, dtype))


def prefix(
    found, queries, cache_key, cache_value, length, query_positions, unseen, key_scale, value_scale,
    *, scale, window, soft_cap, dtype,
):  # fmt: skip
    """What was found, and in the cache besides; `dtype` is that of plain values."""
    capacity = cache_key.shape[2]
    size = min(BLOCK, capacity)

    def read(i, found):
        start = jnp.minimum(i * size, capacity - size)  # the last block may begin inside the one before
        cut = lambda x, axis: None if x is None else jax.lax.dynamic_slice_in_dim(x, start, size, axis)
        slots = start + jnp.arange(size)[None]
        seen = prefix_visible(slots, length, query_positions, cut(unseen, 1), window) & (slots >= i * size)[None]
        scored = scores(queries, cut(cache_key, 2), seen, scale, soft_cap, cut(key_scale, 2))
        return add(found, scored, cut(cache_value, 2), cut(value_scale, 2), dtype)

    first = 0 if window is None else jnp.maximum(jnp.min(query_positions) - window + 1, 0) // size
    last = -(-jnp.max(jnp.minimum(length, capacity)) // size)
    return jax.lax.fori_loop(first, last, read, found)
