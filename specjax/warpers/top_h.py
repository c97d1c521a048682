"""Top-H: a cut by bounded entropy (Baghaei Potraghloo et al. 2025, arXiv:2509.02510, algorithm 1), as in `transformers`."""

import dataclasses

import jax
import jax.numpy as jnp

from specjax.about import About
from specjax.warpers.base import Cut, parameter

WIDTH = 100  # how many of the likeliest tokens are considered, renormalised among themselves


@dataclasses.dataclass(frozen=True)
class TopH(Cut):
    """Keeps likeliest tokens as long as their terms -p log p add up to at most a share of the entropy.

    Only the 100 likeliest tokens are considered. The paper bounds the entropy of the kept tokens, renormalised; its
    program and `transformers` bound this sum.

    Attributes:
      top_h: float32 in [0, 1]; ties at the cut are all kept; 0 is off.
    """

    about = About(
        "top_h", "keeps the likeliest tokens of a share of entropy", "arXiv:2509.02510, transformers", "same text"
    )

    top_h: float = parameter(
        0.0,
        "keep the likeliest tokens of this share of the entropy; 0 is off",
        "in [0, 1]",
        lambda x: (x >= 0) & (x <= 1),
    )

    def lowest(self, scores, own, on):
        ranked = jax.lax.top_k(scores, min(WIDTH, scores.shape[-1]))[0]
        logs = jax.nn.log_softmax(ranked, axis=-1)
        terms = -jnp.where(logs > -jnp.inf, jnp.exp(logs) * logs, 0.0)
        sums = jnp.cumsum(terms, axis=-1)
        kept = (sums <= own["top_h"][:, None, None] * sums[..., -1:]).sum(axis=-1, keepdims=True)
        return jnp.take_along_axis(ranked, jnp.maximum(kept, 1) - 1, axis=-1)[..., 0]
