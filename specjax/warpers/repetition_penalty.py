"""Repetition penalty (Keskar et al. 2019, CTRL, section 4.1), over the text and over a node's own path."""

import dataclasses

import jax.numpy as jnp
import numpy as np

from specjax.about import About
from specjax.warpers.base import Warper, parameter


@dataclasses.dataclass(frozen=True)
class RepetitionPenalty(Warper):
    """Divides positive logits and multiplies negative logits of tokens in the text, prompt included.

    Attributes:
      repetition_penalty: float32 > 0; 1 is off.
    """

    about = About(
        "repetition_penalty", "lowers tokens that were there before", "arXiv:1909.05858, section 4.1", "same text"
    )
    of_logits = True
    reads_text = True
    usual = True

    repetition_penalty: float = parameter(
        1.0,
        "penalty of tokens that the text has already; 1 is off",
        "a finite number > 0",
        lambda x: (x > 0) & np.isfinite(x),
    )

    def warp(self, scores, own, text):
        factor, seen = own["repetition_penalty"][:, None, None], text.counts(scores.shape[-1], bool)
        return jnp.where(seen, jnp.where(scores < 0, scores * factor, scores / factor), scores)
