"""What a block of drafted tokens sees in layers with a window."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Windows:
    """What the slots of a block see in layers with a window, following the code that trained them.

    Attributes:
      causal: whether no slot sees a later one.
      from_start: whether all slots see the window before the block's first slot; otherwise each sees the window that
        ends with it.
    """

    causal: bool = True
    from_start: bool = False
