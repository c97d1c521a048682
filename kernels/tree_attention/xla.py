"""Tree attention in plain XLA, in one piece: right everywhere, and the gradient of every other way."""

import jax
import jax.numpy as jnp

from specjax.kernels.tree_attention.parts import MASKED, Found, finished, mix, prefix_visible, scores


def attend(*operands, **options):
    """See `api.attend_with`."""
    return finished(find(*operands, **options))


def find(
    queries, key, value, cache_key, cache_value, length, visible, query_positions, unseen, key_scale, value_scale,
    *, scale, window, soft_cap,
):  # fmt: skip
    """One softmax over prefix and block scores laid side by side, as `Found`."""
    own = scores(queries, key, visible, scale, soft_cap)
    laid = own
    if cache_key is not None:
        slots = jnp.arange(cache_key.shape[2])[None]
        seen = prefix_visible(slots, length, query_positions, unseen, window)
        laid = jnp.concatenate([scores(queries, cache_key, seen, scale, soft_cap, key_scale), own], axis=-1)
    peak = jax.lax.stop_gradient(laid.max(axis=-1, keepdims=True))
    weights = jnp.where(laid > MASKED / 2, jnp.exp(laid - peak), 0.0)
    total = weights.sum(axis=-1, keepdims=True)
    split = laid.shape[-1] - own.shape[-1]
    sums = mix(weights[..., split:], value)
    if cache_value is not None:
        sums = sums + mix(weights[..., :split], cache_value, value_scale, value.dtype)
    return Found(peak, total, sums)
