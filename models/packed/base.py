"""The common parts of the formats of packed weights.

A linear layer's weight `[out, in]` is stored as several tensors: codes of few bits, and scales, often with zero points,
that groups of codes share. Here it becomes one `Tensor` whose `read` decodes the numbers of a box, a piece at a time,
into their array. So a host decodes only what its devices need, and holds only a few more pieces. Numbers are computed
in float32, `(code - zero) * scale`, and rounded once to the type of the parameters.
"""

import dataclasses
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from specjax.models import byte_ranges
from specjax.models.errors import ModelError
from specjax.models.fields import shown
from specjax.models.packed import bits as words
from specjax.models.packed_matrix import Packed
from specjax.models.tensors import FLOATS, Tensor

PIECE = 1 << 20
"""Numbers decoded at a time."""
SCALES = tuple(FLOATS)
"""Types of scales, by safetensors' names."""
_KINDS = {"I8": np.int8, "F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E8M0": ml_dtypes.float8_e8m0fnu}

Span = tuple[int, int]
"""The first index, and one past the last."""
Parts = dict[str, Tensor]
"""The tensors of a module by the last part of their names."""
Wanted = dict[str, tuple[tuple[str, ...], tuple[int, ...]]]
"""Types and shape of tensors by the last part of their names."""
Unpack = Callable[[str, Parts], Parts]
"""Maps a module's name and all of its tensors to the tensors that a plain file has for it."""
Reader = Callable[[Span, Span], np.ndarray]
"""A function that reads some rows and columns of a matrix."""
Index = Callable[[Span], np.ndarray]
"""A function from rows, or columns, to the index of each one's scale."""


def last_part(name: str) -> tuple[str, str]:
    """The module of a tensor, and the last part of the tensor's name."""
    module, _, part = name.rpartition(".")
    return module, part


@dataclasses.dataclass(frozen=True)
class Format:
    """One `quant_method`.

    Attributes:
      read: makes the function that unpacks modules, from a `quantization_config`.
      reads: the supported settings, for people.
      refuses: the unsupported settings.
      split: splits a tensor's name into its module and its name there.
    """

    read: Callable[[dict[str, Any]], Unpack]
    reads: str
    refuses: str
    split: Callable[[str], tuple[str, str]] = last_part


def weight(
    module: str, file: Path, shape: tuple[int, int], decode: Reader, axis: int = 0, packed: Packed | None = None
) -> Tensor:
    """A module's weight `[out, in]`.

    Args:
      module: its name.
      file: the file with its parts.
      shape: of the weight.
      decode: makes the float32 numbers of a box.
      axis: the axis of the weight along which the file's rows are listed.
      packed: reads its codes and scales unchanged, if they can be kept.
    """

    def read(wanted: list[tuple[byte_ranges.Box, np.ndarray]]) -> None:
        boxes: dict[byte_ranges.Box, list[np.ndarray]] = {}
        for box, own in wanted:
            if own.size:
                boxes.setdefault(box, []).append(own)
        for box, owns in boxes.items():  # a box that several devices hold is decoded once
            for piece in _pieces(box, axis):
                numbers = decode(*piece)
                at = tuple(slice(a - first, b - first) for (a, b), (first, _) in zip(piece, box, strict=True))
                for own in owns:
                    own[at] = numbers.astype(own.dtype)

    return Tensor(f"{module}.weight", file, "F32", shape, 0, 0, read, packed=packed)


def component(file: Path, shape: tuple[int, int], kind: Any, decode: Reader, axis: int = 0) -> byte_ranges.Source:
    """A part of a `Packed`, `[out, in]` or `[out, groups]`, in its own type; see `weight`."""
    return byte_ranges.Source(weight("a part of a weight", file, shape, decode, axis), False, np.dtype(kind))


