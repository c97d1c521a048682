"""SlowFast: all sure predictions, or one token per pass, in cycles that end where predictions stop being likely
(arXiv:2506.10848).
"""

import dataclasses

import jax
import jax.numpy as jnp

from specjax.about import About
from specjax.diffusion.unmask.base import Choice, Unmask, confidence

Array = jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cycle:
    """Where a row is in its block. Places count from the block's beginning.

    Attributes:
      passes: `[B]` int32, of this phase.
      begin: `[B]` int32, where the cycle begins; everything before it is known.
      end: `[B]` int32, the estimated end of the cycle.
      last: `[B]` int32, the previous pass's own estimate; -1 in the first one.
      settled: `[B]` bool, whether `end` is settled.
      fast: `[B]` bool, accelerating, not exploring.
    """

    passes: Array
    begin: Array
    end: Array
    last: Array
    settled: Array
    fast: Array


@dataclasses.dataclass(frozen=True)
class SlowFast(Unmask):
    """Cycles of exploring and accelerating within a block.

    Exploring takes `explore` passes. They put the cycle's end after the last position whose prediction is at least
    `reach`; if two passes do not agree, at the mean of the last two. Accelerating goes on until everything before that
    end is known; from its second pass on it sees nothing after the end. In both phases, all sure predictions are
    committed if there are two or more, otherwise the surest.

    Attributes:
      explore: passes that a cycle explores.
      reach: the probability of a prediction that may still be in the cycle.
      rest: the standard deviation of two ends, in positions, below which they agree.
      threshold: the probability at which a prediction is sure.
    """

    about = About(
        "slow_fast",
        "what is sure, or one per pass, in cycles as long as predictions reach",
        "arXiv:2506.10848",
        "lossy",
    )

    explore: int = 6
    reach: float = 0.3
    rest: float = 1.0
    threshold: float = 0.9

    def __post_init__(self):
        if self.explore < 1 or not (self.reach >= 0 and self.rest >= 0 and self.threshold >= 0):
            raise ValueError(f"slow_fast needs explore >= 1, and reach, rest and threshold >= 0, got {self}")

    def init(self, batch, width, vocab_size):
        zero, no = (lambda: jnp.zeros((batch,), jnp.int32)), (lambda: jnp.zeros((batch,), bool))
        return Cycle(zero(), zero(), zero(), zero() - 1, no(), no())

    def sees(self, memory):
        return jnp.where(memory.fast & (memory.passes > 0), memory.end, jnp.iinfo(jnp.int32).max)

    def __call__(self, guess, memory):
        score = confidence(guess)
        place = jnp.arange(score.shape[-1], dtype=jnp.int32)[None]
        inside = guess.masked & (place >= memory.begin[:, None])
        end, last, settled = self._look(memory, inside, place, score)
        inside = inside & (~memory.fast[:, None] | (place < end[:, None]))
        sure = inside & (score >= self.threshold)
        surest = inside & (place == jnp.argmax(jnp.where(inside, score, -1.0), axis=1)[:, None])
        commit = jnp.where(sure.sum(axis=1, keepdims=True) > 1, sure, surest)

        left = jnp.any(guess.masked & ~commit & (place < end[:, None]), axis=1)
        explored = ~memory.fast & (memory.passes + 1 >= self.explore)
        over = (explored | memory.fast) & ~left
        new = over | (explored & left)  # a phase begins
        memory = Cycle(
            jnp.where(new, 0, memory.passes + 1),
            jnp.where(over, end, memory.begin),
            end,
            jnp.where(over, -1, last),
            settled & ~over,
            (memory.fast | explored) & ~over,
        )
        return Choice(commit, jnp.where(inside, score, -1.0), guess.tokens), memory

    def _look(self, memory, inside, place, score):
        """The cycle's end, this pass's own estimate of it, and whether it is settled."""
        width = place.shape[1]
        far = jnp.max(jnp.where(inside & (score >= self.reach), place + 1, 0), axis=1)
        far = jnp.minimum(jnp.maximum(far, memory.begin + 1), width)
        fixed = memory.fast | memory.settled
        two = memory.last >= 0
        still = two & (jnp.abs(far - memory.last) / 2 < self.rest)
        mean = jnp.where(two & ~still, (far + memory.last) // 2, far)
        return jnp.where(fixed, memory.end, mean), jnp.where(fixed, memory.last, far), fixed | still
