"""Frequency and presence penalties (OpenAI's API reference, `frequency_penalty` and `presence_penalty`)."""

import dataclasses

import jax.numpy as jnp

from specjax.about import About
from specjax.warpers.base import Warper, parameter

SOURCE = "OpenAI's API"


@dataclasses.dataclass(frozen=True)
class FrequencyPenalty(Warper):
    """Lowers the logits of tokens that were generated before, without the prompt's.

    `logits - frequency_penalty * count - presence_penalty * (count > 0)`, where count is how often a token was
    generated.

    Attributes:
      frequency_penalty: float32 in [-2, 2]; 0 is off.
      presence_penalty: float32 in [-2, 2]; 0 is off.
    """

    about = (
        About(
            "frequency_penalty", "lowers generated tokens by how often they came", SOURCE, "same text",
            fields=("frequency_penalty",),
        ),
        About(
            "presence_penalty", "lowers tokens that were generated at all", SOURCE, "same text",
            fields=("presence_penalty",),
        ),
    )  # fmt: skip
    of_logits = True
    reads_text = True

    frequency_penalty: float = parameter(
        0.0, "subtracted for each time that the token was generated; 0 is off", "in [-2, 2]", lambda x: abs(x) <= 2
    )
    presence_penalty: float = parameter(
        0.0, "subtracted once if the token was generated; 0 is off", "in [-2, 2]", lambda x: abs(x) <= 2
    )

    def warp(self, scores, own, text):
        begin = jnp.zeros_like(text.length) if text.begin is None else text.begin
        counts = text.counts(scores.shape[-1], jnp.float32, begin)
        often, there = (own[name][:, None, None] for name in ("frequency_penalty", "presence_penalty"))
        return scores - often * counts - there * (counts > 0)
