"""SlowFast: one token a pass until it is clear how far predictions reach, then all sure ones up to there (arXiv:2506.10848)."""

import dataclasses

import jax.numpy as jnp

from specjax.about import About
from specjax.diffusion.unmask.base import Choice, Unmask, confidence


@dataclasses.dataclass(frozen=True)
class SlowFast(Unmask):
    """Cycles of exploring and accelerating within a block.

    Exploring, the surest token is committed, and the cycle's end is put behind the last position of at least `reach`. When that
    end has come to rest, all that lies before it is committed as fast as it is sure.

    Attributes:
      explore: passes a cycle explores at least.
      reach: probability of a prediction that may still be in the cycle.
      rest: the standard deviation of the last two ends, in positions, below which exploring ends.
      threshold: probability at which accelerating commits; where fewer than two are that sure, the surest one.
    """

    about = About(
        "slow_fast", "one token a pass until predictions settle, then all sure ones", "arXiv:2506.10848", "lossy"
    )

    explore: int = 6
    reach: float = 0.3
    rest: float = 1.0
    threshold: float = 0.9

    def __post_init__(self):
        if self.explore < 1 or not (self.reach >= 0 and self.rest >= 0 and self.threshold >= 0):
            raise ValueError(f"slow_fast needs explore >= 1, and reach, rest and threshold >= 0, got {self}")

    def init(self, batch, width, vocab_size):
        zeros = lambda *shape: jnp.zeros((batch, *shape), jnp.int32)
        return (
            zeros(),
            zeros(2),
            zeros(),
        )  # explored, the last two ends, the cycle's end (0: exploring)

    def __call__(self, guess, memory):
        explored, ends, end = memory
        score = confidence(guess)
        place = jnp.arange(score.shape[-1], dtype=jnp.int32)[None]
        far = jnp.max(jnp.where(guess.masked & (score >= self.reach), place + 1, 0), axis=-1)
        far = jnp.maximum(far, jnp.argmax(guess.masked, axis=-1).astype(jnp.int32) + 1)
        fast = end > 0
        inside = guess.masked & (place < end[:, None])
        sure = inside & (score >= self.threshold)
        commit = sure & fast[:, None] & (sure.sum(axis=-1, keepdims=True) > 1)
        eligible = jnp.where(fast[:, None], inside, guess.masked)
        score = jnp.where(eligible, score, -1.0)
        surest = place == jnp.argmax(score, axis=-1)[:, None]
        commit = jnp.where(commit.any(axis=-1, keepdims=True), commit, surest & guess.masked)
        over = fast & ~jnp.any(inside & ~commit, axis=-1)
        explored = jnp.where(fast, 0, explored + 1)
        ends = jnp.where(fast[:, None], ends, jnp.stack([ends[:, 1], far], axis=1))
        still = jnp.std(ends.astype(jnp.float32), axis=-1) < self.rest
        found = ~fast & (explored >= self.explore) & still
        left = jnp.any(guess.masked & ~commit & (place < far[:, None]), axis=-1)
        end = jnp.where(found & left, far, jnp.where(over, 0, end))
        return Choice(commit, score, guess.tokens), (explored, ends, end)
