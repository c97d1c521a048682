"""The one definition of the warpers: plain sampling, drafting and verification all call it.

The order is `transformers`': repetition penalty, then, for sampled rows only, temperature, top-k, top-p, min-p.
"""

import jax
import jax.numpy as jnp

from specjax.sampling.top_k_top_p import cut
from specjax.sampling_params import Sampling

Array = jax.Array


def warp(logits: Array, sampling: Sampling, live: Array) -> Array:
    """Scores `[B, T, V]` of sampled rows after temperature and filters; removed tokens are -inf.

    Rows at temperature 0 come back unchanged. Filters cost nothing unless a live row uses them.

    Args:
      logits: `[B, T, V]` float32, after the repetition penalty.
      sampling: the rows' parameters.
      live: `[B]` bool, rows whose result matters.
    """
    sampled = sampling.temperature > 0
    active = live & sampled
    heat = jnp.where(sampled, sampling.temperature, 1.0)[:, None, None]
    scores = logits / heat

    ranks = sampled & ((sampling.top_k > 0) | (sampling.top_p < 1))
    lowest = jax.lax.cond(
        jnp.any(active & ranks),
        lambda: jnp.where(ranks[:, None], cut(scores, sampling.top_k, sampling.top_p, active), -jnp.inf),
        lambda: jnp.full(scores.shape[:2], -jnp.inf),
    )
    # min-p compares with the likeliest token, which the other filters never remove: its cut is a score as well
    share = scores.max(axis=-1) + jnp.log(sampling.min_p)[:, None]
    lowest = jnp.maximum(lowest, jnp.where((sampled & (sampling.min_p > 0))[:, None], share, -jnp.inf))
    # this way round NaN stays, and a draw from it fails, instead of being removed
    return jnp.where(scores < lowest[:, :, None], -jnp.inf, scores)
