"""The common part of look-ups that may also read a datastore."""

import dataclasses

from specjax.draft.base import Drafter


@dataclasses.dataclass(frozen=True)
class TextsDrafter(Drafter):
    """Drafts from the row's own text and, if there is one, from a datastore (`specjax.draft.datastore.build`).

    Attributes:
      filled: whether `params["draft"]` is a datastore.
      vocab_size: filled in from the target.
    """

    filled: bool = dataclasses.field(default=False, kw_only=True)
    vocab_size: int | None = dataclasses.field(default=None, kw_only=True)

    @property
    def needs_params(self) -> bool:
        return self.filled

    def bind(self, target):
        return dataclasses.replace(self, vocab_size=target.vocab_size)
