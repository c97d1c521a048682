"""No cache: every pass computes the whole canvas, as LLaDA and Dream do."""

import dataclasses

import jax.numpy as jnp

from specjax.diffusion.cache.base import Cache


@dataclasses.dataclass(frozen=True)
class NoCache(Cache):
    """Exact, and slow: a pass costs the whole canvas."""

    @property
    def keeps(self):
        return False

    def active(self, canvas):
        return jnp.ones_like(canvas.masked)
