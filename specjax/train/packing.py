"""Packs documents into rows of one length with little memory: pieces are in a file, and rows in arrays that may be
files."""

import array
import bisect
import dataclasses
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

Piece = tuple[list[int], list[int]]
"""Token ids, and of each: `READ`, `DUE` or `WRONG`."""

READ, DUE, WRONG = 0, 1, 2
"""A token that is only read, one that is predicted or labelled right, and one that is labelled wrong."""

_WRONG = 1 << 30
"""Added to the id of a wrong token in a file; larger than any id."""

Make = Callable[[str, tuple[int, ...], Any], np.ndarray]
"""A function that makes an array of zeros from its name, shape and type."""


class Pieces:
    """Documents in pieces of at most one row, in a file that is deleted with this object.

    Args:
      folder: the file's folder; None: the system's folder for temporary files.

    Attributes:
      sizes: the number of tokens of each piece.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._file = tempfile.TemporaryFile(dir=folder)
        self.sizes = array.array("q")

    def append(self, ids: list[int], mask: list[int]) -> None:
        """Adds a piece; ids that are only read are written as `~id`."""
        marked = np.asarray(ids) + _WRONG * (np.asarray(mask) == WRONG)
        self._file.write(np.where(mask, marked, np.invert(ids)).astype(np.int32).tobytes())
        self.sizes.append(len(ids))

    def read(self) -> Callable[[int], tuple[np.ndarray, np.ndarray]]:
        """A function from the number of a piece to its ids and its mask."""
        self._file.flush()
        signed = np.memmap(self._file, np.int32, "r")
        ends = np.cumsum(self.sizes)

        def one(number: int) -> tuple[np.ndarray, np.ndarray]:
            found = signed[ends[number] - self.sizes[number] : ends[number]]
            ids, wrong = np.where(found < 0, np.invert(found), found), found >= _WRONG
            return ids - _WRONG * wrong, (found >= 0) + wrong.astype(int)

        return one

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> "Pieces":
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()


def cut(ids: list[int], mask: list[int], length: int) -> list[Piece]:
    """Cuts a document into pieces of at most `length` tokens, each with its own tokens to predict.

    Pieces without tokens to predict are left out.

    An example's first piece begins with the end of its prompt, up to half of the piece or as much as the answer leaves.
    Each later piece begins with the prompt's end, up to a quarter of the piece. After that come the latest tokens
    before the piece; both parts together take up to half of it.

    >>> cut([1, 2, 3, 4, 5, 6], [DUE] * 6, 4)
    [([1, 2, 3, 4], [1, 1, 1, 1]), ([5, 6], [1, 1])]
    >>> cut([1, 2, 3, 4, 5, 6], [READ] * 3 + [DUE] * 3, 4)
    [([2, 3, 4, 5], [0, 0, 1, 1]), ([3, 5, 6], [0, 0, 1])]
    """
    answer = next(at for at, kind in enumerate(mask) if kind)
    half = 0 if all(mask) else length // 2
    prompt = list(range(max(0, answer - half // 2), answer))  # the part of it that later pieces repeat
    before = list(range(max(0, min(answer - half, len(ids) - length)), answer))
    pieces, done = [], answer
    while done < len(ids):
        end = min(done + length - len(before), len(ids))
        own = [READ] * len(before) + mask[done:end]
        if any(own[1:]):
            pieces.append(([ids[i] for i in before] + ids[done:end], own))
        done = end
        before = prompt + list(range(max(answer, done - half + len(prompt)), done))
    return pieces


def pack(sizes: np.ndarray, length: int) -> np.ndarray:
    """Assigns each piece to a row: long ones first, each where it leaves the least room.

    Args:
      sizes: `[n]`, the number of tokens of each piece, at most `length`.
      length: T.

    >>> pack(np.array([2, 3, 5, 6]), 8).tolist()
    [0, 1, 1, 0]
    """
    rows, count = np.zeros(len(sizes), np.int64), 0
    room: list[tuple[int, int]] = []  # the room and number of each row, sorted
    least = min(sizes, default=0)
    for piece in np.argsort(-sizes, kind="stable"):
        size = int(sizes[piece])
        at = bisect.bisect_left(room, (size, 0))
        left, row = room.pop(at) if at < len(room) else (length, count)
        count = max(count, row + 1)
        rows[piece] = row
        if left - size >= least:  # otherwise nothing more fits
            bisect.insort(room, (left - size, row))
    return rows


@dataclasses.dataclass(frozen=True)
class Packed:
    """The row of every piece, and the order in which pieces are written.

    Attributes:
      order: the numbers of pieces, row by row.
      rows: the row of each piece, in that order.
    """

    order: np.ndarray
    rows: np.ndarray

    @classmethod
    def of(cls, sizes: np.ndarray, length: int, seed: int, packed: bool) -> "Packed":
        """
        Args:
          sizes: `[n]`, the number of tokens of each piece.
          length: T.
          seed: the seed of their order.
          packed: whether a row may hold several pieces.
        """
        shuffled = np.random.default_rng(seed).permutation(len(sizes))
        if not packed:
            return cls(shuffled, np.arange(len(sizes)))
        sizes = sizes[shuffled]
        rows = pack(sizes, length)
        longest = np.argsort(-sizes, kind="stable")
        order = longest[np.argsort(rows[longest], kind="stable")]
        return cls(shuffled[order], rows[order])

    def written(self, pieces: Pieces, length: int, make: Make, labelled: bool = False) -> dict[str, np.ndarray]:
        """Tokens, mask and documents, `[N, T]` each, and which tokens are wrong if `labelled`; see
        `specjax.train.data.Rows`.
        """
        shape = (int(self.rows[-1]) + 1, length)
        kinds = {"tokens": np.int32, "mask": np.bool_, "documents": np.int32}
        kinds |= {"wrong": np.bool_} if labelled else {}
        found = {name: make(name, shape, kind) for name, kind in kinds.items()}
        tokens, mask, documents = (found[name] for name in ("tokens", "mask", "documents"))
        piece, row, end, number = pieces.read(), -1, 0, 0
        for one, at in zip(self.order, self.rows, strict=True):
            if at != row:
                row, end, number = at, 0, 0
            ids, own = piece(one)
            begin, end = end, end + len(ids)
            tokens[row, begin:end], mask[row, begin:end], documents[row, begin:end] = ids, own > READ, number
            if labelled:
                found["wrong"][row, begin:end] = own == WRONG
            number += 1
            documents[row, end:] = number
        return found
