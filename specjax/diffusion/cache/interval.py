"""Refreshes at fixed intervals, a longer one for the prompt than for the response (dLLM-Cache, arXiv:2506.06295,
section 3.2).
"""

import dataclasses

from specjax.about import About
from specjax.diffusion.cache.base import Cache, every


@dataclasses.dataclass(frozen=True)
class Interval(Cache):
    """Recomputes the prompt every `prompt` passes and the response every `response` passes.

    In between it recomputes the positions that moved most, or the active block if `share` is 0.

    Attributes:
      prompt: the interval, in passes, at which the prompt is computed.
      response: the interval, in passes, at which everything after the prompt is computed.
      share: of the response, how many positions each layer computes in between: those whose values changed most. The
        paper has 0.25. 0: the active block instead.
    """

    about = About(
        "interval",
        "refreshes prompt and response at intervals, in between a share or the block",
        "arXiv:2506.06295",
        "lossy",
    )

    prompt: int = 50
    response: int = 7
    share: float = 0.0

    def __post_init__(self):
        if self.prompt < 1 or self.response < 1 or not 0 <= self.share <= 1:
            raise ValueError(f"interval needs prompt >= 1, response >= 1 and share in [0, 1], got {self}")

    @property
    def chooses(self):
        return self.share

    def active(self, canvas):
        response = canvas.at >= canvas.prompt_length[:, None]
        whole = every(canvas, canvas.passes % self.response == 0) & response
        due = whole | (every(canvas, canvas.passes % self.prompt == 0) & ~response)
        return due if self.share else canvas.inside | canvas.fresh | due


@dataclasses.dataclass(frozen=True)
class Vicinity(Cache):
    """Recomputes the active block and its neighbours (dInfer, 2025).

    The first passes over a text, and the pass that enters a block, compute everything.

    Attributes:
      before: neighbours on the left.
      after: neighbours on the right.
      warmup: how many passes over a text compute everything, before one more that does so for the cache.
    """

    about = About("vicinity", "computes the block and its neighbours", "dInfer 2025", "lossy")

    before: int = 16
    after: int = 16
    warmup: int = 4

    def __post_init__(self):
        if min(self.before, self.after) < 0 or self.warmup < 0:
            raise ValueError(f"vicinity needs before >= 0, after >= 0 and warmup >= 0, got {self}")

    def active(self, canvas):
        offset = canvas.at - canvas.start[:, None]
        near = (offset >= -self.before) & (offset < canvas.width + self.after)
        return near | every(canvas, (canvas.passes <= self.warmup) | (canvas.step == 0))
