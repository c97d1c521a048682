"""Gumbel-softmax: a mixture of the tokens that plain decoding was likeliest to draw (arXiv:2508.03440)."""

import dataclasses
import math

import jax
import jax.numpy as jnp

from specjax.about import About
from specjax.soft.base import Mixed, Mixer


@dataclasses.dataclass(frozen=True)
class GumbelSoftmax(Mixer):
    """Weights `softmax((log p + g) / tau)` over the n tokens with the highest `log p + g`; p is after all warpers.

    g is the Gumbel vector of the place. So the heaviest token is the one that plain decoding draws there from the same
    inputs, and with `tau` 0 the whole text is plain decoding's. The published rule takes the n likeliest tokens before
    the noise, which are the same if a row's `top_k` is n or less.

    Attributes:
      tau: 0 or more; 0 takes only the heaviest.

    Raises:
      ValueError: for numbers out of range.
    """

    about = About("gumbel", "weights by Gumbel-softmax of the distribution", "arXiv:2508.03440", "own text")

    tau: float = 0.5

    def __post_init__(self):
        super().__post_init__()
        if not 0 <= self.tau < math.inf:
            raise ValueError(f"tau must be a finite number >= 0, got {self.tau}")

    def mix(self, logits, sampler):
        scores = sampler.scores(logits, 0)[:, 0]
        top, ids = jax.lax.top_k(scores, min(self.n, scores.shape[1]))
        finite = jnp.isfinite(top[:, 0]) & ~jnp.isnan(scores).any(axis=1)  # a maximum may lose a NaN
        gap = jnp.where(finite[:, None], top - top[:, :1], 0.0)
        alone = (sampler.params.temperature == 0)[:, None] | (self.tau == 0)
        first = jnp.arange(top.shape[1])[None] == 0
        weights = jnp.where(alone, first.astype(jnp.float32), jax.nn.softmax(gap / (self.tau or 1.0), axis=1))
        return Mixed(ids, weights, jnp.where(finite, ids[:, 0], -1))

    def plain(self, logits, sampler, mixed):
        return mixed.token
