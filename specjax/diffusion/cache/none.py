"""No cache: every pass computes the whole canvas, as LLaDA and Dream do."""

import dataclasses

import jax.numpy as jnp

from specjax.about import About
from specjax.diffusion.cache.base import Cache


@dataclasses.dataclass(frozen=True)
class NoCache(Cache):
    """Exact, and slow: a pass costs the whole canvas."""

    about = About("none", "computes the whole canvas in every pass; exact", "-", "same text")

    @property
    def keeps(self):
        return False

    def active(self, canvas):
        return jnp.ones_like(canvas.masked)
