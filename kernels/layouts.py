"""The layout of a cache in a TPU's memory."""


def slots_last(slots: int, width: int) -> bool:
    """Whether a TPU stores caches `[B, K, S, H]` with a channel's slots adjacent, like `[B, K, H, S]`.

    The last two axes are stored in tiles of 8 x 128, in the order that fills them better; heads of 64 channels are
    transposed. `tests/compile/test_layouts.py` checks this with the compilers. For such caches, a kernel's operands are
    swapped, which moves no data; unswapped operands would be copied.

    Args:
      slots: S.
      width: H.
    """
    tiles = lambda rows, columns: -(-rows // 8) * -(-columns // 128)
    return tiles(width, slots) < tiles(slots, width)
