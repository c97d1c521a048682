"""A fixed number of tokens a step: LLaDA's sampler (Nie et al. 2025, arXiv:2502.09992) and Dream's rules for what is sure."""

import dataclasses

import jax.numpy as jnp

from specjax.about import About
from specjax.diffusion.unmask.base import RULES, Choice, Unmask, ranks


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
        return Choice(
            ranks(score, guess.masked) < self.count(guess.step, guess.entry)[:, None], score, guess.tokens
        ), memory

    def count(self, step, entry):
        """How many tokens `[B]` pass number `step` commits."""
        return self.after(step + 1, entry) - self.after(step, entry)

    def after(self, passes, entry):
        """How many tokens `[B]` so many passes commit: a block's masks over its passes, the first ones taking the rest."""
        steps = jnp.where(self.steps > 0, self.steps, jnp.maximum(entry, 1))
        return jnp.minimum(entry // steps * passes + jnp.minimum(passes, entry % steps), entry)
