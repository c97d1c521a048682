"""No noise: the mean embedding under the distribution of the likeliest tokens (arXiv:2505.15778)."""

import dataclasses

import jax.numpy as jnp

from specjax.about import About
from specjax.soft.base import Mixer, heaviest, likeliest


@dataclasses.dataclass(frozen=True)
class Mean(Mixer):
    """Weights p, the renormalised distribution of the n likeliest tokens after all warpers. A thinking row draws nothing."""

    about = About("mean", "the distribution's own weights, nothing drawn", "arXiv:2505.15778", "own text")

    def mix(self, logits, sampler):
        ids, log_p, finite = likeliest(logits, sampler, self.n)
        return heaviest(ids, jnp.where(finite[:, None], jnp.exp(log_p), 1.0 / ids.shape[1]), finite)
