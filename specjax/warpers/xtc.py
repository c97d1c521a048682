"""XTC: now and then the likeliest choices are left out.

The rule is that of the pull request which brought it into text-generation-webui (#6335).
"""

import dataclasses

import jax
import jax.numpy as jnp

from specjax.about import About
from specjax.warpers.base import Warper, parameter


@dataclasses.dataclass(frozen=True)
class Xtc(Warper):
    """At some places removes every token that has a probability, but the least likely of those that have it.

    Whether it acts at a place is decided by the row's own noise there.

    Attributes:
      xtc_probability: float32 in [0, 1], of acting at a place; 0 is off.
      xtc_threshold: float32 in (0, 1]; ties with the least likely are all kept; above 0.5 nothing happens.
    """

    about = About("xtc", "now and then leaves out the likeliest tokens", "text-generation-webui #6335", "same text")
    reads_text = True

    xtc_probability: float = parameter(
        0.0, "how often the likeliest tokens are left out; 0 is off", "in [0, 1]", lambda x: (x >= 0) & (x <= 1)
    )
    xtc_threshold: float = parameter(
        0.1, "those of at least this probability, but the least likely of them", "in (0, 1]",
        lambda x: (x > 0) & (x <= 1), switch=False,
    )  # fmt: skip

    def warp(self, scores, own, text):
        chances = jax.nn.softmax(scores, axis=-1)
        likely = chances >= own["xtc_threshold"][:, None, None]
        least = jnp.where(likely, scores, jnp.inf).min(axis=-1, keepdims=True)
        acts = text.uniform(text.positions()) < own["xtc_probability"][:, None]
        return jnp.where(acts[:, :, None] & likely & (scores > least), -jnp.inf, scores)
