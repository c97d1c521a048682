"""Temperature: how far the model's own distribution is flattened."""

import dataclasses

import jax.numpy as jnp
import numpy as np

from specjax.about import About
from specjax.warpers.base import Warper, parameter


@dataclasses.dataclass(frozen=True)
class Temperature(Warper):
    """Divides the scores; rows at 0 are greedy.

    Attributes:
      temperature: float32; 0 is greedy, and skips all warpers except the logit warpers.
    """

    about = About("temperature", "flattens the distribution; 0 takes the likeliest token", "transformers", "same text")
    usual = True

    temperature: float = parameter(0.0, "0 is greedy", "a finite number >= 0", lambda x: (x >= 0) & np.isfinite(x))

    def __call__(self, scores, own, on, text):
        return self.warp(scores, own, text)  # a division costs less than a branch

    def warp(self, scores, own, text):
        heat = own["temperature"]
        return scores / jnp.where(heat > 0, heat, 1.0)[:, None, None]
