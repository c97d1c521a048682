"""The header of a GGUF file: its metadata and the places of its tensors. It is checked before it is used."""

import dataclasses
import math
import mmap
import re
import struct
from pathlib import Path
from typing import Any

from specjax.models.errors import ModelError
from specjax.models.fields import shown
from specjax.models.gguf.types import TYPES, BlockType

VERSIONS = (2, 3)
"""The supported versions, which do not differ for a reader."""
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_SHARD = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")


@dataclasses.dataclass(frozen=True)
class Stored:
    """One tensor of a file.

    Attributes:
      name: its name in the file.
      file: the file that holds it.
      kind: how its numbers are stored.
      shape: in numpy's order; blocks run along the last axis.
      offset: of its first byte in the file.
    """

    name: str
    file: Path
    kind: BlockType
    shape: tuple[int, ...]
    offset: int

    @property
    def size(self) -> int:
        """Its size in bytes."""
        return math.prod(self.shape) // self.kind.block * self.kind.bytes


@dataclasses.dataclass(frozen=True)
class Header:
    """The header of a file, or of all shards of one.

    Attributes:
      file: the file, or the first shard.
      metadata: by key; floats are the file's float32 values.
      tensors: by name.
    """

    file: Path
    metadata: dict[str, Any]
    tensors: dict[str, Stored]

    @property
    def architecture(self) -> str:
        """`general.architecture`."""
        return self.metadata["general.architecture"]


def read(file: Path) -> Header:
    """The header of a file. For a model in shards, any shard may be given, and all are read.

    Raises:
      ModelError: if it is not a GGUF file, damaged or truncated; if a shard is missing; or if its version or the type
        of a tensor is not supported.
    """
    metadata, tensors = _read_one(_first(file))
    first, count = _first(file), metadata.get("split.count", 1)
    if not isinstance(count, int) or count < 1:
        raise ModelError(f"{first}: split.count must be a number of files, not {shown(count)}")
    if count > 1:
        found = _SHARD.fullmatch(first.name)
        if found is None or int(found[3]) != count:
            raise ModelError(f"{first} is one of {count} files, and its name must end in -00001-of-{count:05d}.gguf")
        for i in range(2, count + 1):
            shard = first.with_name(f"{found[1]}-{i:05d}-of-{count:05d}.gguf")
            if not shard.is_file():
                raise ModelError(f"{first} is one of {count} files, and {shard.name} is not beside it; fetch it")
            own = _read_one(shard)[1]
            if twice := sorted(own.keys() & tensors.keys()):
                raise ModelError(f"{shard} holds {twice[0]}, which another of its {count} files has too")
            tensors |= own
        if (total := metadata.get("split.tensors.count", len(tensors))) != len(tensors):
            raise ModelError(f"{first}: its {count} files hold {len(tensors)} tensors, and it says {shown(total)}")
    if not isinstance(metadata.get("general.architecture"), str):
        raise ModelError(f"{first} does not name an architecture (general.architecture): it holds no language model")
    return Header(first, metadata, tensors)


def _first(file: Path) -> Path:
    """The shard with the metadata; for an unsplit file, the file itself."""
    found = _SHARD.fullmatch(file.name)
    if found is None:
        return file
    first = file.with_name(f"{found[1]}-00001-of-{found[3]}.gguf")
    if not first.is_file():
        raise ModelError(f"{file} is one of several files, and {first.name} is not beside it; fetch it")
    return first


def _read_one(file: Path) -> tuple[dict[str, Any], dict[str, Stored]]:
    try:
        with open(file, "rb") as stream:
            start = stream.read(8)
            _check_start(file, start)
            with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _walked(file, _Cursor(file, data))
    except OSError as error:
        raise ModelError(f"{file}: {error.strerror or error}") from error


def _check_start(file: Path, start: bytes) -> None:
    if start[:4] != b"GGUF":
        raise ModelError(f"{file} is not a GGUF file: it does not begin with the letters GGUF")
    if len(start) < 8:
        raise ModelError(f"{file} is truncated; fetch it again")
    version = int.from_bytes(start[4:], "little")
    if version in VERSIONS:
        return
    if int.from_bytes(start[4:], "big") in VERSIONS:
        raise ModelError(f"{file} is a big-endian GGUF file, which is not read")
    known = " and ".join(map(str, VERSIONS))
    raise ModelError(f"{file} has version {version} of GGUF; {known} are read: convert it again, or update specjax")


