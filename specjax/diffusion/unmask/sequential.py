"""From left to right, whatever the model's confidence: SDAR's `sequential` (arXiv:2510.06303)."""

import dataclasses

import jax.numpy as jnp

from specjax.about import About
from specjax.diffusion.unmask.base import Choice, Unmask
from specjax.diffusion.unmask.fixed import Fixed


@dataclasses.dataclass(frozen=True)
class Sequential(Unmask):
    """Commits the first open positions of the block, so many per pass that a block takes `steps` of them.

    Attributes:
      steps: denoising steps per block; 0: as many as it has masks, one token each.
      published: whether a block-diffusion model's last block is filled and cut, as in the original; see `Unmask.fills`.
    """

    about = About("sequential", "from left to right, `steps` passes per block", "arXiv:2510.06303", "own text")

    steps: int = 0
    published: bool = False

    def __post_init__(self):
        if self.steps < 0:
            raise ValueError(f"sequential needs steps >= 0, got {self.steps}")

    @property
    def slides(self):
        return not self.steps

    def __call__(self, guess, memory):
        place = jnp.cumsum(guess.masked, axis=1) - 1
        count = Fixed(self.steps).count(guess.step, guess.entry, guess.rounded)
        return Choice(guess.masked & (place < count[:, None]), -place.astype(jnp.float32), guess.tokens), memory
