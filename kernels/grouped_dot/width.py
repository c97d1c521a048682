"""The number of rows that are multiplied at a time."""


def width(rows: int, groups: int) -> int:
    """A power of two that holds twice the rows of a mean group.

    >>> width(64, 128), width(64, 16), width(1024, 128)
    (1, 8, 16)
    """
    return 1 << (max(1, 2 * rows // groups) - 1).bit_length()
