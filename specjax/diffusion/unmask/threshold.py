"""Everything surer than a threshold: Fast-dLLM's confidence-aware parallel decoding (arXiv:2505.22618, section 3.3)."""

import dataclasses

from specjax.about import About
from specjax.diffusion.unmask.base import Choice, Unmask, confidence


@dataclasses.dataclass(frozen=True)
class Threshold(Unmask):
    """Commits every prediction of at least this probability.

    Attributes:
      threshold: tau; above 1 it is one token a step.
    """

    about = About("threshold", "all that is surer than a threshold", "arXiv:2505.22618, section 3.3", "lossy")

    threshold: float = 0.9

    def __post_init__(self):
        if not self.threshold >= 0:
            raise ValueError(f"threshold must be at least 0, got {self.threshold}")

    def __call__(self, guess, memory):
        score = confidence(guess)
        return Choice(score >= self.threshold, score, guess.tokens), memory
