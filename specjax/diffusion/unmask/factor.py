"""The n surest predictions, as long as they satisfy a joint bound: Fast-dLLM's factor rule (arXiv:2505.22618, section
3.3, theorem 1).
"""

import dataclasses

import jax.numpy as jnp

from specjax.about import About
from specjax.diffusion.unmask.base import Choice, Unmask, confidence, ranks


@dataclasses.dataclass(frozen=True)
class Factor(Unmask):
    """Commits the n surest predictions with `(n + 1) (1 - c_n) <= factor`, where c_n is the n-th largest probability.

    At a factor of 1 the argmax of the product of the marginals is that of any joint distribution with these marginals.

    Attributes:
      factor: f.
      published: whether the last candidate of a block is also taken if it alone fails, as in the published loop;
        otherwise the rule is as in the theorem.
    """

    about = About("factor", "the n surest while (n + 1)(1 - c_n) <= factor", "arXiv:2505.22618, section 3.3", "lossy")

    factor: float = 1.0
    published: bool = False

    def __post_init__(self):
        if not self.factor > 0:
            raise ValueError(f"factor must be above 0, got {self.factor}")

    @property
    def slides(self):
        return True

    def __call__(self, guess, memory):
        score = confidence(guess)
        fallen = -jnp.sort(jnp.where(guess.masked, -score, jnp.inf), axis=-1)
        n = 1 + jnp.arange(score.shape[-1])[None]
        holds = (n + 1) * (1 - fallen) <= self.factor
        count = jnp.cumprod(holds.astype(jnp.int32), axis=-1).sum(axis=-1)
        if self.published:
            left = guess.masked.sum(axis=-1)
            count = jnp.where(jnp.maximum(count, 1) == left - 1, left, count)
        return Choice(ranks(score, guess.masked) < count[:, None], score, guess.tokens), memory
