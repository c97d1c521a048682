"""All predictions surer than a threshold: Fast-dLLM's confidence-aware parallel decoding (arXiv:2505.22618, section 3.3)."""

import dataclasses

import jax.numpy as jnp

from specjax.about import About
from specjax.diffusion.unmask.base import Choice, Unmask, confidence, ranks, scheduled_in


@dataclasses.dataclass(frozen=True)
class Threshold(Unmask):
    """Commits every prediction of at least this probability, and with `steps` never fewer than a schedule asks for.

    The schedule is SDAR's dynamic rule (arXiv:2510.06303): if too few predictions are that sure, as many of the surest
    are committed.

    Attributes:
      threshold: tau, which a probability must exceed if the guess is `strict`. Above 1 it is one token per step, or the
        schedule's number.
      steps: passes per block of the schedule, see `Fixed`; 0: at least one token per pass.
      published: whether a block-diffusion model's last block is filled and cut, as in the originals; see
        `Unmask.fills`.
    """

    about = About("threshold", "all that is surer than a threshold", "arXiv:2505.22618, section 3.3", "lossy")

    threshold: float = 0.9
    steps: int = 0
    published: bool = False

    def __post_init__(self):
        if not self.threshold >= 0:
            raise ValueError(f"threshold must be at least 0, got {self.threshold}")
        if self.steps < 0:
            raise ValueError(f"threshold needs steps >= 0, got {self.steps}")

    @property
    def slides(self):
        return not self.steps

    def __call__(self, guess, memory):
        score = confidence(guess)
        sure = guess.masked & (score > self.threshold if guess.strict else score >= self.threshold)
        if self.steps:
            least = scheduled_in(self.steps, guess.step, guess.entry, guess.rounded)
            surest = ranks(score, guess.masked) < least[:, None]
            sure = jnp.where(sure.sum(axis=1, keepdims=True) >= least[:, None], sure, surest)
        return Choice(sure, score, guess.tokens), memory
