"""Tree attention in plain XLA, in one piece: works everywhere, and gives the gradient of every other implementation."""

import jax
import jax.numpy as jnp

from specjax.kernels.tree_attention.parts import MASKED, Found, Operands, finished, mix, prefix_visible, scores


def attend(operands: Operands, **options) -> jax.Array:
    """See `api.attend_with`."""
    return finished(find(operands, **options), operands.sinks)


def find(operands: Operands, *, scale, window, soft_cap) -> Found:
    """One softmax over concatenated prefix and block scores, as `Found`."""
    o = operands
    own = scores(o.queries, o.key, o.visible, scale, soft_cap, added=o.added(o.key_positions))
    laid = own
    if o.cache_key is not None:
        slots = jnp.arange(o.cache_key.shape[2])[None]
        seen = prefix_visible(slots, o.length, o.query_positions, o.unseen, window, o.cache_positions)
        added = o.added(slots if o.cache_positions is None else o.cache_positions)
        before = scores(o.queries, o.cache_key, seen, scale, soft_cap, o.key_scale, added)
        laid = jnp.concatenate([before, own], axis=-1)
    peak = jax.lax.stop_gradient(laid.max(axis=-1, keepdims=True))
    weights = jnp.where(laid > MASKED / 2, jnp.exp(laid - peak), 0.0)
    total = weights.sum(axis=-1, keepdims=True)
    split = laid.shape[-1] - own.shape[-1]
    sums = mix(weights[..., split:], o.values)
    if o.cache_key is not None:
        sums = sums + mix(weights[..., :split], *o.cache_values, o.values.dtype)
    return Found(peak, total, sums)
