"""Samplers of ParallelBench that take commits back: a simple form of ReMDM, and running-confidence remasking."""

import dataclasses

import jax.numpy as jnp
import numpy as np

from specjax.about import About
from specjax.diffusion.unmask.base import RULES, Choice, Lasting, Unmask, counted, ranks


class Revising(Unmask):
    """Takes commits back; remembers how sure each token was when it was written."""

    @property
    def revises(self):
        return True

    def init(self, batch, width, vocab_size):
        return jnp.full((batch, width), jnp.inf)


@dataclasses.dataclass(frozen=True)
class Redo(Revising):
    """One token per pass; late in a block, some extra passes each redo the tokens that were least sure when written.

    The pass before an extra one opens them. The extra pass reads the canvas without them and commits as many, chosen
    from these and the positions that were already open. So a pass may leave the canvas as it found it. ParallelBench
    calls it ReMDM; the paper's samplers are `specjax.diffusion.ReMDM`.

    Attributes:
      extra: such passes per block.
      count: tokens that each of them redoes.
      at: the share of a block's passes before them.
      rule: a key of `RULES`.
    """

    about = About("redo", "one token per pass, late ones redo the least sure", "ParallelBench 2025", "own text")

    extra: int = 4
    count: int = 1
    at: float = 0.875
    rule: str = "low_confidence"

    def __post_init__(self):
        if self.extra < 0 or self.count < 1 or not 0 <= self.at <= 1 or self.rule not in RULES:
            raise ValueError(
                f"redo needs extra >= 0, count >= 1, at in [0, 1] and a rule of {', '.join(RULES)}, got {self}"
            )

    def __call__(self, guess, memory):
        score = RULES[self.rule](guess)
        commit = ranks(score, guess.masked) < jnp.where(self._redoes(guess, 0), self.count, 1)[:, None]
        written = jnp.where(commit, score, memory)
        known = (guess.committed | commit) & (written < jnp.inf)
        again = known & (ranks(-written, known) < self.count) & self._redoes(guess, 1)[:, None]
        return Choice(commit, score, guess.tokens, again), jnp.where(again, jnp.inf, written)

    def _redoes(self, guess, ahead):
        """Whether so many passes after this one redo something `[B]`."""
        entry = counted(guess)
        first = jnp.clip(jnp.floor(self.at * entry).astype(jnp.int32), 1, jnp.maximum(entry - 1, 1))
        return (guess.step + ahead >= first) & (guess.step + ahead < first + self.extra)


@dataclasses.dataclass(frozen=True)
class RunningConfidence(Revising, Lasting):
    """Every pass writes all open positions up to the block's end, then reopens the least sure tokens.

    These may be in earlier blocks too; a linear schedule says how many stay open. A token keeps the confidence with
    which it was written until it is written anew, so an early unsure token may be reopened.

    Attributes:
      steps: passes per block; 0: as many as it has masks.
      rule: a key of `RULES`.
    """

    about = About("rcr", "writes all, opens the least sure again", "ParallelBench 2025", "own text")

    steps: int = 0
    rule: str = "low_confidence"

    def __post_init__(self):
        if self.steps < 0 or self.rule not in RULES:
            raise ValueError(f"steps must be at least 0, and rule one of {', '.join(RULES)}; got {self}")

    def __call__(self, guess, memory):
        view = guess.overview
        score = RULES[self.rule](view)
        write = view.open & (view.at < view.after[:, None])
        written = jnp.where(write, score, memory)
        candidates = (write | view.known) & (written < jnp.inf)
        undo = ranks(-written, candidates) < self.left(guess)[:, None]
        written_now = jnp.where(write, view.tokens, -1)
        choice = Choice(guess.masked, RULES[self.rule](guess), guess.tokens, None, written_now, undo)
        return choice, jnp.where(undo, jnp.inf, written)

    def left(self, guess):
        """How many positions `[B]` are open after this pass. The table is the published one, in its float64."""
        total = np.arange(guess.masked.shape[1] + 1)[:, None]
        steps = np.full_like(total, self.steps) if self.steps else np.maximum(total, 1)
        done = np.arange(1, int(steps.max()) + 1)[None] / steps
        table = np.where(done < 1, np.floor(total * np.clip(1 - done, 1e-6, 1)), 0).astype(np.int32)
        return jnp.asarray(table)[counted(guess), jnp.minimum(guess.step, table.shape[1] - 1)]
