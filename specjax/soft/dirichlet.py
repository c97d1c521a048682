"""Dirichlet: a mixture of the likeliest tokens with weights drawn around their probabilities (arXiv:2508.03440)."""

import dataclasses
import math

import jax
import jax.numpy as jnp

from specjax.about import About
from specjax.sampling.noise import MIXTURE, keys_at
from specjax.soft.base import Mixer, heaviest, likeliest


@dataclasses.dataclass(frozen=True)
class Dirichlet(Mixer):
    """Weights drawn from `Dirichlet(alpha p)`; p is the renormalised distribution of the n likeliest tokens after all warpers.

    A token's Gamma draw belongs to its place and its id, so a near-tie between two tokens changes no other token's
    draw.

    Attributes:
      alpha: above 0; the larger it is, the nearer the weights are to p.

    Raises:
      ValueError: for numbers out of range.
    """

    about = About("dirichlet", "weights drawn from a Dirichlet around the distribution", "arXiv:2508.03440", "own text")

    alpha: float = 1.0

    def __post_init__(self):
        super().__post_init__()
        if not 0 < self.alpha < math.inf:
            raise ValueError(f"alpha must be a finite number above 0, got {self.alpha}")

    def mix(self, logits, sampler):
        ids, log_p, finite = likeliest(logits, sampler, self.n)
        possible = (log_p > -jnp.inf) & finite[:, None]
        keys = keys_at(sampler.key, sampler.length[:, None], MIXTURE)[:, 0]
        draw = lambda key, token, shape: jax.random.loggamma(jax.random.fold_in(key, token), shape)
        shapes = jnp.where(possible, jnp.maximum(self.alpha * jnp.exp(log_p), jnp.finfo(jnp.float32).tiny), 1.0)
        drawn = jax.vmap(jax.vmap(draw, in_axes=(None, 0, 0)))(keys, ids, shapes)
        first = jnp.arange(ids.shape[1])[None] == 0  # if all underflow, the likeliest is left
        usable = possible & (jnp.isfinite(drawn) | first)
        drawn = jnp.where(usable, jnp.maximum(drawn, jnp.finfo(jnp.float32).min), -jnp.inf)
        weights = jax.nn.softmax(jnp.where(finite[:, None], drawn, 0.0), axis=1)
        return heaviest(ids, weights, finite)
