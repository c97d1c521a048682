"""What a layer keeps of a text, and where."""

from typing import Any, NamedTuple


class Kept(NamedTuple):
    """What a layer keeps of a text, or of a block's tokens.

    Attributes:
      slots: of a mixer with a slot per token; None: the layer has none.
      state: of a mixer with a running state; None: the layer has none.
    """

    slots: Any = None
    state: Any = None


class Place(NamedTuple):
    """Where a layer's part of a cache is.

    Attributes:
      slots: the index of its slots, among the layers with slots of their own; None: it reads none.
      state: the index of its running state, among the layers with one; None: it has none.
      source: its index among the layers that read a source (`specjax.models.cross`); None: it reads none.
    """

    slots: int | None = None
    state: int | None = None
    source: int | None = None
