"""As many predictions as an entropy budget allows: the EB-Sampler (Ben-Hamu et al. 2025, arXiv:2505.24857, algorithm 1)."""

import dataclasses

import jax
import jax.numpy as jnp

from specjax.about import About
from specjax.diffusion.unmask.base import RULES, Choice, Unmask, negative_entropy

_SURE = ("entropy", "low_confidence", "margin")


@dataclasses.dataclass(frozen=True)
class EntropyBudget(Unmask):
    """Commits the surest predictions, as many as keep the sum of their entropies, without the largest, within a budget.

    That sum bounds what is lost by drawing them separately: their mutual information given the text so far.

    Attributes:
      gamma: the budget in nats; 0 is one token per pass, and more only if all others are certain.
      rule: how sureness is measured, the paper's error proxy: `entropy`, `low_confidence` or `margin`.
    """

    about = About("eb", "the surest, as many as an entropy budget allows", "arXiv:2505.24857", "lossy")

    gamma: float = 0.1
    rule: str = "entropy"

    def __post_init__(self):
        if not self.gamma >= 0 or self.rule not in _SURE:
            raise ValueError(f"eb needs gamma >= 0 and a rule of {', '.join(_SURE)}; got {self}")

    @property
    def warped(self):
        """The model's own probabilities, as in SGLang's EBSampling."""
        return False

    @property
    def slides(self):
        return True

    def __call__(self, guess, memory):
        score = RULES[self.rule](guess)
        within = within_budget(-negative_entropy(guess), jnp.where(guess.masked, score, -jnp.inf), self.gamma)
        return Choice(within & guess.masked, score, guess.tokens), memory


def within_budget(entropy: jax.Array, score: jax.Array, budget: float) -> jax.Array:
    """The surest positions, as many as have entropies `[B, W]` whose sum without the largest is at most `budget`.

    Args:
      entropy: in nats.
      score: `[B, W]`, the surest first, ties to the lower position; -inf for positions that come last.
      budget: in nats.
    """
    order = jnp.argsort(-score, axis=-1, stable=True)
    sorted_ = jnp.take_along_axis(entropy, order, axis=-1)
    within = jnp.cumsum(sorted_, axis=-1) - jax.lax.cummax(sorted_, axis=1) <= budget
    return jnp.take_along_axis(within, jnp.argsort(order, axis=-1), axis=-1)
