"""Tree attention in plain XLA, in one piece: the reference, and the way that can be differentiated."""

import jax
import jax.numpy as jnp

MASKED = -1e30  # finite: a query that sees nothing must not make NaN


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
    """See `api.tree_attention`. One softmax over prefix and block scores laid side by side."""
    keys, group = key.shape[1], query.shape[2] // key.shape[2]
    queries = grouped_queries(query, key.shape[2])
    visible = block_visible(query, key, visible, query_positions, key_positions, causal, window)
    scores = masked(scores_of(queries, key.swapaxes(1, 2)) * scale, visible, group)

    if cache_key is not None:
        slots = jnp.arange(cache_key.shape[2])[None]
        seen = (slots < length[:, None])[:, None, :]
        if window is not None:
            seen = seen & (query_positions[:, :, None] - slots[None] < window)
        prefix = masked(scores_of(queries, cache_key) * scale, seen, group)
        scores = jnp.concatenate([prefix, scores], axis=-1)

    peak = scores.max(axis=-1, keepdims=True)
    weights = jnp.where(scores > MASKED / 2, jnp.exp(scores - peak), 0.0)
    weights = weights / jnp.maximum(weights.sum(axis=-1, keepdims=True), 1e-30)
    weights = weights.astype(value.dtype)
    split = weights.shape[-1] - keys
    out = mix(weights[..., split:], value.swapaxes(1, 2))
    if cache_value is not None:
        out += mix(weights[..., :split], cache_value)
    return ungrouped(out, query)


def grouped_queries(query, kv_heads):
    """Queries `[B, K, T * G, H]`: the small operand is rearranged, the cache is multiplied where it lies."""
    batch, block, heads, width = query.shape
    group = heads // kv_heads
    query = query.reshape(batch, block, kv_heads, group, width).transpose(0, 2, 1, 3, 4)
    return query.reshape(batch, kv_heads, block * group, width)


def ungrouped(out, query):
    """`[B, K, T * G, H]` in the queries' order and type."""
    batch, block, heads, width = query.shape
    out = out.reshape(batch, out.shape[1], block, -1, width).transpose(0, 2, 1, 3, 4)
    return out.reshape(query.shape).astype(query.dtype)


def block_visible(query, key, visible, query_positions, key_positions, causal, window):
    """Which uncommitted keys a query sees, `[B or 1, T or 1, P + T]` bool."""
    block, keys = query.shape[1], key.shape[1]
    if visible is None:
        visible = jnp.tril(jnp.ones((block, keys), bool), keys - block) if causal else jnp.ones((block, keys), bool)
        visible = visible[None]
    if window is not None:
        visible = visible & (query_positions[:, :, None] - key_positions[:, None, :] < window)
    return visible


def scores_of(query, key):
    """`[B, K, M, H]` and `[B, K, S, H]` to `[B, K, M, S]`."""
    return jax.lax.dot_general(query, key, (((3,), (3,)), ((0, 1), (0, 1))), preferred_element_type=jnp.float32)


def mix(weights, value):
    """`[B, K, M, S]` and `[B, K, S, H]` to `[B, K, M, H]`."""
    return jax.lax.dot_general(weights, value, (((3,), (2,)), ((0, 1), (0, 1))), preferred_element_type=jnp.float32)


def masked(scores, visible, group):
    """Scores `[B, K, T * G, S]` where `visible` `[B or 1, T or 1, S]`, else MASKED."""
    visible = jnp.repeat(visible, group, axis=1) if visible.shape[1] > 1 else visible
    return jnp.where(visible[:, None], scores, MASKED)
