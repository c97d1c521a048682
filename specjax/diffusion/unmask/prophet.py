"""Early commit: when every prediction of a block is settled, all of them are committed (Prophet, arXiv:2508.19982)."""

import dataclasses

import jax
import jax.numpy as jnp

from specjax.about import About
from specjax.diffusion.unmask.wrapper import Wrapper


@dataclasses.dataclass(frozen=True)
class Prophet(Wrapper):
    """Commits the whole block once the smallest gap between two likeliest logits is wide enough; else another policy decides.

    The paper averages the gap over an answer whose place is known; without one the block's smallest gap stands for it.

    Attributes:
      inner: decides until then.
      early: the gap asked for in the first third of a block's one-token-a-pass budget, in nats.
      middle: in the second third.
      late: after that.
    """

    about = About("prophet", "commits a settled block whole; put before another policy", "arXiv:2508.19982", "lossy")

    early: float = 7.5
    middle: float = 5.0
    late: float = 2.5

    def __post_init__(self):
        super().__post_init__()
        if any(gap != gap for gap in (self.early, self.middle, self.late)):
            raise ValueError(f"prophet's gaps must be numbers, got {self}")

    def __call__(self, guess, memory):
        best = jax.lax.top_k(guess.log_law, 2)[0]
        gap = jnp.min(jnp.where(guess.masked, best[..., 0] - best[..., 1], jnp.inf), axis=-1)
        spent = guess.step / jnp.maximum(guess.entry, 1)
        asked = jnp.where(spent < 1 / 3, self.early, jnp.where(spent < 2 / 3, self.middle, self.late))
        choice, memory = self.inner(guess, memory)
        settled = (gap >= asked)[:, None]
        return dataclasses.replace(choice, commit=choice.commit | (guess.masked & settled)), memory
