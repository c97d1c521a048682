"""Parameters from byte ranges of safetensors files: a host reads only what its devices own, and reads it once.

A range is read a piece at a time, converted, and written straight into the memory of its array. So a host holds its own
shards and a few pieces. Where devices have their own memory, it also holds the few arrays in transit.
"""

import concurrent.futures
import dataclasses
import io
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from specjax.models.errors import ModelError
from specjax.models.tensors import Tensor

PIECE = 1 << 20
"""Bytes read at a time; the rows of a matrix that is transposed should stay in a core's cache."""
READERS = 4
"""Parameters read at a time."""

Box = tuple[tuple[int, int], ...]
"""The first index, and one past the last, of every dimension."""


@dataclasses.dataclass(frozen=True)
class Source:
    """The place of a stored parameter.

    Attributes:
      tensor: the whole tensor.
      transposed: whether the file has its last two dimensions in the opposite order.
      dtype: its type as a parameter; None: as the reader says.
    """

    tensor: Tensor
    transposed: bool
    dtype: Any = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The parameter's."""
        return stored_shape(self.tensor.shape, self.transposed)

    def placed(self, dtype: Any, place: jax.sharding.Sharding | None) -> jax.Array:
        """The parameter; see `place_one`."""
        return place_one(self, dtype, place)

    def rows(self, start: int, stop: int) -> "Source":
        """The source with only some rows of its tensor."""
        return dataclasses.replace(self, tensor=self.tensor.rows(start, stop))

    def fill(self, wanted: Sequence[tuple[Box, np.ndarray]]) -> None:
        """Reads boxes of the parameter into arrays of their shapes.

        Raises:
          ModelError: if the file is too short.
        """
        turn = lambda x: x.swapaxes(-1, -2) if self.transposed else x
        fill(self.tensor, [(stored_shape(box, self.transposed), turn(own)) for box, own in wanted])


@dataclasses.dataclass(frozen=True)
class Stack:
    """The place of a parameter that the file stores as one tensor per index of its first axis.

    Attributes:
      parts: the source for each index; all have the same shape.
      dtype: see `Source`.
    """

    parts: tuple[Source, ...]
    dtype: Any = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The parameter's."""
        return (len(self.parts), *self.parts[0].shape)

    def placed(self, dtype: Any, place: jax.sharding.Sharding | None) -> jax.Array:
        """The parameter; see `place_one`."""
        return place_one(self, dtype, place)

    def fill(self, wanted: Sequence[tuple[Box, np.ndarray]]) -> None:
        """See `Source.fill`."""
        for i, part in enumerate(self.parts):
            inside = [(box, own) for box, own in wanted if box[0][0] <= i < box[0][1]]
            part.fill([(box[1:], own[i - box[0][0]]) for box, own in inside])


def stored_shape(shape: tuple[Any, ...], transposed: bool) -> tuple[Any, ...]:
    """Converts a shape or a `Box` of a parameter to that in the file, and back."""
    return (*shape[:-2], shape[-1], shape[-2]) if transposed else shape


def read(sources: Any, dtype: Any, places: Any = None, advance: Callable[[int], None] = lambda parameters: None) -> Any:
    """Arrays from their sources.

    Args:
      sources: a pytree of `Source`s and `Stack`s, or of other sources with `placed`, which may make several arrays from
        one parameter.
      dtype: the type of arrays whose source names none.
      places: a pytree of shardings like `sources`; None: the default device.
      advance: called with the number of parameters read since the last call.

    Raises:
      ModelError: if a file is too short.
    """
    leaves, tree = jax.tree.flatten(sources)
    where = [None] * len(leaves) if places is None else tree.flatten_up_to(places)
    arrays, (default,) = [], jax.device_put(0).devices()

    def read_one(source: Any, place: Any) -> Any:
        with jax.default_device(default):  # a thread does not inherit what its caller set by a context manager
            return source.placed(dtype, place)

    with concurrent.futures.ThreadPoolExecutor(READERS) as pool:
        for array in pool.map(read_one, leaves, where):
            arrays.append(array)
            advance(1)
    return jax.tree.unflatten(tree, arrays)


def place_one(source: Source | Stack, dtype: Any, place: jax.sharding.Sharding | None) -> jax.Array:
    """One array, returned once it is on its devices. A slice that several devices hold is read from the file once."""
    room = Room(source.shape, dtype if source.dtype is None else source.dtype, place)
    source.fill(list(room.buffers.items()))
    return room.array()


class Room:
    """Host memory for the slices of an array that this host's devices hold, and the array made from it.

    Attributes:
      buffers: one for each slice; the caller fills them.
    """

    def __init__(self, shape: tuple[int, ...], dtype: Any, place: jax.sharding.Sharding | None):
        """`place`: None is the default device."""
        self.shape, self.place = shape, place
        self._owners: dict[Box, list[Any]] = {}
        indices = {None: ()} if place is None else place.addressable_devices_indices_map(shape)
        for device, index in indices.items():
            box = _box(index or (slice(None),) * len(shape), shape)
            self._owners.setdefault(box, []).append(device)
        kind = np.dtype(dtype)
        self.buffers = {box: _aligned(tuple(stop - start for start, stop in box), kind) for box in self._owners}

    def array(self) -> jax.Array:
        """The array, returned once it is on its devices."""
        own = [jax.device_put(self.buffers[box], device) for box, devices in self._owners.items() for device in devices]
        jax.block_until_ready(own)
        return own[0] if self.place is None else jax.make_array_from_single_device_arrays(self.shape, self.place, own)


