"""Tree attention in plain XLA: the reference, and the fast path on a CPU."""

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
    batch, block, heads, width = query.shape
    kv_heads, keys = key.shape[2], key.shape[1]
    grouped = query.reshape(batch, block, kv_heads, heads // kv_heads, width)

    if visible is None:
        visible = jnp.tril(jnp.ones((block, keys), bool), keys - block) if causal else jnp.ones((block, keys), bool)
        visible = visible[None]
    if window is not None:
        visible = visible & (query_positions[:, :, None] - key_positions[:, None, :] < window)
    scores = jnp.einsum("btkgh,bskh->bktgs", grouped, key, preferred_element_type=jnp.float32) * scale
    scores = jnp.where(visible[:, None, :, None, :], scores, MASKED)

    if cache_key is not None:
        slots = jnp.arange(cache_key.shape[2])[None]
        seen = (slots < length[:, None])[:, None, :]
        if window is not None:
            seen = seen & (query_positions[:, :, None] - slots[None] < window)
        prefix = jnp.einsum("btkgh,bksh->bktgs", grouped, cache_key, preferred_element_type=jnp.float32) * scale
        prefix = jnp.where(seen[:, None, :, None, :], prefix, MASKED)
        scores = jnp.concatenate([prefix, scores], axis=-1)

    peak = scores.max(axis=-1, keepdims=True)
    weights = jnp.where(scores > MASKED / 2, jnp.exp(scores - peak), 0.0)
    weights = weights / jnp.maximum(weights.sum(axis=-1, keepdims=True), 1e-30)
    weights = weights.astype(value.dtype)
    split = weights.shape[-1] - keys
    out = jnp.einsum("bktgs,bskh->btkgh", weights[..., split:], value, preferred_element_type=jnp.float32)
    if cache_value is not None:
        out += jnp.einsum("bktgs,bksh->btkgh", weights[..., :split], cache_value, preferred_element_type=jnp.float32)
    return out.reshape(batch, block, heads, width).astype(query.dtype)
