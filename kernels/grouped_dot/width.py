"""The number of rows multiplied at a time."""


def width(rows: int, groups: int) -> int:
    """A power of two with room for twice the rows of an average group.

    >>> width(64, 128), width(64, 16), width(1024, 128)
    (1, 8, 16)
    """
    return 1 << (max(1, 2 * rows // groups) - 1).bit_length()
