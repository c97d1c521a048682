"""Numbers of a few bits that follow each other in little-endian words of 32, low bits first, without gaps."""

import numpy as np


def span(first: int, last: int, width: int, words: int) -> tuple[tuple[int, int], int]:
    """The words in which some numbers lie, from the start of 32 numbers on, which fill `width` words.

    Args:
      first: number.
      last: one past the last.
      width: bits of a number.
      words: that there are.

    Returns:
      The span of words, and how many numbers of it come before the first.

    >>> span(40, 50, 3, 100)
    ((3, 6), 8)
    """
    return (first // 32 * width, min(words, -(-last // 32) * width)), first % 32


def unpacked(words: np.ndarray, width: int, order: tuple[int, ...] = (0,)) -> np.ndarray:
    """Unsigned numbers `[rows, n]` of words `[rows, m]` int32; those that lie in the last word only in part are left out.

    Args:
      words: see above.
      width: bits of a number, up to 8.
      order: of every `len(order)` numbers, where the first stands, the second, and so on.

    >>> unpacked(np.array([[0x76543210]], np.int32), 4).tolist()
    [[0, 1, 2, 3, 4, 5, 6, 7]]
    """
    octets = np.ascontiguousarray(words, "<i4").view(np.uint8)
    if 8 % width == 0:
        numbers = octets[..., None] >> np.arange(0, 8, width, dtype=np.uint8) & np.uint8(2**width - 1)
        numbers = numbers.reshape(len(words), -1)
    else:  # some lie across two bytes
        single = np.unpackbits(octets, axis=-1, bitorder="little")
        count = single.shape[-1] // width
        single = single[:, : count * width].reshape(-1, count, width)
        numbers = np.packbits(single, axis=-1, bitorder="little")[..., 0]
    return numbers if len(order) == 1 else numbers.reshape(-1, len(order))[:, order].reshape(numbers.shape)
