"""Samplers that take commits back: ReMDM (arXiv:2503.00307) and running-confidence remasking, as ParallelBench runs them."""

import dataclasses

import jax.numpy as jnp

from specjax.about import About
from specjax.diffusion.unmask.base import RULES, Choice, Unmask, ranks
from specjax.diffusion.unmask.fixed import Fixed


class Revising(Unmask):
    """Takes commits back; remembers how sure each token was when it was written."""

    @property
    def revises(self):
        return True

    def init(self, batch, width, vocab_size):
        return jnp.full((batch, width), jnp.inf)


@dataclasses.dataclass(frozen=True)
class ReMDM(Revising):
    """One token a pass; late in a block some extra passes each redo the tokens that were least sure when they were written.

    Attributes:
      extra: such passes a block.
      count: tokens that each of them redoes.
      at: the share of a block's passes before them.
      rule: a key of `RULES`.
    """

    about = About("remdm", "one token a pass, late ones redo the least sure", "arXiv:2503.00307", "own text")

    extra: int = 4
    count: int = 1
    at: float = 0.875
    rule: str = "low_confidence"

    def __post_init__(self):
        if self.extra < 0 or self.count < 1 or not 0 <= self.at <= 1 or self.rule not in RULES:
            raise ValueError(
                f"remdm needs extra >= 0, count >= 1, at in [0, 1] and a rule of {', '.join(RULES)}, got {self}"
            )

    def __call__(self, guess, memory):
        score = RULES[self.rule](guess)
        first = jnp.clip(jnp.floor(self.at * guess.entry).astype(jnp.int32), 1, jnp.maximum(guess.entry - 1, 1))
        redoing = (guess.step >= first) & (guess.step < first + self.extra)
        open_now = guess.masked.sum(axis=-1)
        commit = ranks(score, guess.masked) < jnp.where(redoing, jnp.minimum(self.count, open_now), 1)[:, None]
        written = jnp.where(commit, score, memory)
        after = guess.step + 1
        again = (after >= first) & (after < first + self.extra)
        known = (guess.committed | commit) & (written < jnp.inf)  # a token is redone once for every time it was chosen
        redo = (ranks(-written, known) < self.count) & again[:, None] & known
        written = jnp.where(redo, jnp.inf, written)
        return Choice(commit & ~redo, score, guess.tokens, guess.committed & redo), written


@dataclasses.dataclass(frozen=True)
class RunningConfidence(Revising, Fixed):
    """Every pass writes all that is open, then opens the least sure tokens of the block again: as many as `Fixed` would leave.

    A token keeps the confidence that it was written with until it is written anew, so an early unsure one may go again.
    """

    about = About("rcr", "writes all, opens the least sure again", "ParallelBench 2025", "own text")

    def __call__(self, guess, memory):
        score = RULES[self.rule](guess)
        written = jnp.where(guess.masked, score, memory)
        left = guess.entry - self.after(guess.step + 1, guess.entry)
        mine = guess.masked | guess.committed
        opened = (ranks(-written, mine) < left[:, None]) & mine
        return Choice(guess.masked & ~opened, score, guess.tokens, guess.committed & opened), written
