"""The common part of policies that stand before another one."""

import dataclasses
from typing import Any

from specjax.diffusion.unmask.base import Unmask
from specjax.diffusion.unmask.threshold import Threshold


@dataclasses.dataclass(frozen=True)
class Wrapper(Unmask):
    """Stands before another policy. If a subclass remembers nothing, its memory is that of `inner`.

    Attributes:
      inner: decides; it revises nothing, remembers no more than a block, and needs no decoder of its own.
    """

    inner: Unmask = Threshold()

    def __post_init__(self):
        if self.inner.revises or self.inner.lasting or self.inner.decoder is not None:
            raise ValueError(
                f"{type(self).__name__} cannot stand before {type(self.inner).__name__}, which decides over more than one pass"
            )

    @property
    def whole(self):
        return self.inner.whole

    @property
    def warped(self):
        return self.inner.warped

    @property
    def room(self):
        return self.inner.room

    @property
    def fills(self):
        return self.inner.fills

    @property
    def ordered(self):
        return self.inner.ordered

    @property
    def sees_mask(self):
        return self.inner.sees_mask

    def for_model(self, masked: Any) -> Unmask:
        """See `Unmask.for_model`."""
        return dataclasses.replace(self, inner=self.inner.for_model(masked))

    @property
    def idle(self):
        return self.inner.idle

    @property
    def needs(self):
        return self.inner.needs

    @property
    def width(self):
        return self.inner.width

    def sees(self, memory: Any) -> Any:
        """See `Unmask.sees`; a subclass with a memory of its own separates it from that of `inner`."""
        return self.inner.sees(memory)

    def init(self, batch: int, width: int, vocab_size: int) -> Any:
        """See `Unmask.init`."""
        return self.inner.init(batch, width, vocab_size)
