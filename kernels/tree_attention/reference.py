"""The definition of tree attention in loops and float64: slow and obvious, for comparison with every implementation."""

import numpy as np


def reference(
    query, key, value, cache_key, cache_value, length, *, visible=None, query_positions=None, key_positions=None,
    unseen=None, causal=True, scale, window=None, soft_cap=None, key_scale=None, value_scale=None,
    sinks=None, cache_positions=None, distances=None,
):  # fmt: skip
    """Takes the arguments of `tree_attention`, and returns `[B, T, K * G, H]` in float64; H is that of values."""
    exact = lambda x: np.asarray(x).astype(np.float64)
    if value is None:
        value, cache_value, value_scale = key, cache_key, key_scale
    query, key, value = exact(query), exact(key), exact(value)
    empty = lambda own: np.zeros((query.shape[0], key.shape[2], 0, own.shape[3]))
    cache_key = empty(key) if cache_key is None else exact(cache_key)
    cache_value = empty(value) if cache_value is None else exact(cache_value)
    if key_scale is not None:
        cache_key, cache_value = _scaled(cache_key, exact(key_scale)), _scaled(cache_value, exact(value_scale))
    given = visible, unseen, cache_positions
    visible, unseen, cache_positions = (None if x is None else np.asarray(x) for x in given)
    batch, block, heads, _ = query.shape
    kv_heads, past = key.shape[2], key.shape[1] - block
    length = np.asarray(length)
    at = np.zeros((batch, block), int) if query_positions is None else np.asarray(query_positions)
    own_at = np.zeros((batch, past + block), int) if key_positions is None else np.asarray(key_positions)
    out = np.zeros((batch, block, heads, value.shape[3]))
    for b, t, n in np.ndindex(batch, block, heads):
        k = n // (heads // kv_heads)
        near = lambda position, b=b, t=t: window is None or at[b, t] - position < window
        keys, values, held = [], [], []
        for s in range(min(int(length[b]), cache_key.shape[2])):
            if near(s if cache_positions is None else int(cache_positions[b, s])) and not (
                unseen is not None and unseen[b, s]
            ):
                keys.append(cache_key[b, k, s])
                values.append(cache_value[b, k, s])
                held.append(s if cache_positions is None else int(cache_positions[b, s]))
        for i in range(past + block):
            seen = visible[b, t, i] if visible is not None else (not causal or i - past <= t)
            if seen and near(own_at[b, i]):
                keys.append(key[b, i, k])
                values.append(value[b, i, k])
                held.append(own_at[b, i])
        if keys:
            scores = np.stack(keys) @ query[b, t, n] * scale
            scores = scores if soft_cap is None else soft_cap * np.tanh(scores / soft_cap)
            if distances is not None:
                reach = distances.shape[1] // 2
                scores = scores + exact(distances)[n, np.clip(np.asarray(held) - at[b, t], -reach, reach) + reach]
            sink = np.zeros(0) if sinks is None else exact(sinks)[n : n + 1]
            weights = np.exp(np.concatenate([scores, sink]) - np.max(np.concatenate([scores, sink])))
            out[b, t, n] = weights[: len(values)] / weights.sum() @ np.stack(values)
    return out


def _scaled(x, scale):
    """Numbers `[B, K, S, H]` times scales `[B, K G, S]` of their G parts."""
    heads, width = x.shape[1], x.shape[3]
    count = scale.shape[1] // heads
    return x * np.repeat(scale.reshape(-1, heads, count, x.shape[2]).swapaxes(2, 3), width // count, axis=3)