def fill(tensor: Tensor, wanted: Sequence[tuple[Box, np.ndarray]]) -> None:
    """Reads boxes of a tensor, indexed as stored, into arrays of their shapes, in the arrays' type.

    Boxes of the same rows are read together.

    Raises:
      ModelError: if the file is too short.
    """
    if tensor.read is not None:
        tensor.read(list(wanted))
        return
    flat = max(0, 2 - len(tensor.shape))  # a vector is a matrix of one row
    shape = (1,) * flat + tensor.shape
    groups: dict[Box, list[tuple[tuple[int, int], np.ndarray]]] = {}
    for box, own in wanted:
        *rows, columns = ((0, 1),) * flat + box
        groups.setdefault(tuple(rows), []).append((columns, own[(None,) * flat]))
    with open(tensor.file, "rb", buffering=0) as stream:
        for rows, parts in groups.items():
            for start, stop in _joined([columns for columns, own in parts if own.size]):
                inside = [(a - start, b - start, own) for (a, b), own in parts if start <= a and b <= stop]
                _fill_columns(stream, tensor, shape, rows, (start, stop), inside)


def _fill_columns(stream, tensor, shape, rows, columns, parts) -> None:
    """Fills arrays with columns; `parts` says which columns go into which array."""
    kind, (*lead, (first, last)) = tensor.kind, rows
    start, width = columns[0], columns[1] - columns[0]
    step = max(1, PIECE // (width * kind.itemsize))
    room = np.empty((min(step, last - first), width), kind)
    for outer in itertools.product(*(range(*span) for span in lead)):
        within = tuple(i - span[0] for i, span in zip(outer, lead, strict=True))
        above = sum(i * math.prod(shape[n + 1 :]) for n, i in enumerate(outer))
        for row in range(first, last, step):
            piece = room[: min(step, last - row)]
            begin = above + row * shape[-1] + start
            if width == shape[-1]:
                _read_exactly(stream, tensor, begin, piece)
            else:
                for i, one in enumerate(piece):
                    _read_exactly(stream, tensor, begin + i * shape[-1], one)
            at = slice(row - first, row - first + len(piece))
            for a, b, own in parts:
                _copy(piece[:, a:b], own[within][at])


def equal(a: Tensor, b: Tensor, share: tuple[int, int] = (0, 1)) -> bool:
    """Whether two tensors hold the same numbers, read a piece at a time.

    Args:
      a: one tensor.
      b: the other.
      share: for (i, n), every nth piece beginning with the ith is compared.
    """
    if a.shape != b.shape:
        return False
    if a.read is not None or b.read is not None:
        return _equal_rows(a, b, share)
    count, (first, of) = math.prod(a.shape), share
    step = PIECE // 8
    with open(a.file, "rb", buffering=0) as one, open(b.file, "rb", buffering=0) as other:
        for begin in range(first * step, count, of * step):
            size = min(step, count - begin)
            ours, theirs = np.empty(size, a.kind), np.empty(size, b.kind)
            _read_exactly(one, a, begin, ours)
            _read_exactly(other, b, begin, theirs)
            if not np.array_equal(ours, theirs):
                return False
    return True


def _equal_rows(a: Tensor, b: Tensor, share: tuple[int, int]) -> bool:
    """`equal` for matrices of which at least one is not stored as plain bytes of a file."""
    (rows, columns), (first, of) = a.shape, share
    step = max(1, PIECE // 4 // columns)
    for begin in range(first * step, rows, of * step):
        box = (begin, min(begin + step, rows)), (0, columns)
        ours, theirs = (np.empty((box[0][1] - begin, columns), np.float32) for _ in range(2))
        fill(a, [(box, ours)])
        fill(b, [(box, theirs)])
        if not np.array_equal(ours, theirs):
            return False
    return True


def _read_exactly(stream: io.RawIOBase, tensor: Tensor, element: int, into: np.ndarray) -> None:
    """Fills a contiguous array with what follows an element of the tensor."""
    stream.seek(tensor.offset + element * tensor.kind.itemsize)
    left = into.reshape(-1).view(np.uint8).data
    while left:
        count = stream.readinto(left)
        if not count:
            raise ModelError(f"{tensor.file} is truncated: {tensor.name} lies outside it; fetch it again")
        left = left[count:]


def _copy(numbers: np.ndarray, into: np.ndarray) -> None:
    if numbers.dtype == into.dtype:  # numpy copies its own types faster than those of ml_dtypes, and without its lock
        bits = np.dtype(f"u{numbers.dtype.itemsize}")
        into.view(bits)[...] = numbers.view(bits)
    else:
        into[...] = numbers.astype(into.dtype)


def _aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """An array that XLA uses on a CPU without a copy: it begins at a multiple of 64 bytes."""
    size = math.prod(shape) * dtype.itemsize
    room = np.empty(size + 64, np.uint8)
    start = -room.ctypes.data % 64
    return room[start : start + size].view(dtype).reshape(shape)


def _box(index: tuple[slice, ...], shape: tuple[int, ...]) -> Box:
    return tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))


def _joined(spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The spans in order; adjacent spans are joined.

    >>> _joined([(4, 6), (0, 2), (2, 4), (8, 9)])
    [(0, 6), (8, 9)]
    """
    joined: list[tuple[int, int]] = []
    for a, b in sorted(spans):
        if joined and a <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(b, joined[-1][1]))
        else:
            joined.append((a, b))
    return joined
