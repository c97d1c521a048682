"""A fixed number of tokens per step: LLaDA's sampler (Nie et al. 2025, arXiv:2502.09992) and Dream's measures of sureness."""

import dataclasses

import jax.numpy as jnp

from specjax.about import About
from specjax.diffusion.unmask.base import RULES, Choice, Unmask, ranks, scheduled_in


@dataclasses.dataclass(frozen=True)
class Fixed(Unmask):
    """Commits the surest positions, so many per step that a block takes `steps` of them.

    Attributes:
      steps: denoising steps per block; 0: as many as it has masks, one token each.
      rule: a key of `RULES`, or `order`: a random order, drawn before the first pass, so that the cache `greedy` knows
        the next positions (dKV-Cache-Greedy, arXiv:2505.15781).
      published: whether a block-diffusion model's last block is filled and cut, as in the original; see `Unmask.fills`.
    """

    about = About(
        "fixed", "LLaDA's sampler: `steps` passes per block, the surest first", "arXiv:2502.09992", "own text"
    )

    steps: int = 0
    rule: str = "low_confidence"
    published: bool = dataclasses.field(default=False, kw_only=True)

    def __post_init__(self):
        if self.steps < 0 or self.rule not in (*RULES, "order"):
            raise ValueError(f"steps must be at least 0, and rule one of {', '.join(RULES)}, order; got {self}")

    @property
    def ordered(self):
        return self.rule == "order"

    def plan(self, noise, masked, step, entry):
        """See `Unmask.plan`."""
        if not self.ordered:
            return None
        rank = ranks(noise, masked)
        return jnp.where(rank < self.count(step, entry)[:, None], rank, masked.shape[1])

    @property
    def slides(self):
        return not self.steps

    def __call__(self, guess, memory):
        score = self.score(guess)
        count = self.count(guess.step, guess.entry, guess.rounded)
        return Choice(ranks(score, guess.masked) < count[:, None], score, guess.tokens), memory

    def score(self, guess):
        """How sure a prediction is `[B, W]`."""
        return guess.noise if self.ordered else RULES[self.rule](guess)

    def count(self, step, entry, rounded=0):
        """How many tokens `[B]` pass number `step` commits.

        If the pass that entered the block committed only one token, the last pass makes up for it.
        """
        count = scheduled_in(self.steps, step, entry, rounded)
        return jnp.where(step >= self.steps - 1, entry, count) if self.steps else count
