"""Reads the headers of safetensors files: names, types, shapes and the place of each tensor's bytes."""

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np

from specjax.models.errors import ModelError
from specjax.models.json_file import parsed

FLOATS: dict[str, np.dtype] = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
"""Types of weights, by safetensors' names."""
INTEGERS = {"I32": np.dtype(np.int32), "I64": np.dtype(np.int64), "BOOL": np.dtype(bool), "U8": np.dtype(np.uint8)}
"""Further types, found only in draft heads and packed weights."""
OCTETS = {name: np.dtype(np.uint8) for name in ("I8", "F8_E4M3", "F8_E8M0")}
"""Types of packed weights, which only `specjax.models.packed` reads, as bytes."""

INDEX = "model.safetensors.index.json"
"""The file that says which file holds each tensor."""

Read = Callable[[list[tuple[Any, np.ndarray]]], None]
"""A function that fills arrays with boxes of a tensor; see `specjax.models.byte_ranges.fill`."""


@dataclasses.dataclass(frozen=True)
class Tensor:
    """One tensor of a file, not read yet. `specjax.models.byte_ranges` reads parts of it; `array()` maps all of it.

    If the file does not hold its numbers as they are, `read` makes them, and the tensor has no bytes of its own. If it
    is `flat`, its numbers form one row, and the file does not give their shape. If the file has codes and scales that
    can be kept, `packed` reads them: a `specjax.models.packed_matrix.Packed` of `specjax.models.byte_ranges.Source`s.
    """

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    size: int
    read: Read | None = None
    flat: bool = False
    packed: Any = None

    @property
    def kind(self) -> np.dtype:
        """The type of its numbers.

        Raises:
          ModelError: if it is unknown.
        """
        types = FLOATS | INTEGERS
        if self.dtype not in types:
            raise ModelError(f"{self.file}: {self.name} has type {self.dtype}; supported are {', '.join(FLOATS)}")
        return types[self.dtype]

    def array(self) -> np.ndarray:
        """A read-only view of the file.

        Raises:
          ModelError: if the type is unknown.
        """
        kind = self.kind
        raw = np.memmap(self.file, np.uint8, "r", self.offset, (self.size,)) if self.size else np.empty(0, np.uint8)
        return np.asarray(raw).view(kind).reshape(self.shape)

    def rows(self, start: int, stop: int) -> "Tensor":
        """Its rows from `start` up to `stop`, which are contiguous in the file."""
        whole = self.read
        if whole is not None:
            packed = jax.tree.map(lambda part: part.rows(start, stop), self.packed)
            moved = lambda box: ((box[0][0] + start, box[0][1] + start), *box[1:])
            read: Read = lambda wanted: whole([(moved(box), own) for box, own in wanted])
            return dataclasses.replace(self, shape=(stop - start, *self.shape[1:]), read=read, packed=packed)
        row = self.size // self.shape[0]
        shape, offset = (stop - start, *self.shape[1:]), self.offset + start * row
        return dataclasses.replace(self, shape=shape, offset=offset, size=(stop - start) * row)


def zeros(name: str, shape: tuple[int, ...]) -> Tensor:
    """A tensor that no file holds: float32 zeros."""

    def read(wanted: list[tuple[Any, np.ndarray]]) -> None:
        for _, own in wanted:
            own[...] = 0

    return Tensor(name, Path(), "F32", shape, 0, 0, read)


