"""Dream's sampler: a linear schedule over the whole block (Ye et al. 2025, arXiv:2508.15487)."""

import dataclasses

import jax.numpy as jnp

from specjax.about import About
from specjax.diffusion.unmask.base import RULES, Choice, Unmask, confidence, ranks


@dataclasses.dataclass(frozen=True)
class Dream(Unmask):
    """Noise falls linearly from 1 to `eps` in `steps` passes; each pass commits the share of open positions by which it falls.

    `origin` commits every position with that probability. The other rules commit that share of the positions, the
    surest, rounded down, and all open positions in the last pass. The distribution after temperature and filters
    decides how sure a prediction is. Counts are each row's own; the original takes the mean over its batch.

    `threshold` is Fast-dLLM's rule for Dream (arXiv:2505.22618). A pass considers the block's positions divided by
    `steps`, plus as many as earlier passes left over. It commits the surest of these, and all that are sure enough; the
    rest is left over.

    Attributes:
      steps: passes per block.
      rule: `origin`, `threshold`, or a key of `RULES` (`low_confidence` is Dream's `maskgit_plus`, `margin` its
        `topk_margin`).
      eps: the noise that is left.
      alg_temp: above 0, the positions are drawn without replacement in proportion to `exp(sureness / alg_temp)`. Not
        for `origin`, which ranks nothing, and not for `threshold`.
      threshold: for the rule of that name.
      published: whether a pass may commit nothing, as in the original; otherwise it commits at least one token.
    """

    about = About("dream", "Dream's sampler: a linear schedule", "arXiv:2508.15487", "own text")

    steps: int = 32
    rule: str = "origin"
    eps: float = 1e-3
    alg_temp: float = 0.0
    threshold: float = 0.9
    published: bool = False

    def __post_init__(self):
        if self.steps < 1 or self.rule not in ("origin", "threshold", *RULES) or not 0 <= self.eps < 1:
            raise ValueError(
                f"dream needs steps >= 1, eps in [0, 1) and a rule of origin, threshold, {', '.join(RULES)}, got {self}"
            )
        if not self.alg_temp >= 0 or (self.alg_temp and self.rule in ("origin", "threshold", "random")):
            raise ValueError(
                f"dream needs alg_temp >= 0, and above 0 a rule that ranks predictions by confidence, got {self}"
            )
        if not self.threshold >= 0:
            raise ValueError(f"dream needs threshold >= 0, got {self.threshold}")

    @property
    def warped(self):
        """Probabilities after temperature and filters, with any model."""
        return True

    @property
    def idle(self):
        return self.published

    def init(self, batch, width, vocab_size):
        """How many tokens earlier passes left over `[B]`, for the rule `threshold`."""
        return jnp.zeros((batch,), jnp.int32) if self.rule == "threshold" else ()

    def __call__(self, guess, memory):
        if self.rule == "threshold":
            return self._left_over(guess, memory)
        step = guess.step.astype(jnp.float32)
        now, then = (1 - (1 - self.eps) * (step + offset) / self.steps for offset in (0, 1))
        share = jnp.where(guess.step >= self.steps - 1, 1.0, 1 - then / now)
        if self.rule == "origin":
            return Choice(guess.noise < share[:, None], -guess.noise, guess.tokens), memory
        # slightly above the product, so that rounding in the last bit does not lower a whole number
        count = jnp.floor(guess.masked.sum(axis=-1) * share + 1e-4).astype(jnp.int32)
        score = RULES[self.rule](guess)
        if self.alg_temp:  # the largest noisy scores are such a draw (Gumbel top-k)
            score = score / self.alg_temp - jnp.log(-jnp.log(guess.noise))
        return Choice(ranks(score, guess.masked) < count[:, None], score, guess.tokens), memory

    def _left_over(self, guess, left):
        score = confidence(guess)
        place = ranks(score, guess.masked)
        count = left + jnp.where(guess.step < self.steps, guess.entry // self.steps, 0)
        looked = guess.masked & (place < jnp.maximum(count, 1)[:, None])
        commit = looked & ((place == 0) | (score >= self.threshold))
        return Choice(commit, score, guess.tokens), (looked & ~commit).sum(axis=1).astype(jnp.int32)
