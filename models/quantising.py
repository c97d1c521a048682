"""Parameters that are converted to few bits while they are read."""

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
"""Numbers quantised at a time."""


class Scaling(Protocol):
    """Numbers of few bits, groups of which share a scale: a `specjax.models.formats.Scaled`."""

    @property
    def kind(self) -> Any: ...

    def size(self, inputs: int) -> int: ...

    def quantise(self, numbers: Any, axis: int, dtype: Any, xp: Any = np) -> tuple[Any, Any]: ...


@dataclasses.dataclass(frozen=True)
class QuantisedSource:
    """The source of a parameter that is kept in few bits with scales. A host holds its share and a few pieces.

    A scale covers all inputs of an output, or a group of them. So if the inputs of a matrix are split over several
    hosts, each host reads more than its own: all inputs, or the inputs of every group that it has a part of.

    Attributes:
      format: the format of the result.
      source: the source of the plain numbers.
      axis: the axis of the inputs, counted from the end.
    """

    format: Scaling
    source: Source | Stack
    axis: int

    def placed(self, dtype: Any, place: Any) -> Quantised:
        """The parameter.

        Args:
          dtype: the type of the scales if the source names none.
          place: a `Quantised` of shardings; None: the default device.

        Raises:
          ModelError: if the file is too short.
        """
        shape, at = self.source.shape, len(self.source.shape) + self.axis
        size = self.format.size(shape[at])
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
    """The source of a parameter whose exponents are coded.

    The length of the codes depends on the whole matrix. So each host reads a whole matrix (experts one at a time) and
    holds it until it is coded.

    Attributes:
      group: how many inputs of an output form one run of codes.
      source: the source of the plain numbers.
      axis: the axis of the inputs, counted from the end.
    """

    group: int
    source: Source | Stack
    axis: int

    def placed(self, dtype: Any, place: Any) -> dfloat11.Coded:
        """The parameter.

        Args:
          dtype: the type in which it is used if the source names none.
          place: a `Coded` of shardings; None: the default device.

        Raises:
          ModelError: if the file is too short, or if bfloat16 cannot hold the numbers.
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
    """Boxes of about `PIECE` numbers that cover the wanted ones. Each has whole groups of the inputs (the axis `at`)
    and a few of the outputs (the other one of the last two axes)."""
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
    """Copies the intersection of both boxes from one to the other."""
    shared = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(box, own, strict=True)]
    if all(start < stop for start, stop in shared):
        inside = lambda of: tuple(slice(a - c, b - c) for (a, b), (c, _) in zip(shared, of, strict=True))
        buffer[inside(own)] = made[inside(box)]
