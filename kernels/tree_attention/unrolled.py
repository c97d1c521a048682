"""Attention of repeated passes over the same slots, as training unrolls a draft; in XLA, with a gradient.

A query sees one key of every later pass. So there are `[B, T, s]` scores in addition to the first pass's `[B, T, T]`,
computed for some queries at a time. That replaces a mask and scores `[B, T, (s + 1) T]`.
"""

import dataclasses

import jax
import jax.numpy as jnp

from specjax.kernels.chunks import QUERIES, chunked
from specjax.kernels.tree_attention.parts import (
    MASKED,
    Found,
    capped,
    finished,
    grouped,
    mix,
    of_queries,
    scores,
    ungrouped,
)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Unrolled:
    """The keys that the last of 1 + s passes over the same T slots sees.

    The keys of all passes are concatenated, the first pass's first.

    Slot t of the last pass drafts s tokens after slot t - s of the first. It sees that slot and those before it. Of
    pass r, 0 < r <= s, it sees only slot t - s + r, which is on the way.

    Attributes:
      first: `[B or 1, T, T]` bool, which slots of the first pass a query sees.
      later: `[B or 1, T, s]` bool, whether it sees its slot of pass 1, 2, ... s; the last one is its own.
    """

    first: jax.Array
    later: jax.Array


def attend(query, key, value, visible: Unrolled, *, positions, scale, window, soft_cap, sinks):
    """See `api.tree_attention`: `key` and `value` are those of all passes, `[B, (s + 1) T, K, H]`, and nothing is cached.

    Args:
      query: `[B, T, K * G, H]`.
      key: see above.
      value: as `key`, or of another width; None: the keys.
      visible: see `Unrolled`.
      positions: `[B, T]` of the slots, read only under a `window`.
      scale: see `api.tree_attention`.
      window: see `api.tree_attention`.
      soft_cap: see `api.tree_attention`.
      sinks: see `api.tree_attention`.
    """
    value = key if value is None else value
    width, passes, heads = query.shape[1], visible.later.shape[2], key.shape[2]
    first, later = visible.first, visible.later
    if window is not None:
        first = first & (positions[:, :, None] - positions[:, None] < window)
        later = later & (jnp.arange(passes)[::-1] < window)[None, None]
    key, value = (x.reshape(x.shape[0], passes + 1, width, *x.shape[2:]) for x in (key, value))
    near = [_near(x, passes) for x in (key, value)]
    key, value = key[:, 0].swapaxes(1, 2), value[:, 0].swapaxes(1, 2)

    def of_some(inputs):
        query, first, later, near_key, near_value = inputs
        q = grouped(query, heads)
        one = (*q.shape[:2], query.shape[1], -1, q.shape[3])  # a slot's queries, adjacent
        beside = jnp.einsum("bktgh,btskh->bktgs", q.reshape(one), near_key, preferred_element_type=jnp.float32)
        beside = jnp.where(later[:, None, :, None], capped(beside * scale, soft_cap), MASKED)
        before = scores(q, key, first, scale, soft_cap)
        laid = jnp.concatenate([before, beside.reshape(*q.shape[:3], passes)], axis=-1)
        peak = jax.lax.stop_gradient(laid.max(axis=-1, keepdims=True))
        weights = jnp.where(laid > MASKED / 2, jnp.exp(laid - peak), 0.0)
        own = weights[..., width:].reshape(*one[:-1], passes).astype(near_value.dtype)
        sums = jnp.einsum("bktgs,btskh->bktgh", own, near_value, preferred_element_type=jnp.float32)
        sums = mix(weights[..., :width], value) + sums.reshape(*q.shape[:3], -1)
        found = Found(peak, weights.sum(axis=-1, keepdims=True), sums)
        return ungrouped(finished(found, None if sinks is None else of_queries(sinks, query, heads)), query)

    return chunked(of_some, (query, first, later, *near), QUERIES)


def _near(x, passes):
    """The keys that each slot sees of the later passes, `[B, T, s, K, H]`, from keys `[B, s + 1, T, K, H]`."""
    moved = [jnp.roll(x[:, r], passes - r, axis=1) for r in range(1, passes + 1)]  # slots that wrap around are not seen
    return jnp.stack(moved, axis=2)
