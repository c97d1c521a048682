"""Tree attention over the used part of the cache, block by block: the fast path on a CPU.

A row's cache has a fixed capacity, of which a step may see little. Blocks of slots are read one at a time, only as many as
the longest row has filled, with a running softmax (Milakov and Gimelshein 2018, arXiv:1805.02867). Slots that a row does not
see add exactly nothing to it, however many there are.
"""

import jax
import jax.numpy as jnp

from specjax.kernels.tree_attention.parts import MASKED, mix, prefix_visible, scores

BLOCK = 128
"""Cache slots read at a time."""


def attend(queries, key, value, cache_key, cache_value, length, visible, query_positions, *, scale, window):
    """See `api.attend_with`. Needs a cache."""
    capacity = cache_key.shape[2]
    size = min(BLOCK, capacity)

    def add(carry, scored, value):
        peak, total, out = carry
        new = jnp.maximum(peak, scored.max(axis=-1, keepdims=True))
        weights = jnp.where(scored > MASKED / 2, jnp.exp(scored - new), 0.0)
        keep = jnp.exp(peak - new)
        total = total * keep + weights.sum(axis=-1, keepdims=True)
        return new, total, out * keep + mix(weights.astype(value.dtype), value)

    def read(i, carry):
        start = jnp.minimum(i * size, capacity - size)  # the last block may begin inside the one before
        keys, values = (jax.lax.dynamic_slice_in_dim(x, start, size, axis=2) for x in (cache_key, cache_value))
        slots = start + jnp.arange(size)[None]
        seen = prefix_visible(slots, length, query_positions, window) & (slots >= i * size)[None]
        return add(carry, scores(queries, keys, seen, scale), values)

    shape = queries.shape
    nothing = jnp.full((*shape[:3], 1), MASKED), jnp.zeros((*shape[:3], 1)), jnp.zeros(shape)
    carry = add(nothing, scores(queries, key, visible, scale), value)
    first = 0 if window is None else jnp.maximum(jnp.min(query_positions) - window + 1, 0) // size
    last = -(-jnp.max(jnp.minimum(length, capacity)) // size)
    _, total, out = jax.lax.fori_loop(first, last, read, carry)
    return out / jnp.maximum(total, 1e-30)
