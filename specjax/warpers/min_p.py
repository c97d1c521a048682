"""Min-p (Nguyen et al. 2024, arXiv:2407.01082, section 3)."""

import dataclasses

import jax.numpy as jnp

from specjax.about import About
from specjax.warpers.base import Cut, parameter


@dataclasses.dataclass(frozen=True)
class MinP(Cut):
    """Keeps tokens that have at least this share of the likeliest token's probability.

    Attributes:
      min_p: float32 in [0, 1]; 0 is off.
    """

    about = About(
        "min_p", "keeps tokens of a share of the likeliest one's probability", "arXiv:2407.01082", "same text"
    )
    usual = True

    min_p: float = parameter(
        0.0,
        "keep tokens of at least this share of the likeliest's probability; 0 is off",
        "in [0, 1]",
        lambda x: (x >= 0) & (x <= 1),
    )

    def lowest(self, scores, own, on):
        return scores.max(axis=-1) + jnp.log(own["min_p"])[:, None]
