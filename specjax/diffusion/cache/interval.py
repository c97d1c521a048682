"""Refreshes at fixed intervals, the prompt's longer than the response's (dLLM-Cache, arXiv:2506.06295, section 3.2)."""

import dataclasses

from specjax.about import About
from specjax.diffusion.cache.base import Cache, every


@dataclasses.dataclass(frozen=True)
class Interval(Cache):
    """Computes the prompt every `prompt` passes, the response every `response`, and the active block always.

    The paper's partial refresh in between, of the tokens whose values moved most, is not part of it: the block takes its place.

    Attributes:
      prompt: passes between two that compute the prompt.
      response: passes between two that compute all that follows it.
    """

    about = About("interval", "refreshes prompt and response at intervals of their own", "arXiv:2506.06295", "lossy")

    prompt: int = 50
    response: int = 7

    def __post_init__(self):
        if self.prompt < 1 or self.response < 1:
            raise ValueError(f"interval needs prompt >= 1 and response >= 1, got {self}")

    def active(self, canvas):
        response = canvas.at >= canvas.prompt_length[:, None]
        whole = every(canvas, canvas.passes % self.response == 0) & response
        return canvas.inside | canvas.fresh | whole | (every(canvas, canvas.passes % self.prompt == 0) & ~response)


@dataclasses.dataclass(frozen=True)
class Vicinity(Cache):
    """Computes the active block and its neighbours, and everything in the first passes over a text and when a block is entered
    (dInfer, 2025).

    Attributes:
      before: neighbours on the left.
      after: neighbours on the right.
      warmup: passes over a text that compute everything, before one more that does so for the cache.
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
