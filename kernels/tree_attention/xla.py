"""Tree attention in plain XLA, in one piece: right everywhere, and the gradient of every other way."""

import jax.numpy as jnp

from specjax.kernels.tree_attention.parts import MASKED, mix, prefix_visible, scores


def attend(
    queries, key, value, cache_key, cache_value, length, visible, query_positions, unseen, key_scale, value_scale,
    *, scale, window, soft_cap,
):  # fmt: skip
    """One softmax over prefix and block scores laid side by side; see `api.attend_with`."""
    own = scores(queries, key, visible, scale, soft_cap)
    laid = own
    if cache_key is not None:
        slots = jnp.arange(cache_key.shape[2])[None]
        seen = prefix_visible(slots, length, query_positions, unseen, window)
        laid = jnp.concatenate([scores(queries, cache_key, seen, scale, soft_cap, key_scale), own], axis=-1)
    weights = jnp.where(laid > MASKED / 2, jnp.exp(laid - laid.max(axis=-1, keepdims=True)), 0.0)
    weights = weights / jnp.maximum(weights.sum(axis=-1, keepdims=True), 1e-30)
    split = laid.shape[-1] - own.shape[-1]
    out = mix(weights[..., split:], value)
    return out if cache_value is None else out + mix(weights[..., :split], cache_value, value_scale, value.dtype)