@dataclasses.dataclass(frozen=True)
class Scaled:
    """A module's weight `[out, in]` as codes with shared scales: `(code - zero) * scale`.

    Attributes:
      module: its name.
      file: the file with its parts.
      shape: of the weight.
      codes: reads the stored codes.
      scales: reads the scales.
      zeros: reads the zero points, which are arranged like the scales; or one number for all.
      rows: how many rows of the weight share a scale.
      columns: how many columns share a scale; or a function from columns of the weight to columns of scales.
      kinds: the types in which codes and scales are kept.
      shift: the amount that stored codes and zero points are too large by.
      axis: see `weight`.
    """

    module: str
    file: Path
    shape: tuple[int, int]
    codes: Reader
    scales: Reader
    zeros: Reader | float
    rows: int
    columns: int | Index
    kinds: tuple[Any, Any]
    shift: int = 0
    axis: int = 0

    def tensor(self) -> Tensor:
        """The weight, plain or packed."""
        columns = every(self.columns) if isinstance(self.columns, int) else self.columns
        decode = affine(self.codes, self.scales, self.zeros, every(self.rows), columns)
        return weight(self.module, self.file, self.shape, decode, self.axis, self._packed())

    def _packed(self) -> Packed | None:
        (out, wide), width = self.shape, self.columns
        if not isinstance(width, int) or wide % width:
            return None
        part = lambda columns, kind, reader: component(self.file, (out, columns), kind, reader, self.axis)
        less = lambda reader: lambda rows, columns: reader(rows, columns).astype(np.int16) - self.shift
        spread = lambda reader: (
            lambda rows, columns: _spread(reader, np.arange(*rows) // self.rows, np.arange(*columns))
        )
        codes, scales = self.kinds
        return Packed(
            None,
            part(wide, codes, less(self.codes) if self.shift else self.codes),
            part(wide // width, scales, spread(self.scales)),
            None if isinstance(self.zeros, float) else part(wide // width, codes, less(spread(self.zeros))),
        )


def integers(bits: int) -> Any:
    """The signed type in which integers of this many bits are kept."""
    return np.dtype(ml_dtypes.int4 if bits <= 4 else np.int8)


def kind_of(tensor: Tensor) -> Any:
    """The type of a tensor's numbers, also for types of packed weights."""
    return np.dtype(_KINDS.get(tensor.dtype) or tensor.kind)


def _pieces(box: byte_ranges.Box, axis: int) -> Iterator[tuple[Span, Span]]:
    """Parts of a box `[out, in]` with about `PIECE` numbers, cut at multiples of 32 numbers, which fill whole words."""
    (first, last), (start, stop) = box[axis], box[1 - axis]
    step = max(32, PIECE // (stop - start) // 32 * 32)
    edges = [first, *range(first // step * step + step, last, step), last]
    for a, b in zip(edges, edges[1:], strict=False):
        yield ((a, b), (start, stop)) if axis == 0 else ((start, stop), (a, b))


def affine(codes: Reader, scales: Reader, zeros: Reader | float, rows: Index, columns: Index) -> Reader:
    """A function that decodes boxes: `(code - zero) * scale`.

    Args:
      codes: reads the weight's codes `[out, in]`.
      scales: reads the scales.
      zeros: reads the zero points, which are arranged like the scales; or one number for all.
      rows: maps rows of the weight to rows of scales.
      columns: maps columns of the weight to columns of scales.
    """

    def decode(tall: Span, wide: Span) -> np.ndarray:
        at = rows(tall), columns(wide)
        numbers = codes(tall, wide).astype(np.float32)
        numbers -= zeros if isinstance(zeros, float) else _spread(zeros, *at)
        numbers *= _spread(scales, *at)
        return numbers

    return decode


def _spread(reader: Reader, rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """A matrix's numbers at some rows and columns, in float32; only the range that contains them is read."""
    tall, wide = ((int(at.min()), int(at.max()) + 1) for at in (rows, columns))
    return reader(tall, wide).astype(np.float32)[rows - tall[0]][:, columns - wide[0]]


def every(width: int) -> Index:
    """The index function if `width` neighbours share a scale."""
    return lambda span: np.arange(*span) // width


def by_index(tensor: Tensor, groups: int) -> Index:
    """The index function if a tensor `[in]` says to which group each column belongs.

    Raises:
      ModelError: (when it is read) if there is no such group.
    """

    def index(span: Span) -> np.ndarray:
        found = part(tensor, span)
        if found.min() < 0 or found.max() >= groups:
            raise ModelError(f"{tensor.name} names groups from {found.min()} to {found.max()}, and there are {groups}")
        return found

    return index


def in_order(tensor: Tensor, groups: int, width: int) -> int | Index:
    """`by_index`, or `width` if the tensor says that `width` neighbours share a scale."""
    (wide,) = tensor.shape
    own = part(tensor, (0, wide))
    return width if np.array_equal(own, np.arange(wide) // width) else by_index(tensor, groups)


def part(tensor: Tensor, *box: Span) -> np.ndarray:
    """A reader of boxes of a tensor, in its own type."""
    kind = _KINDS.get(tensor.dtype)
    plain = tensor if kind is None else dataclasses.replace(tensor, dtype="U8")
    own = np.empty([b - a for a, b in box], plain.kind)
    byte_ranges.fill(plain, [(box, own)])
    return own if kind is None else own.view(kind)


def plain(tensor: Tensor) -> Reader:
    """A reader of a matrix that is stored unpacked."""
    return lambda rows, columns: part(tensor, rows, columns)


def fields(tensor: Tensor, width: int, axis: int, order: tuple[int, ...] = (0,)) -> Reader:
    """A reader of a matrix of unsigned numbers of few bits in 32-bit words.

    Args:
      tensor: the words.
      width: bits of a number.
      axis: the axis along which words are listed.
      order: see `specjax.models.packed.bits.unpacked`.
    """

    def read(*box: Span) -> np.ndarray:
        (first, last), spans = box[axis], list(box)
        spans[axis], before = words.span(first, last, width, tensor.shape[axis])
        numbers = words.unpacked(part(tensor, *spans).swapaxes(axis, 1), width, order)
        return numbers[:, before : before + last - first].swapaxes(axis, 1)

    return read


def turned(reader: Reader) -> Reader:
    """A reader of the transpose."""
    return lambda rows, columns: reader(columns, rows).T


def replaced(module: str, parts: Parts, used: tuple[str, ...], made: Tensor) -> Parts:
    """A module's tensors with the weight in place of its parts.

    Raises:
      ModelError: if the module has a plain weight too.
    """
    rest = {name: tensor for name, tensor in parts.items() if name not in used}
    if "weight" in rest:
        raise ModelError(f"{module} has a plain weight beside {', '.join(name for name in used if name in parts)}")
    return rest | {"weight": made}


def check(module: str, parts: Parts, wanted: Wanted, said: str) -> None:
    """Checks that a module's tensors are present and as its config says.

    Args:
      module: its name.
      parts: its tensors.
      wanted: the types and shapes of the required tensors.
      said: the fields from which the shapes follow.

    Raises:
      ModelError: naming every tensor that is not.
    """
    problems = []
    for name, (kinds, shape) in wanted.items():
        right = f"{' or '.join(kinds)} {list(shape)}"
        own = parts.get(name)
        if own is None:
            problems.append(f"missing {module}.{name} {right}")
        elif own.dtype not in kinds or own.shape != shape:
            problems.append(f"{module}.{name} is {own.dtype} {list(own.shape)}, not {right}")
    if problems:
        raise ModelError(f"the weights do not fit config.json ({said}): {'; '.join(problems)}")


def matrix(module: str, parts: Parts, name: str, kinds: tuple[str, ...]) -> tuple[int, int]:
    """The shape of a module's tensor, which must be a matrix.

    Raises:
      ModelError: if it is missing, or of another type.
    """
    own = parts.get(name)
    if own is None:
        raise ModelError(f"the weights do not fit config.json: missing {module}.{name}")
    if len(own.shape) != 2 or own.dtype not in kinds or not all(own.shape):
        raise ModelError(f"{module}.{name} is {own.dtype} {list(own.shape)}, not a matrix in {' or '.join(kinds)}")
    return own.shape[0], own.shape[1]


def check_left_out(module: str, left_out: bool, field: str) -> None:
    """Raises ModelError if a module is packed although its config excludes it."""
    if left_out:
        raise ModelError(f"{module} is packed, but {field} of quantization_config leaves it out")


def not_converted(config: dict[str, Any], field: str = "modules_to_not_convert") -> Callable[[str], bool]:
    """A function that says whether a module is excluded, by transformers' rules.

    Names match from the start up to a dot, as regular expressions or plainly, or at the end.

    Raises:
      ModelError: if the field is not a list of names.
    """
    names = strings(config, field)
    try:
        starts = [re.compile(rf"(?:{name})(?:(?<=\.)|(?=\.|$))") for name in names]
    except re.error as error:
        raise ModelError(f"config.json: quantization_config has {field} {shown(names)}: {error}") from error
    return lambda module: module.endswith(tuple(names)) or any(start.match(module) for start in starts)


def strings(config: dict[str, Any], field: str) -> list[str]:
    """A list of strings; empty if the field is absent.

    Raises:
      ModelError: on anything else.
    """
    found = config.get(field) or []
    if not isinstance(found, list) or not all(isinstance(name, str) for name in found):
        raise ModelError(f"config.json: quantization_config: {field} must be a list of names, not {shown(found)}")
    return found


def check_is(config: dict[str, Any], method: str, **allowed: tuple[Any, ...]) -> None:
    """Raises ModelError if a field of a `quantization_config` has an unsupported value; the first value is the
    default."""
    for name, values in allowed.items():
        value = config.get(name, values[0])
        if not any(value is one or (type(value) is type(one) and value == one) for one in values):
            read = ", ".join(repr(one) for one in values)
            raise ModelError(
                f"config.json: {method} weights with {name} {shown(value)} are not read; {name} may be {read}"
            )


def check_off(config: dict[str, Any], method: str, *names: str) -> None:
    """Raises ModelError if one of these fields is set."""
    for name in names:
        if config.get(name) not in (None, False, [], {}, ""):
            raise ModelError(f"config.json: {method} weights with {name} {shown(config[name])} are not read")


def group_of(config: dict[str, Any], method: str) -> int | None:
    """`group_size`; None for one group.

    Raises:
      ModelError: if it is not a number of columns.
    """
    size = config.get("group_size", 128)
    if isinstance(size, bool) or not isinstance(size, int) or not (size > 0 or size == -1):
        raise ModelError(f"config.json: {method} weights with group_size {shown(size)} are not read")
    return None if size == -1 else size
