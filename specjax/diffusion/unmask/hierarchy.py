"""One token from every run of masks: the hierarchical decoder of dInfer (2025)."""

import dataclasses

import jax.numpy as jnp

from specjax.about import About
from specjax.diffusion.unmask.base import Choice, Unmask, confidence


@dataclasses.dataclass(frozen=True)
class Hierarchy(Unmask):
    """Commits every sure prediction, and the surest of each run of neighbouring open positions if it is at least `low`.

    Commits far from each other depend on each other least.

    Attributes:
      threshold: the probability at which a prediction is committed anyway.
      low: the probability that a run's surest needs; 1 or more is `Threshold`.
    """

    about = About("hierarchy", "what is sure, and one token of every run of masks", "dInfer 2025", "lossy")

    threshold: float = 0.9
    low: float = 0.4

    def __post_init__(self):
        if not (self.threshold >= 0 and self.low >= 0):
            raise ValueError(f"hierarchy needs threshold >= 0 and low >= 0, got {self}")

    @property
    def warped(self):
        """The model's own probabilities, which dInfer uses with any model."""
        return False

    @property
    def slides(self):
        return True

    def __call__(self, guess, memory):
        score = confidence(guess)
        run = jnp.cumsum(~guess.masked, axis=-1)
        place = jnp.arange(run.shape[-1])
        beaten = (score[:, None, :] > score[:, :, None]) | (
            (score[:, None, :] == score[:, :, None]) & (place[None, None, :] < place[None, :, None])
        )
        rival = (run[:, None, :] == run[:, :, None]) & guess.masked[:, None, :]
        first = ~jnp.any(rival & beaten, axis=-1)
        return Choice((score >= self.threshold) | (first & (score >= self.low)), score, guess.tokens), memory
