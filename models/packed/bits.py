"""Numbers of a few bits, packed without gaps into little-endian 32-bit words, low bits first."""

import numpy as np


def span(first: int, last: int, width: int, words: int) -> tuple[tuple[int, int], int]:
    """The words that contain some numbers, beginning at a multiple of 32 numbers, which fill `width` words.

    Args:
      first: the first number.
      last: one past the last number.
      width: bits of a number.
      words: the number of existing words.

    Returns:
      The span of words, and how many of its numbers precede the first.

    >>> span(40, 50, 3, 100)
    ((3, 6), 8)
    """
    return (first // 32 * width, min(words, -(-last // 32) * width)), first % 32


def unpacked(words: np.ndarray, width: int, order: tuple[int, ...] = (0,)) -> np.ndarray:
    """Unsigned numbers `[rows, n]` of words `[rows, m]` int32, without numbers that are only partly in the last word.

    Args:
      words: the words.
      width: bits of a number, up to 8.
      order: the places of the first, second, ... of every `len(order)` numbers.

    >>> unpacked(np.array([[0x76543210]], np.int32), 4).tolist()
    [[0, 1, 2, 3, 4, 5, 6, 7]]
    """
    octets = np.ascontiguousarray(words, "<i4").view(np.uint8)
    if 8 % width == 0:
        numbers = octets[..., None] >> np.arange(0, 8, width, dtype=np.uint8) & np.uint8(2**width - 1)
        numbers = numbers.reshape(len(words), -1)
    else:  # some numbers cross two bytes
        single = np.unpackbits(octets, axis=-1, bitorder="little")
        count = single.shape[-1] // width
        single = single[:, : count * width].reshape(-1, count, width)
        numbers = np.packbits(single, axis=-1, bitorder="little")[..., 0]
    return numbers if len(order) == 1 else numbers.reshape(-1, len(order))[:, order].reshape(numbers.shape)
