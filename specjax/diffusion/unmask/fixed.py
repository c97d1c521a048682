"""A fixed number of tokens a step: LLaDA's sampler (Nie et al. 2025, arXiv:2502.09992) and Dream's rules for what is sure."""

import dataclasses

import jax.numpy as jnp

from specjax.diffusion.unmask.base import RULES, Choice, Unmask, ranks


@dataclasses.dataclass(frozen=True)
class Fixed(Unmask):
    """Commits the surest positions, as many a step that a block takes `steps` of them.

    Attributes:
      steps: denoising steps a block; 0: as many as it has masks, one token each.
      rule: a key of `RULES`.
    """

    steps: int = 0
    rule: str = "low_confidence"

    def __post_init__(self):
        if self.steps < 0 or self.rule not in RULES:
            raise ValueError(f"fixed needs steps >= 0 and a rule of {', '.join(RULES)}, got {self}")

    def __call__(self, guess, memory):
        score = RULES[self.rule](guess)
        return Choice(ranks(score, guess.masked) < self.count(guess)[:, None], score, guess.tokens), memory

    def count(self, guess):
        """How many tokens `[B]` this step commits: the block's masks over its steps, the earlier ones taking the rest."""
        steps = jnp.where(self.steps > 0, self.steps, jnp.maximum(guess.entry, 1))
        each, rest = guess.entry // steps, guess.entry % steps
        return each + (guess.step < rest)