def shaped(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    """A flat tensor as a matrix of this shape; any other tensor as it is."""
    whole = tensor.read
    if not tensor.flat or whole is None or len(shape) != 2 or math.prod(shape) != tensor.shape[0]:
        return tensor

    def read(wanted: list[tuple[Any, np.ndarray]]) -> None:
        for ((first, last), (start, stop)), own in wanted:
            rows = np.empty(((last - first) * shape[1],), tensor.kind)
            whole([(((first * shape[1], last * shape[1]),), rows)])
            own[...] = rows.reshape(-1, shape[1])[:, start:stop]

    return dataclasses.replace(tensor, shape=shape, read=read, flat=False)


def read_header(file: Path) -> dict[str, Tensor]:
    """The tensors of one safetensors file.

    Raises:
      ModelError: if the file is truncated or is not a safetensors file.
    """
    total = file.stat().st_size
    with open(file, "rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if total < 8 or length > total - 8:
            raise ModelError(f"{file} is truncated or is not a safetensors file; fetch it again")
        text = stream.read(length)
    try:
        header = parsed(text)
        header.pop("__metadata__", None)
        tensors = {
            name: Tensor(
                name, file, str(entry["dtype"]), tuple(map(int, entry["shape"])), 8 + length + begin, end - begin
            )
            for name, entry in header.items()
            for begin, end in [map(int, entry["data_offsets"])]
        }
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise ModelError(f"{file} has a malformed safetensors header; fetch it again") from error
    for tensor in tensors.values():
        dtype = (FLOATS | INTEGERS | OCTETS).get(tensor.dtype)
        if tensor.size < 0 or tensor.offset < 8 + length or tensor.offset + tensor.size > total:
            raise ModelError(f"{file} is truncated: {tensor.name} lies outside it; fetch it again")
        sized = dtype is None or tensor.size == math.prod(tensor.shape) * dtype.itemsize
        if not sized or min(tensor.shape, default=0) < 0:
            raise ModelError(f"{file}: {tensor.name} of shape {tensor.shape} does not fill its {tensor.size} bytes")
    _check_order(file, tensors, 8 + length, total)
    return tensors


def _check_order(file: Path, tensors: dict[str, Tensor], start: int, stop: int) -> None:
    """Raises ModelError unless every byte from `start` to `stop` belongs to exactly one tensor, as the format
    requires."""
    before = "the header"
    for tensor in sorted(tensors.values(), key=lambda tensor: (tensor.offset, tensor.size)):
        if tensor.offset != start:
            what = "overlaps" if tensor.offset < start else "leaves a gap after"
            raise ModelError(f"{file}: {tensor.name} {what} {before}; fetch it again")
        start, before = tensor.offset + tensor.size, tensor.name
    if start != stop:
        raise ModelError(f"{file} has {stop - start} bytes after its last tensor; fetch it again")


def unread(folder: Path) -> str:
    """The part of an error message about files of a model in another format; empty if the folder has none."""
    found = sorted(file.name for file in folder.glob("consolidated*.safetensors"))
    if not found:
        return ""
    return f"; it holds {found[0]}, a format that is not read: fetch the folder with safetensors that it was made from"


def _places(index: Path) -> dict[str, str]:
    try:
        return {str(name): str(shard) for name, shard in parsed(index.read_bytes())["weight_map"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{index} is malformed: it needs a weight_map from tensor names to files") from error


def shards_of(index: Path) -> list[str]:
    """The files that an index names.

    Raises:
      ModelError: if it is malformed.
    """
    return sorted(set(_places(index).values()))


def read_folder(folder: Path) -> dict[str, Tensor]:
    """All tensors of `model.safetensors`, or of the shards that `model.safetensors.index.json` names.

    Raises:
      ModelError: if there are no weights, a shard is missing, or a file is malformed.
    """
    single, index = folder / "model.safetensors", folder / INDEX
    if single.is_file():
        return read_header(single)
    if not index.is_file():
        hint = "; convert its .bin weights to safetensors first" if list(folder.glob("*.bin")) else unread(folder)
        raise ModelError(f"{folder} has neither model.safetensors nor {INDEX}{hint}")
    places = _places(index)
    shards = shards_of(index)
    absent = [shard for shard in shards if Path(shard).name != shard or not (folder / shard).is_file()]
    if absent:
        raise ModelError(f"{index} names files that are not in the folder: {', '.join(absent)}; fetch them")
    headers = {shard: read_header(folder / shard) for shard in shards}
    tensors: dict[str, Tensor] = {}
    for header in headers.values():
        tensors |= header
    return tensors | {name: headers[shard][name] for name, shard in places.items() if name in headers[shard]}
