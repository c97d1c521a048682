"""dKV-Cache: a token's keys and values are kept from one pass after it was decoded (arXiv:2505.15781)."""

import dataclasses

import jax.numpy as jnp

from specjax.about import About
from specjax.diffusion.cache.base import Cache, every
from specjax.diffusion.cache.dual import check_refresh, due


@dataclasses.dataclass(frozen=True)
class Delayed(Cache):
    """dKV-Cache-Decode: open positions and those just decoded are computed anew, the first two passes of a block compute all.

    Attributes:
      refresh: passes over a block between two that compute everything; 1 is no cache.
    """

    about = About("delayed", "reuses known tokens, from one pass after they became known", "arXiv:2505.15781", "lossy")

    refresh: int = 8

    def __post_init__(self):
        check_refresh(self, 1)

    def active(self, canvas):
        return canvas.masked | canvas.fresh | every(canvas, (canvas.step < 2) | due(canvas.step, self.refresh))


@dataclasses.dataclass(frozen=True)
class Greedy(Cache):
    """dKV-Cache-Greedy: of the open positions only the active block's, and neighbours of what was just decoded.

    Attributes:
      refresh: as in `Delayed`.
      reach: how far from a decoded token its open neighbours are computed anew.
    """

    about = About(
        "greedy", "the same, and of the open ones only the block's and neighbours", "arXiv:2505.15781", "lossy"
    )

    refresh: int = 2
    reach: int = 4

    def __post_init__(self):
        check_refresh(self, 1)
        if self.reach < 0:
            raise ValueError(f"greedy needs reach >= 0, got {self}")

    def active(self, canvas):
        fresh = canvas.fresh.astype(jnp.int32)
        total = jnp.pad(jnp.cumsum(fresh, axis=1), ((0, 0), (1, 0)))
        size = fresh.shape[1]
        low, high = jnp.maximum(canvas.at - self.reach, 0)[0], jnp.minimum(canvas.at + self.reach + 1, size)[0]
        near = canvas.masked & (total[:, high] > total[:, low])
        asked = canvas.fresh | near | (canvas.masked & canvas.inside)
        return asked | every(canvas, due(canvas.step, self.refresh))
