"""Parameters that are put into few bits while they are read."""

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from specjax.models import dfloat11
from specjax.models.byte_ranges import Box, Room, Source, Stack
from specjax.models.errors import ModelError
from specjax.models.few_bits import Quantised

PIECE = 1 << 20
"""Numbers that are quantised at a time."""


class Scaling(Protocol):
    """Numbers of few bits, groups of which share a scale: a `specjax.models.formats.Scaled`."""

    @property
    def group(self) -> int: ...

    @property
    def kind(self) -> Any: ...

    def quantise(self, numbers: Any, axis: int, dtype: Any, xp: Any = np) -> tuple[Any, Any]: ...


@dataclasses.dataclass(frozen=True)
class QuantisedSource:
    """Where a parameter is stored that is kept in few bits, with scales. A host holds what is stored of it, and a few pieces.

    A scale is of all inputs of an output, or of a group of them. So of a matrix whose inputs lie on several hosts each reads
    more than its own: all inputs, or those of the groups that it has a part of.

    Attributes:
      format: what becomes of the numbers.
      source: of the plain ones.
      axis: of its inputs, counted from the end.
    """

    format: Scaling
    source: Source | Stack
    axis: int

    def placed(self, dtype: Any, place: Any) -> Quantised:
        """The parameter.

        Args:
          dtype: of the scales where the source names none.
          place: a `Quantised` of shardings; None: the default device.

        Raises:
          ModelError: where the file ends before it should.
        """
        shape, at = self.source.shape, len(self.source.shape) + self.axis
        size = self.format.group or shape[at]
        dtype = np.dtype(dtype if self.source.dtype is None else self.source.dtype)
        values = Room(shape, self.format.kind, None if place is None else place.values)
        scales = Room((*shape[:at], shape[at] // size, *shape[at + 1 :]), dtype, None if place is None else place.scale)
        by_inputs = lambda box: (*box[:at], (box[at][0] * size, box[at][1] * size), *box[at + 1 :])
        wanted = [*values.buffers, *map(by_inputs, scales.buffers)]
        for piece in _pieces(wanted, at, size):
            numbers = np.empty([stop - start for start, stop in piece], np.float32)
            self.source.fill([(piece, numbers)])
            scale, value = self.format.quantise(numbers, self.axis, dtype)
            groups = (*piece[:at], (piece[at][0] // size, piece[at][1] // size), *piece[at + 1 :])
            for room, made, box in ((values, value, piece), (scales, scale, groups)):
                for own, buffer in room.buffers.items():
                    _copy(made, box, buffer, own)
        return Quantised(scales.array(), values.array())


@dataclasses.dataclass(frozen=True)
class CodedSource:
    """Where a parameter is stored whose exponents are coded.

    How long their codes are depends on all of them: each host reads a whole matrix (of experts one at a time), which it holds
    until that is coded.

    Attributes:
      group: how many inputs of an output follow each other in codes; 0: all of them.
      source: of the plain numbers.
      axis: of its inputs, counted from the end.
    """

    group: int
    source: Source | Stack
    axis: int

    def placed(self, dtype: Any, place: Any) -> dfloat11.Coded:
        """The parameter.

        Args:
          dtype: that it is used in, where the source names none.
          place: a `Coded` of shardings; None: the default device.

        Raises:
          ModelError: where the file ends before it should, or bfloat16 does not hold the numbers.
        """
        dtype = np.dtype(dtype if self.source.dtype is None else self.source.dtype)
        rounded = dtype == dfloat11.BFLOAT16  # as plain parameters would be
        matrix, boxes = np.empty(self.source.shape, dfloat11.BFLOAT16), [(0, size) for size in self.source.shape]
        for index in itertools.product(*map(range, self.source.shape[:-2])):
            box = (*((i, i + 1) for i in index), *boxes[-2:])
            numbers = np.empty([b - a for a, b in box], dtype if rounded else np.float32)
            self.source.fill([(box, numbers)])
            if not rounded and not dfloat11.is_exact(numbers):
                raise ModelError(NOT_EXACT)
            matrix[tuple(slice(*span) for span in box)] = numbers
        made = dfloat11.encoded(matrix, self.axis, self.group, dtype)
        if place is None:
            return jax.tree.map(jnp.asarray, made)
        put = lambda part, where: jax.make_array_from_callback(part.shape, where, lambda index: part[index])
        return jax.tree.map(put, made, place)


NOT_EXACT = (
    "dfloat11 holds numbers of bfloat16, and the model's are others: load it with dtype bfloat16, or without weights"
)


def _pieces(wanted: list[Box], at: int, size: int) -> Iterator[Box]:
    """Boxes that cover the wanted ones, of about `PIECE` numbers: whole groups of the inputs, which are the axis `at`, and a
    few of the outputs, the other one of the last two, at a time."""
    spans = [(min(box[i][0] for box in wanted), max(box[i][1] for box in wanted)) for i in range(len(wanted[0]))]
    inputs = spans[at][0] // size * size, -(-spans[at][1] // size) * size
    lead, out = range(len(spans) - 2), 2 * len(spans) - 3 - at
    step = max(1, PIECE // (inputs[1] - inputs[0]))
    for index in itertools.product(*(range(*spans[i]) for i in lead)):
        for first in range(*spans[out], step):
            box = [*((i, i + 1) for i in index), inputs, inputs]
            box[out] = first, min(first + step, spans[out][1])
            if any(all(a < d and c < b for (a, b), (c, d) in zip(box, one, strict=True)) for one in wanted):
                yield tuple(box)


def _copy(made: np.ndarray, box: Box, buffer: np.ndarray, own: Box) -> None:
    """What both boxes have, from one to the other."""
    shared = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(box, own, strict=True)]
    if all(start < stop for start, stop in shared):
        inside = lambda of: tuple(slice(a - c, b - c) for (a, b), (c, _) in zip(shared, of, strict=True))
        buffer[inside(own)] = made[inside(box)]
