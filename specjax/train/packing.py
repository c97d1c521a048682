"""Packs documents into rows of one length, without holding either: pieces lie in a file, and rows in arrays that
may."""

import array
import bisect
import dataclasses
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

Piece = tuple[list[int], list[bool]]
"""Token ids, and which of them are to be predicted."""

Make = Callable[[str, tuple[int, ...], Any], np.ndarray]
"""An array of zeros from its name, shape and type."""


class Pieces:
    """Documents in pieces of at most a row, in a file that is gone with this object.

    Args:
      folder: where the file is; None: where the system keeps such files.

    Attributes:
      sizes: tokens of each.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._file = tempfile.TemporaryFile(dir=folder)
        self.sizes = array.array("q")

    def append(self, ids: list[int], mask: list[bool]) -> None:
        """Adds one; what is not to be predicted is written as `~id`."""
        self._file.write(np.where(mask, ids, np.invert(ids)).astype(np.int32).tobytes())
        self.sizes.append(len(ids))

    def read(self) -> Callable[[int], tuple[np.ndarray, np.ndarray]]:
        """A function from the number of a piece to its ids and its mask."""
        self._file.flush()
        signed = np.memmap(self._file, np.int32, "r")
        ends = np.cumsum(self.sizes)

        def one(number: int) -> tuple[np.ndarray, np.ndarray]:
            found = signed[ends[number] - self.sizes[number] : ends[number]]
            return np.where(found < 0, np.invert(found), found), found >= 0

        return one

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> "Pieces":
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()


def cut(ids: list[int], mask: list[bool], length: int) -> list[Piece]:
    """A document in pieces of at most `length` tokens; each has its own tokens to predict, and those without one are left out.

    Of an example the first piece begins with the end of its prompt, up to half of the piece or as much as the answer leaves.
    Each later one begins with the prompt's end, up to a quarter of the piece, and with the latest of what came after it, up to
    half of the piece for both.

    >>> cut([1, 2, 3, 4, 5, 6], [True] * 6, 4)
    [([1, 2, 3, 4], [True, True, True, True]), ([5, 6], [True, True])]
    >>> cut([1, 2, 3, 4, 5, 6], [False] * 3 + [True] * 3, 4)
    [([2, 3, 4, 5], [False, False, True, True]), ([3, 5, 6], [False, False, True])]
    """
    answer = mask.index(True)
    half = 0 if all(mask) else length // 2
    prompt = list(range(max(0, answer - half // 2), answer))  # what later pieces have of it
    before = list(range(max(0, min(answer - half, len(ids) - length)), answer))
    pieces, done = [], answer
    while done < len(ids):
        end = min(done + length - len(before), len(ids))
        own = [False] * len(before) + mask[done:end]
        if any(own[1:]):
            pieces.append(([ids[i] for i in before] + ids[done:end], own))
        done = end
        before = prompt + list(range(max(answer, done - half + len(prompt)), done))
    return pieces


def pack(sizes: np.ndarray, length: int) -> np.ndarray:
    """The row of each piece: long ones first, each where it leaves the least room.

    Args:
      sizes: `[n]`, tokens of each, at most `length`.
      length: T.

    >>> pack(np.array([2, 3, 5, 6]), 8).tolist()
    [0, 1, 1, 0]
    """
    rows, count = np.zeros(len(sizes), np.int64), 0
    room: list[tuple[int, int]] = []  # of a row, and which; in order
    least = min(sizes, default=0)
    for piece in np.argsort(-sizes, kind="stable"):
        size = int(sizes[piece])
        at = bisect.bisect_left(room, (size, 0))
        left, row = room.pop(at) if at < len(room) else (length, count)
        count = max(count, row + 1)
        rows[piece] = row
        if left - size >= least:  # else nothing fits in any more
            bisect.insort(room, (left - size, row))
    return rows


@dataclasses.dataclass(frozen=True)
class Packed:
    """The row of every piece, and the order in which they are written.

    Attributes:
      order: numbers of pieces, row by row.
      rows: the row of each of them, in that order.
    """

    order: np.ndarray
    rows: np.ndarray

    @classmethod
    def of(cls, sizes: np.ndarray, length: int, seed: int, packed: bool) -> "Packed":
        """
        Args:
          sizes: `[n]`, tokens of each piece.
          length: T.
          seed: of their order.
          packed: whether a row may hold several.
        """
        shuffled = np.random.default_rng(seed).permutation(len(sizes))
        if not packed:
            return cls(shuffled, np.arange(len(sizes)))
        sizes = sizes[shuffled]
        rows = pack(sizes, length)
        longest = np.argsort(-sizes, kind="stable")
        order = longest[np.argsort(rows[longest], kind="stable")]
        return cls(shuffled[order], rows[order])

    def written(self, pieces: Pieces, length: int, make: Make) -> dict[str, np.ndarray]:
        """Tokens, mask and documents, `[N, T]` each; see `specjax.train.data.Rows`."""
        shape = (int(self.rows[-1]) + 1, length)
        kinds = {"tokens": np.int32, "mask": np.bool_, "documents": np.int32}
        found = {name: make(name, shape, kind) for name, kind in kinds.items()}
        tokens, mask, documents = found.values()
        piece, row, end, number = pieces.read(), -1, 0, 0
        for one, at in zip(self.order, self.rows, strict=True):
            if at != row:
                row, end, number = at, 0, 0
            ids, own = piece(one)
            begin, end = end, end + len(ids)
            tokens[row, begin:end], mask[row, begin:end], documents[row, begin:end] = ids, own, number
            number += 1
            documents[row, end:] = number
        return found
