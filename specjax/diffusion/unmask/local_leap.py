"""A lower threshold near very sure tokens: LocalLeap (arXiv:2510.07081)."""

import dataclasses

import jax
import jax.numpy as jnp

from specjax.about import About
from specjax.diffusion.unmask.base import Choice, Unmask, confidence


@dataclasses.dataclass(frozen=True)
class LocalLeap(Unmask):
    """Commits anchors, and near them every prediction of at least `relaxed`.

    Anchors are tokens about to be committed, not known ones.

    Attributes:
      anchor: the probability of an anchor.
      relaxed: the probability that a prediction near an anchor needs; equal to `anchor`, the rule is
        `Threshold(anchor)`.
      radius: how many positions away counts as near.
    """

    about = About("local_leap", "a lower threshold near very sure tokens", "arXiv:2510.07081", "lossy")

    anchor: float = 0.9
    relaxed: float = 0.75
    radius: int = 4

    def __post_init__(self):
        if self.relaxed > self.anchor or self.radius < 0:
            raise ValueError(f"local_leap needs relaxed <= anchor and radius >= 0, got {self}")

    @property
    def slides(self):
        return True

    def __call__(self, guess, memory):
        score = confidence(guess)
        anchor = guess.masked & (score >= self.anchor)
        window = (1, 2 * self.radius + 1)
        near = jax.lax.reduce_window(anchor.astype(jnp.int32), 0, jax.lax.max, window, (1, 1), "SAME") > 0
        return Choice(anchor | (near & (score >= self.relaxed)), score, guess.tokens), memory
