"""What the implementations share: who sees whom, and the two products. `M` is T * G, the queries of one kv-head."""

import jax
import jax.numpy as jnp

MASKED = -1e30  # finite: a query that sees nothing must not make NaN


def grouped(query, kv_heads):
    """Queries `[B, K, M, H]`: the small operand is rearranged, the cache is multiplied where it lies."""
    batch, block, heads, width = query.shape
    query = query.reshape(batch, block, kv_heads, heads // kv_heads, width).transpose(0, 2, 1, 3, 4)
    return query.reshape(batch, kv_heads, -1, width)


def ungrouped(out, query):
    """`[B, K, M, H]` in the queries' order and type."""
    batch, block, _, width = query.shape
    out = out.reshape(batch, out.shape[1], block, -1, width).transpose(0, 2, 1, 3, 4)
    return out.reshape(query.shape).astype(query.dtype)


def own_visible(block, keys, visible, query_positions, key_positions, causal, window):
    """Which of `keys` uncommitted keys a query of the block sees, `[B or 1, T, P + T]` bool."""
    if visible is None:
        visible = jnp.tril(jnp.ones((block, keys), bool), keys - block) if causal else jnp.ones((block, keys), bool)
        visible = visible[None]
    if window is not None:
        visible = visible & (query_positions[:, :, None] - key_positions[:, None, :] < window)
    return visible


def prefix_visible(slots, length, query_positions, window):
    """Which cache `slots` `[1, S]` a query sees, `[B, T or 1, S]` bool."""
    seen = (slots < length[:, None])[:, None, :]
    return seen if window is None else seen & (query_positions[:, :, None] - slots[None] < window)


def scores(query, key, visible, scale):
    """Queries `[B, K, M, H]` times keys `[B, K, S, H]`, MASKED where not `visible` `[B or 1, T or 1, S]`: `[B, K, M, S]`."""
    product = jax.lax.dot_general(query, key, (((3,), (3,)), ((0, 1), (0, 1))), preferred_element_type=jnp.float32)
    if visible.shape[1] > 1:
        visible = jnp.repeat(visible, query.shape[2] // visible.shape[1], axis=1)
    return jnp.where(visible[:, None], product * scale, MASKED)


def mix(weights, value):
    """`[B, K, M, S]` and `[B, K, S, H]` to `[B, K, M, H]`."""
    return jax.lax.dot_general(weights, value, (((3,), (2,)), ((0, 1), (0, 1))), preferred_element_type=jnp.float32)