class _Cursor:
    """A reader of a file that checks against the file's end."""

    def __init__(self, file: Path, data: mmap.mmap):
        self.file, self.data, self.at, self.end = file, data, 8, len(data)

    def check(self, size: int, what: str) -> None:
        """Raises ModelError if the file ends before `size` more bytes."""
        if size > self.end - self.at:
            raise ModelError(
                f"{self.file} is truncated, or damaged: {what} does not fit into its {self.end} bytes; fetch it again"
            )

    def number(self, code: str, what: str) -> Any:
        """Reads a number."""
        size = struct.calcsize("<" + code)
        self.check(size, what)
        (value,) = struct.unpack_from("<" + code, self.data, self.at)
        self.at += size
        return value

    def text(self, what: str) -> str:
        """Reads a string."""
        length = self.number("Q", what)
        self.check(length, what)
        self.at += length
        return self.data[self.at - length : self.at].decode("utf-8", "replace")

    def value(self, kind: int, key: str) -> Any:
        """Reads a metadata value of a type."""
        if kind == _STRING:
            return self.text(key)
        if kind == _ARRAY:
            return self.array(key)
        if kind not in _SCALARS:
            raise ModelError(
                f"{self.file}: {key} has the unknown type {kind}; the file is damaged, or newer than specjax"
            )
        return self.number(_SCALARS[kind], key)

    def array(self, key: str) -> list[Any]:
        """Reads an array of numbers or strings."""
        kind, count = self.number("I", key), self.number("Q", key)
        if kind == _STRING:
            self.check(8 * count, key)
            return self.texts(count, key)
        if kind not in _SCALARS:
            raise ModelError(f"{self.file}: {key} is an array of the type {kind}, which is not read")
        size = struct.calcsize("<" + _SCALARS[kind])
        self.check(size * count, key)
        self.at += size * count
        return list(struct.unpack_from(f"<{count}{_SCALARS[kind]}", self.data, self.at - size * count))

    def texts(self, count: int, key: str) -> list[str]:
        """Reads `count` strings; a vocabulary has hundreds of thousands."""
        found, at, data, end = [], self.at, self.data, self.end
        for _ in range(count):
            start = at + 8
            at = start + int.from_bytes(data[at:start], "little")
            if at > end:
                self.check(at, key)
            found.append(data[start:at].decode("utf-8", "replace"))
        self.at = at
        return found


def _walked(file: Path, cursor: _Cursor) -> tuple[dict[str, Any], dict[str, Stored]]:
    counts = cursor.number("Q", "the number of tensors"), cursor.number("Q", "the number of keys")
    cursor.check(24 * counts[0] + 13 * counts[1], f"a header of {counts[0]} tensors and {counts[1]} keys")
    metadata: dict[str, Any] = {}
    for _ in range(counts[1]):
        key = cursor.text("a key")
        if key in metadata:
            raise ModelError(f"{file} is damaged: the key {key!r} comes twice")
        metadata[key] = cursor.value(cursor.number("I", key), key)
    tensors: dict[str, Stored] = {}
    for _ in range(counts[0]):
        tensor = _tensor(file, cursor)
        if tensor.name in tensors:
            raise ModelError(f"{file} is damaged: the tensor {tensor.name!r} comes twice")
        tensors[tensor.name] = tensor
    align = metadata.get("general.alignment", 32)
    if not isinstance(align, int) or isinstance(align, bool) or align < 1 or align & (align - 1):
        raise ModelError(f"{file}: general.alignment must be a power of two, not {shown(align)}")
    return metadata, _placed(file, tensors, -(-cursor.at // align) * align, align, cursor.end)


def _tensor(file: Path, cursor: _Cursor) -> Stored:
    """Reads the description of one tensor. Its offset counts from the start of the data, after the header."""
    name = cursor.text("a tensor's name")
    count = cursor.number("I", name)
    if not 1 <= count <= 4:
        raise ModelError(f"{file} is damaged: the tensor {shown(name)} has {count} dimensions")
    sizes = [cursor.number("Q", name) for _ in range(count)]
    kind, offset = cursor.number("I", name), cursor.number("Q", name)
    if kind not in TYPES:
        raise ModelError(f"{file}: the tensor {shown(name)} has the type {kind}, which is not read")
    if 0 in sizes or math.prod(sizes) >= 1 << 63 or sizes[0] % TYPES[kind].block:
        raise ModelError(f"{file} is damaged: the tensor {shown(name)} of {TYPES[kind].name} has the sizes {sizes}")
    return Stored(name, file, TYPES[kind], tuple(reversed(sizes)), offset)


def _placed(file: Path, tensors: dict[str, Stored], start: int, align: int, end: int) -> dict[str, Stored]:
    """Tensors with their offsets in the file, each after the previous one."""
    at = 0
    for name, tensor in tensors.items():
        if tensor.offset != at:
            raise ModelError(f"{file} is damaged: the tensor {name!r} lies at {tensor.offset}, not at {at}")
        if start + at + tensor.size > end:
            raise ModelError(f"{file} is truncated: {name} lies outside its {end} bytes; fetch it again")
        at += -(-tensor.size // align) * align
    return {name: dataclasses.replace(tensor, offset=start + tensor.offset) for name, tensor in tensors.items()}
