"""Two thresholds, one to write a token and one to replace it: LLaDA2.1's token editing (arXiv:2602.08676)."""

import dataclasses

import jax
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
      penalty_lambda: what is subtracted from the logit of the token that stands left of a position in the block, against
        repetitions (SGLang). Drawn tokens stay as they are drawn, with their confidence after that.
      published: whether a block-diffusion model's last block is filled and cut, as in the original; see `Unmask.fills`.
    """

    about = About(
        "joint_threshold",
        "what is sure, and rewrites the block's tokens; no cache",
        "arXiv:2602.08676",
        "lossy",
        paper="threshold=0.7,editing_threshold=0.5",
    )

    threshold: float = 0.5
    editing_threshold: float = 0.0
    max_post_steps: int = 16
    num_to_transfer: int = 1
    penalty_lambda: float = 0.0
    published: bool = False

    def __post_init__(self):
        if not (self.threshold >= 0 and self.editing_threshold >= 0 and self.max_post_steps >= 0):
            raise ValueError(f"joint_threshold needs thresholds and max_post_steps >= 0, got {self}")
        if not self.penalty_lambda >= 0:
            raise ValueError(f"joint_threshold needs penalty_lambda >= 0, got {self.penalty_lambda}")
        if self.num_to_transfer < 1:
            raise ValueError(f"joint_threshold needs num_to_transfer >= 1, got {self.num_to_transfer}")

    @property
    def warped(self):
        """Probabilities after temperature and filters, with any model."""
        return True

    def init(self, batch, width, vocab_size):
        """How often the block was read without open positions `[B]`."""
        return jnp.zeros((batch,), jnp.int32)

    def _penalised(self, guess):
        """The predictions with a lower logit, everywhere but at the block's first position, for the token to the left."""
        beside = jax.nn.one_hot(guess.current[:, :-1], guess.log_probs.shape[-1]) * self.penalty_lambda
        log_probs = jax.nn.log_softmax(guess.log_probs - jnp.pad(beside, ((0, 0), (1, 0), (0, 0))), axis=-1)
        likeliest = jnp.where(guess.tokens < 0, -1, jnp.argmax(log_probs, axis=-1).astype(jnp.int32))
        tokens = jnp.where(guess.sampled[:, None], guess.tokens, likeliest)
        return dataclasses.replace(guess, log_probs=log_probs, tokens=tokens)

    def __call__(self, guess, memory):
        guess = self._penalised(guess) if self.penalty_lambda else guess
        score = confidence(guess)
        edit = guess.committed & (guess.tokens != guess.current) & (score > self.editing_threshold)
        sure = guess.masked & (score > self.threshold)
        few = sure.sum(axis=1, keepdims=True) < self.num_to_transfer
        commit = guess.masked & jnp.where(few, ranks(score, guess.masked) < self.num_to_transfer, sure)
        full = ~guess.masked.any(axis=1)
        passes = memory + full
        stay = jnp.where(full, edit.any(axis=1) & (passes < self.max_post_steps), self.max_post_steps > 0)
        return Choice(commit, score, guess.tokens, edit=edit, stay=stay), passes
