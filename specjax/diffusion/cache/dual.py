"""Fast-dLLM's caches: of the prefix, or of everything outside the block, as it was when the block began
(arXiv:2505.22618, 3.2).
"""

import dataclasses

from specjax.about import About
from specjax.diffusion.cache.base import Cache, every


@dataclasses.dataclass(frozen=True)
class Dual(Cache):
    """Reuses everything outside the active block; the pass that enters a block computes everything.

    With shifted logits (Dream), that pass commits only the block's first token, however sure the others are.

    Attributes:
      refresh: the interval, in passes over a block, at which everything is computed. 0: only the first pass does. 1 is
        no cache.
    """

    about = About("dual", "reuses all but the block, while it lasts", "arXiv:2505.22618, section 3.2", "lossy")

    refresh: int = 0

    def __post_init__(self):
        check_refresh(self, 0)

    @property
    def seeds(self):
        return True

    @property
    def steady(self):
        return not self.refresh

    def most(self, width, size):
        return min(width, size)

    def active(self, canvas):
        return canvas.inside | every(canvas, due(canvas.step, self.refresh))


@dataclasses.dataclass(frozen=True)
class Prefix(Cache):
    """Reuses what lies before the active block; recomputes the block and everything after it.

    A block is entered as in `Dual`.

    Attributes:
      refresh: as in `Dual`.
    """

    about = About(
        "prefix", "reuses what lies before the block, while it lasts", "arXiv:2505.22618, section 3.2", "lossy"
    )

    refresh: int = 0

    def __post_init__(self):
        check_refresh(self, 0)

    @property
    def seeds(self):
        return True

    @property
    def steady(self):
        return not self.refresh

    def active(self, canvas):
        return (canvas.at >= canvas.start[:, None]) | every(canvas, due(canvas.step, self.refresh))


def check_refresh(policy, least):
    """Raises ValueError if a policy's `refresh` is below the least value."""
    if policy.refresh < least:
        raise ValueError(f"refresh must be at least {least}, got {policy}")


def due(step, every):
    """Whether pass number `step` is the first, or a multiple of `every` if that is not 0."""
    return (step == 0) | (step % every == 0) if every else step == 0
