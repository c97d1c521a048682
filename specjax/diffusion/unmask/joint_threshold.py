"""Two thresholds, one to write a token and one to replace it: LLaDA2.1's token editing (arXiv:2602.08676)."""

import dataclasses

import jax.numpy as jnp

from specjax.about import About
from specjax.diffusion.unmask.base import Choice, Editing, confidence, ranks


@dataclasses.dataclass(frozen=True)
class JointThreshold(Editing):
    """Commits predictions surer than `threshold`, and overwrites committed tokens by differing ones surer than
    `editing_threshold`.

    It overwrites only tokens of the block; the prompt's tokens stay. A block without open positions is read again as
    long as a pass changes something, at most `max_post_steps` times; then it is final. The fields have the names of the
    published `generate`.

    Attributes:
      threshold: for an open position.
      editing_threshold: for a committed position; 1 edits nothing.
      max_post_steps: passes over a block that has no open position.
      num_to_transfer: if fewer open positions than that are sure, this many of the surest are committed.
      published: whether a block-diffusion model's last block is filled and cut, as in the original; see `Unmask.fills`.
    """

    about = About(
        "joint_threshold", "what is sure, and rewrites the block's tokens; no cache", "arXiv:2602.08676", "lossy"
    )

    threshold: float = 0.5
    editing_threshold: float = 0.0
    max_post_steps: int = 16
    num_to_transfer: int = 1
    published: bool = False

    def __post_init__(self):
        if not (self.threshold >= 0 and self.editing_threshold >= 0 and self.max_post_steps >= 0):
            raise ValueError(f"joint_threshold needs thresholds and max_post_steps >= 0, got {self}")
        if self.num_to_transfer < 1:
            raise ValueError(f"joint_threshold needs num_to_transfer >= 1, got {self.num_to_transfer}")

    @property
    def warped(self):
        """Probabilities after temperature and filters, with any model."""
        return True

    def init(self, batch, width, vocab_size):
        """How often the block was read without open positions `[B]`."""
        return jnp.zeros((batch,), jnp.int32)

    def __call__(self, guess, memory):
        score = confidence(guess)
        edit = guess.committed & (guess.tokens != guess.current) & (score > self.editing_threshold)
        sure = guess.masked & (score > self.threshold)
        few = sure.sum(axis=1, keepdims=True) < self.num_to_transfer
        commit = guess.masked & jnp.where(few, ranks(score, guess.masked) < self.num_to_transfer, sure)
        full = ~guess.masked.any(axis=1)
        passes = memory + full
        stay = jnp.where(full, edit.any(axis=1) & (passes < self.max_post_steps), self.max_post_steps > 0)
        return Choice(commit, score, guess.tokens, edit=edit, stay=stay), passes
