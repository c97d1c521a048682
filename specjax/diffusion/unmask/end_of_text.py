"""End-of-text prediction: a predicted end of text ends the canvas (Learn2PD, arXiv:2509.25188, section 3.3)."""

import dataclasses

import jax.numpy as jnp

from specjax.about import About
from specjax.diffusion.unmask.base import confidence
from specjax.diffusion.unmask.wrapper import Wrapper


@dataclasses.dataclass(frozen=True)
class EndOfText(Wrapper):
    """Ends the canvas at the surest predicted end of text at an open position; otherwise another policy's choice.

    Nothing after that place is read or decoded any more, even before the end is written.

    Lossy: a later pass might not have predicted it, and the model is influenced by open positions after the end.

    Attributes:
      inner: decides.
    """

    about = About(
        "end_of_text", "a predicted end of text ends the canvas; put before another policy", "arXiv:2509.25188", "lossy"
    )

    @property
    def whole(self):
        return True

    def __call__(self, guess, memory):
        choice, memory = self.inner(guess, memory)
        view = guess.overview
        sure = jnp.where(view.ends & view.open, confidence(view), -1.0)
        surest = jnp.take_along_axis(view.at, jnp.argmax(sure, axis=1)[:, None], axis=1)[:, 0]
        end = jnp.where(sure.max(axis=1) >= 0, surest + 1, jnp.iinfo(jnp.int32).max)
        return dataclasses.replace(choice, end=end), memory
