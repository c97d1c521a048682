"""The layout of a cache in a TPU's memory."""


def slots_last(slots: int, width: int) -> bool:
    """Whether a TPU keeps caches `[B, K, S, H]` with the slots of a channel side by side, as if they were `[B, K, H, S]`.

    The last two axes are kept in tiles of 8 x 128, in the order that fills them better: heads of 64 channels the other way
    round. `tests/compile/test_layouts.py` asks the compilers. For a kernel the axes are swapped then, which moves nothing; as
    they stand they would be copied.

    Args:
      slots: S.
      width: H.
    """
    tiles = lambda rows, columns: -(-rows // 8) * -(-columns // 128)
    return tiles(width, slots) < tiles(slots, width)
