"""A fixed number of tokens a step: LLaDA's sampler (Nie et al. 2025, arXiv:2502.09992) and Dream's rules for what is sure."""

import dataclasses

import jax.numpy as jnp

from specjax.about import About
from specjax.diffusion.unmask.base import RULES, Choice, Unmask, ranks, scheduled_in


@dataclasses.dataclass(frozen=True)
class Fixed(Unmask):
    """Commits the surest positions, as many a step that a block takes `steps` of them.

    Attributes:
      steps: denoising steps a block; 0: as many as it has masks, one token each.
      rule: a key of `RULES`.
    """

    about = About("fixed", "LLaDA's sampler: as many a pass that a block takes `steps`", "arXiv:2502.09992", "own text")

    steps: int = 0
    rule: str = "low_confidence"

    def __post_init__(self):
        if self.steps < 0 or self.rule not in RULES:
            raise ValueError(f"steps must be at least 0, and rule one of {', '.join(RULES)}; got {self}")

    def __call__(self, guess, memory):
        score = RULES[self.rule](guess)
        count = self.count(guess.step, guess.entry)
        if self.steps:  # where a block was entered with one token alone, the last pass makes up for it
            count = jnp.where(guess.step >= self.steps - 1, guess.masked.sum(axis=1), count)
        return Choice(ranks(score, guess.masked) < count[:, None], score, guess.tokens), memory

    def count(self, step, entry):
        """How many tokens `[B]` pass number `step` commits."""
        return scheduled_in(self.steps, step, entry)
