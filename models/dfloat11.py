"""Matrices in bfloat16 with Huffman-coded exponents: the leaf for one in a params pytree, and its encoder.

DFloat11 (Zhang et al. 2025, arXiv:2504.11651): a matrix has few distinct exponents, of uneven frequency, so their codes
take about a third of eight bits. The other eight bits of a number are stored unchanged. Every number is restored bit
for bit.

The codes are stored in separate lanes (`specjax.kernels.exponents`). The authors' files have one stream
(`specjax.models.packed.dfloat11`). With lanes, the codes have the axes of their matrix, so a mesh can split them.

Shapes: `E` inputs, `F` outputs, `S` runs of an output's inputs, `W` words of a run.
"""

import dataclasses
import heapq
from typing import Any

import jax
import ml_dtypes
import numpy as np

from specjax.kernels.exponents import numbers
from specjax.kernels.exponents.xla import FOUR, LONGEST
from specjax.models.matrix import Matrix

Array = jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Coded(Matrix):
    """A bfloat16 kernel or table, compressed without loss.

    Attributes:
      like: `[..., 1, 1]`, one number of the type that the matrix is used in.
      rest: `[..., E, F]` of a kernel, `[V, E]` of a table of embeddings; uint8, a number's sign and the seven bits
        after its exponent.
      codes: `[..., W, S, F]`, or `[W, V, S]`; uint32, see `specjax.kernels.exponents.numbers`.
      table: `[..., 256, 1, 1]` uint16, see there.
    """

    like: Any
    rest: Any
    codes: Any
    table: Any

    @property
    def stored(self) -> Any:
        return self.rest

    @property
    def T(self) -> "Coded":  # noqa: N802
        return dataclasses.replace(self, rest=self.rest.swapaxes(-1, -2), codes=self.codes.swapaxes(-1, -2))

    def astype(self, dtype: Any) -> "Coded":
        return dataclasses.replace(self, like=self.like.astype(dtype))

    def take(self, ids: Array) -> "Coded":
        row = lambda x: x.at[..., ids, :].get(mode="promise_in_bounds")
        return dataclasses.replace(self, rest=row(self.rest), codes=row(self.codes))

    def numbers(self, after: Array | None = None) -> Array:
        """The matrix in bfloat16, computed only after `after`, if given."""
        turned = self.codes.shape[-1] != self.rest.shape[-1]  # runs lie along the last axis of a table
        own = self.T if turned else self
        found = numbers(own.rest, own.codes, own.table, after)
        return found.swapaxes(-1, -2) if turned else found


def encoded(matrix: np.ndarray, axis: int, run: int, dtype: Any) -> Coded:
    """A matrix as arrays of numpy.

    Args:
      matrix: `[..., E, F]` or `[V, E]`, bfloat16.
      axis: of the inputs, counted from the end.
      run: how many inputs of an output are in one lane, a divisor of their number; 0: all.
      dtype: the type in which it is used.
    """
    if axis == -1:
        return encoded(matrix.swapaxes(-1, -2), -2, run, dtype).T
    lead = matrix.shape[:-2]
    made = [_encoded(one, run or matrix.shape[-2]) for one in matrix.reshape(-1, *matrix.shape[-2:])]
    words = max(codes.shape[0] for _, codes, _ in made)
    whole = [(rest, np.pad(codes, ((0, words - codes.shape[0]), (0, 0), (0, 0))), table) for rest, codes, table in made]
    rest, codes, table = (np.stack(parts).reshape(*lead, *parts[0].shape) for parts in zip(*whole, strict=True))
    return Coded(np.zeros((*lead, 1, 1), dtype), rest, codes, table)


def _encoded(matrix: np.ndarray, run: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """`rest`, `codes` and `table` of one matrix `[E, F]`."""
    bits = np.ascontiguousarray(matrix).view(np.uint16)
    exponents = (bits >> 7).astype(np.uint8).reshape(-1, run, bits.shape[1])
    rest = (bits >> 8 & 0x80 | bits & 0x7F).astype(np.uint8)
    lengths = code_lengths(np.bincount(exponents.reshape(-1), minlength=256))
    table, first = code_table(lengths)
    room = lengths.astype(np.uint8)[exponents].sum(axis=1, dtype=np.int64).max()
    codes = np.zeros((-(-int(room) // 32), exponents.shape[0], exponents.shape[2]), np.uint32)
    at = np.zeros(codes.shape[1:], np.int64)
    for i in range(0, run, FOUR):
        joined, taken = np.zeros(at.shape, np.uint64), np.zeros(at.shape, np.int64)
        for j in range(i, min(i + FOUR, run)):
            own = exponents[:, j]
            joined = joined << lengths[own].astype(np.uint64) | first[own]
            taken += lengths[own]
        joined <<= (64 - taken - (at & 31)).astype(np.uint64)
        for half, shift in ((0, 32), (1, 0)):
            word = np.minimum((at >> 5) + half, len(codes) - 1)[None]  # nothing is written after the last word
            part = (joined >> np.uint64(shift)).astype(np.uint32)[None]
            part = np.where((at >> 5) + half < len(codes), part, np.uint32(0))
            np.put_along_axis(codes, word, np.take_along_axis(codes, word, 0) | part, 0)
        at += taken
    return rest, codes, table.reshape(-1, 1, 1)


def code_lengths(counts: np.ndarray) -> np.ndarray:
    """The bits of each symbol's code in the shortest prefix code of at most `LONGEST` bits; 0 for absent symbols.

    Packages of pairs are merged level by level (Larmore and Hirschberg 1990). A symbol's code has as many bits as the
    symbol has occurrences in the `2 (n - 1)` lightest packages.

    Args:
      counts: the frequency of every symbol, `[256]`; the symbols must fit in such a code.

    >>> code_lengths(np.array([5, 0, 1, 2]))
    array([1, 0, 2, 2])
    """
    lengths = np.zeros(len(counts), np.int64)
    alone = sorted((int(count), (symbol,)) for symbol, count in enumerate(counts) if count)
    if len(alone) == 1:
        lengths[alone[0][1][0]] = 1
        return lengths
    level: list[tuple[int, tuple[int, ...]]] = []
    for _ in range(LONGEST):
        pairs = zip(level[::2], level[1::2], strict=False)
        level = list(heapq.merge(alone, ((a + b, x + y) for (a, x), (b, y) in pairs)))
    for _, symbols in level[: 2 * (len(alone) - 1)]:
        np.add.at(lengths, list(symbols), 1)
    return lengths


def code_table(lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The decoding table for code lengths, `[256]` uint16, and each symbol's code, `[256]` uint64."""
    table, first, code = np.zeros(2**LONGEST, np.uint16), np.zeros(len(lengths), np.uint64), 0
    for symbol in sorted(np.flatnonzero(lengths), key=lambda symbol: lengths[symbol]):
        span = 2 ** (LONGEST - int(lengths[symbol]))
        table[code : code + span] = symbol | int(lengths[symbol]) << 8
        first[symbol], code = code // span, code + span
    return table, first


def usual_words(run: int) -> int:
    """The words of the longest of a few hundred thousand runs of normal random numbers of one scale.

    >>> usual_words(128), usual_words(1024)
    (13, 91)
    """
    return -(-int(_MEAN * run + 5 * _SPREAD * run**0.5) // 32)


_MEAN, _SPREAD = 2.65, 1.09  # bits of a code of such numbers


def is_exact(numbers: np.ndarray) -> bool:
    """Whether bfloat16 represents these float32 numbers exactly."""
    return not (np.ascontiguousarray(numbers, np.float32).view(np.uint32) & 0xFFFF).any()


BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
