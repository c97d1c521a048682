"""Refinement while unmasking: LLaDA's sampler, which also rewrites its earlier tokens (ReDiff, arXiv:2510.19871)."""

import dataclasses

import jax.numpy as jnp
import numpy as np

from specjax.about import About
from specjax.diffusion.unmask.base import Editing, confidence, ranks
from specjax.diffusion.unmask.fixed import Fixed


@dataclasses.dataclass(frozen=True)
class ReDiff(Editing):
    """A pass commits as `fixed` does, and overwrites tokens of the block that earlier passes committed.

    It is for models that were trained to correct visible tokens; other models mostly repeat them. The prompt's tokens
    stay. The fields have the names of the published `generate`.

    Attributes:
      steps: denoising steps per block; 0: as many as it has masks, one token each.
      revise_topk: the share of the committed tokens that are written anew, the surest predictions first; 0 for all.
      revise_start: the share of a block's steps, the last ones, that rewrite.
    """

    about = About("rediff", "as `fixed`, and rewrites the block's tokens; no cache", "arXiv:2510.19871", "lossy")

    steps: int = 0
    revise_topk: float = 0.0
    revise_start: float = 1.0

    def __post_init__(self):
        if self.steps < 0 or not (0 <= self.revise_topk <= 1 and 0 <= self.revise_start <= 1):
            raise ValueError(f"rediff needs steps >= 0, and revise_topk and revise_start in [0, 1], got {self}")

    def __call__(self, guess, memory):
        choice, memory = Fixed(self.steps)(guess, memory)
        known, sure = guess.committed, confidence(guess)
        count = known.sum(axis=1)
        share = jnp.floor(count * self.revise_topk) if self.revise_topk else count
        edit = known & (ranks(sure, known) < share[:, None]) & (guess.step >= self._first(guess))[:, None]
        return dataclasses.replace(choice, edit=edit), memory

    def _first(self, guess):
        """The first pass `[B]` over its block that rewrites. The table is the published one, in its float64."""
        total = np.arange(guess.masked.shape[1] + 1)
        steps = np.full_like(total, self.steps) if self.steps else total
        return jnp.asarray(steps - np.ceil(steps * self.revise_start).astype(int))[guess.entry]
