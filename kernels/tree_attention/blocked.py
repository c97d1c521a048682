"""Tree attention over the used part of the cache, block by block: the fast path on a CPU.

A row's cache has a fixed capacity, of which a step may see little. Blocks of slots are read one at a time, only as many as
the longest row has filled, with a running softmax (Milakov and Gimelshein 2018, arXiv:1805.02867). Slots that a row does not
see add exactly nothing to it, however many there are.
"""

import jax
import jax.numpy as jnp

from specjax.kernels.tree_attention.xla import (
    MASKED,
    block_visible,
    grouped_queries,
    masked,
    mix,
    scores_of,
    ungrouped,
)

BLOCK = 128
"""Cache slots read at a time."""


def tree_attention(
    query,
    key,
    value,
    cache_key,
    cache_value,
    length,
    *,
    visible,
    query_positions,
    key_positions,
    causal,
    scale,
    window,
):
    """See `api.tree_attention`. Needs a cache; cannot be differentiated in reverse, since it does not read all of it."""
    group = query.shape[2] // key.shape[2]
    queries = grouped_queries(query, key.shape[2])
    visible = block_visible(query, key, visible, query_positions, key_positions, causal, window)
    capacity = cache_key.shape[2]
    size = min(BLOCK, capacity)

    def add(carry, scores, value):
        peak, total, out = carry
        new = jnp.maximum(peak, scores.max(axis=-1, keepdims=True))
        weights = jnp.where(scores > MASKED / 2, jnp.exp(scores - new), 0.0)
        keep = jnp.exp(peak - new)
        total = total * keep + weights.sum(axis=-1, keepdims=True)
        return new, total, out * keep + mix(weights.astype(value.dtype), value)

    def read(i, carry):
        start = jnp.minimum(i * size, capacity - size)  # the last block may begin inside the one before
        keys, values = (jax.lax.dynamic_slice_in_dim(x, start, size, axis=2) for x in (cache_key, cache_value))
        slots = start + jnp.arange(size)[None]
        seen = ((slots < length[:, None]) & (slots >= i * size))[:, None, :]
        if window is not None:
            seen = seen & (query_positions[:, :, None] - slots[None] < window)
        return add(carry, masked(scores_of(queries, keys) * scale, seen, group), values)

    shape = queries.shape
    nothing = jnp.full((*shape[:3], 1), MASKED), jnp.zeros((*shape[:3], 1)), jnp.zeros(shape)
    own = masked(scores_of(queries, key.swapaxes(1, 2)) * scale, visible, group)
    carry = add(nothing, own, value.swapaxes(1, 2))
    first = 0
    if window is not None:
        first = jnp.maximum(jnp.min(query_positions) - window + 1, 0) // size
    last = -(-jnp.max(jnp.minimum(length, capacity)) // size)
    _, total, out = jax.lax.fori_loop(first, last, read, carry)
    return ungrouped(out / jnp.maximum(total, 1e-30), query)
