"""FreeCache: finished blocks are frozen for good, one pass after they are finished (FlashDLM, arXiv:2505.21467)."""

import dataclasses

from specjax.about import About
from specjax.diffusion.cache.base import Cache


@dataclasses.dataclass(frozen=True)
class Freeze(Cache):
    """Recomputes what follows the last finished block; the pass that enters a block recomputes that finished block once more.

    Attributes:
      window: how far beyond the active block; positions after it are computed only when a block is entered. 0: to the
        end.
    """

    about = About("freeze", "freezes finished blocks for good", "arXiv:2505.21467", "lossy")

    window: int = 0

    def __post_init__(self):
        if self.window < 0:
            raise ValueError(f"freeze needs window >= 0, got {self}")

    def active(self, canvas):
        entering = (canvas.step == 0)[:, None]
        first = canvas.start[:, None]
        before = (canvas.at >= first - canvas.width) & (canvas.at < first)
        after = canvas.at >= first
        near = after & (canvas.at < first + canvas.width + self.window) if self.window else after
        return ((before | canvas.fresh) & entering) | near | (after & entering)
