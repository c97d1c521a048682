"""Locally typical sampling (Meister et al. 2022, arXiv:2202.00666, section 3)."""

import dataclasses

import jax
import jax.numpy as jnp

from specjax.about import About
from specjax.warpers.base import Warper, parameter
from specjax.warpers.ranking import reached


@dataclasses.dataclass(frozen=True)
class TypicalP(Warper):
    """Keeps the tokens whose surprisal is nearest to the entropy, as many as are needed for a mass of `typical_p`.

    The likeliest token may be removed.

    Attributes:
      typical_p: float32 in (0, 1]; ties at the last kept distance are all kept; 1 is off.
    """

    about = About(
        "typical_p", "keeps the mass whose surprisal is nearest to the entropy", "arXiv:2202.00666", "same text"
    )

    typical_p: float = parameter(
        1.0, "keep tokens of this mass whose surprisal is nearest to the entropy; 1 is off", "in (0, 1]",
        lambda x: (x > 0) & (x <= 1),
    )  # fmt: skip

    def warp(self, scores, own, text):
        logs = jax.nn.log_softmax(scores, axis=-1)
        chances = jnp.exp(logs)
        entropy = -jnp.where(chances > 0, chances * logs, 0.0).sum(axis=-1, keepdims=True)
        distance = jnp.abs(-logs - entropy)
        farthest = -reached(-distance, chances, jnp.broadcast_to(own["typical_p"][:, None], distance.shape[:-1]))
        return jnp.where(distance > farthest[..., None], -jnp.inf, scores)
