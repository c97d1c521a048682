"""The tensors of a GGUF file in the form of a Hugging Face folder; nothing is read until a box is requested."""

import dataclasses
import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np

from specjax.models import byte_ranges
from specjax.models.errors import ModelError
from specjax.models.gguf.blocks import LAYOUTS, Part
from specjax.models.gguf.header import Header, Stored
from specjax.models.gguf.names import INTERLEAVED, PLUS_ONE, ROPE, hf_name
from specjax.models.packed import base
from specjax.models.packed.base import Reader, Span
from specjax.models.packed_matrix import Packed, Steps
from specjax.models.tensors import Read, Tensor

PIECE = 1 << 16
"""Numbers decoded at a time; decoding takes several times their memory."""
_ROTATED = re.compile(r"\.self_attn\.([qk])_proj\.(weight|bias)$")


def tensors(header: Header, config: dict[str, Any]) -> dict[str, Tensor]:
    """The tensors of the model by their Hugging Face names.

    Args:
      header: of the file.
      config: what `specjax.models.gguf.config` made of it.

    Raises:
      ModelError: on a tensor that does not fit its name.
    """
    kind, layers = config["model_type"], config["num_hidden_layers"]
    drafting = range(layers, layers + config.get("num_nextn_predict_layers", 0))
    found: dict[str, Tensor] = {}
    halves: dict[str, dict[int, Stored]] = {}
    for stored in header.tensors.values():
        name, layer = hf_name(stored.name, kind)
        if stored.name in ROPE or layer in drafting:
            continue
        whole, mark, place = name.partition("#")
        if mark:
            halves.setdefault(whole, {})[int(place)] = stored
        elif kind == "gpt_oss" and name.endswith("experts.down_proj"):
            found[name] = _outputs(name, [stored])
        elif "{}" in name:
            if len(stored.shape) != 3:
                raise ModelError(f"{stored.file}: {stored.name} has the shape {list(stored.shape)}, not one of experts")
            for expert in range(stored.shape[0]):
                found[name.format(expert)] = _matrix(
                    name.format(expert), stored, expert * stored.shape[1], stored.shape[1:]
                )
        else:
            found[name] = _one(name, stored, kind, config)
    for name, parts in halves.items():
        if len(parts) != 2 or parts[0].shape != parts[1].shape:
            raise ModelError(f"{header.file}: {', '.join(part.name for part in parts.values())} do not make up {name}")
        found[name] = _outputs(name, [parts[0], parts[1]])
    return found


def _one(name: str, stored: Stored, kind: str, config: dict[str, Any]) -> Tensor:
    """A tensor that corresponds to one in the file."""
    rotated = _ROTATED.search(name) if kind in INTERLEAVED else None
    width = config["head_dim"] if rotated else 0
    if rotated and stored.shape[0] % width:
        raise ModelError(f"{stored.file}: {stored.name} has {stored.shape[0]} rows, and its heads have {width} each")
    if len(stored.shape) == 1:
        if rotated:
            return _vector(name, stored, lambda numbers: _halved(numbers[:, None], width)[:, 0])
        if kind in PLUS_ONE and name.endswith("norm.weight"):
            return _vector(name, stored, lambda numbers: numbers - np.float32(1))
        return _vector(name, stored, lambda numbers: numbers)
    if len(stored.shape) == 2:
        return _matrix(name, stored, 0, stored.shape, width)
    return Tensor(name, stored.file, stored.kind.name, stored.shape, stored.offset, stored.size)


def _matrix(name: str, stored: Stored, first: int, shape: tuple[int, ...], width: int = 0) -> Tensor:
    """A matrix `[out, in]`.

    Args:
      name: of the result.
      stored: the file's tensor that holds it.
      first: its first row there.
      shape: of the matrix.
      width: the width of heads whose rows are reordered, see `INTERLEAVED`; 0: no reordering.
    """
    if stored.kind.is_plain and not width:
        whole = Tensor(name, stored.file, stored.kind.name, _flat(stored), stored.offset, stored.size)
        return whole.rows(first, first + shape[0])

    def decoder(part: Part | None = None) -> Reader:
        read = _rows(stored, part)

        def decode(rows: Span, columns: Span) -> np.ndarray:
            if not width:
                return read((first + rows[0], first + rows[1]), columns)
            heads = rows[0] // width * width, -(-rows[1] // width) * width
            return _halved(read(heads, columns), width)[rows[0] - heads[0] : rows[1] - heads[0]]

        return decode

    def source(part: Part) -> byte_ranges.Source:
        return base.component(stored.file, (shape[0], shape[1] // part.each), part.kind, decoder(part))

    out, wide = shape
    made = base.weight(
        name.removesuffix(".weight"), stored.file, (out, wide), decoder(), packed=_packed(stored, source)
    )
    return dataclasses.replace(made, name=name)


def _packed(stored: Stored, source: Callable[[Part], byte_ranges.Source]) -> Packed | None:
    """The source of a matrix in packed form, from the source of its parts; None if its numbers have no codes."""
    layout = LAYOUTS.get(stored.kind.name)
    if layout is None:
        return None

    def levels(parts: tuple[Part, ...]) -> Any:
        made = [source(part) for part in parts]
        return Steps(*made) if len(made) > 1 else made[0] if made else None

    return Packed(None, source(layout.values), levels(layout.scale), None, levels(layout.minimum), layout.table)


def _flat(stored: Stored) -> tuple[int, int]:
    """The shape of a tensor as one matrix of all its rows."""
    return math.prod(stored.shape[:-1]), stored.shape[-1]


def _rows(stored: Stored, part: Part | None = None) -> Reader:
    """A function that reads some rows of a tensor, and of these the blocks that contain some columns.

    It returns float32 numbers, or one part of the blocks, whose columns are entries."""
    (rows, columns), kind = _flat(stored), stored.kind
    each, result = (1, np.dtype(np.float32)) if part is None else (part.each, part.kind)
    blocks = Tensor(
        stored.name, stored.file, "U8", (rows, columns // kind.block * kind.bytes), stored.offset, stored.size
    )

    def entries(own: np.ndarray) -> np.ndarray:
        if part is None:
            return kind.numbers(own)
        return part.read(own.reshape(-1, kind.bytes)).reshape(len(own), -1)

    def read(tall: Span, wide: Span) -> np.ndarray:
        start, stop = wide[0] * each // kind.block, -(-wide[1] * each // kind.block)
        before, count = wide[0] - start * kind.block // each, wide[1] - wide[0]
        step = max(1, PIECE // max(1, count * each))
        made = np.empty((tall[1] - tall[0], count), result)
        for row in range(tall[0], tall[1], step):
            few = row, min(row + step, tall[1])
            own = entries(base.part(blocks, few, (start * kind.bytes, stop * kind.bytes)))
            made[few[0] - tall[0] : few[1] - tall[0]] = own[:, before : before + count]
        return made

    return read


def _halved(rows: np.ndarray, width: int) -> np.ndarray:
    """Rows of whole heads, reordered so that the rows of each pair are half a head apart."""
    return rows.reshape(-1, width // 2, 2, rows.shape[-1]).swapaxes(1, 2).reshape(rows.shape)


def _vector(name: str, stored: Stored, change: Callable[[np.ndarray], np.ndarray]) -> Tensor:
    """A vector. It is small, so all of it is read for any part."""
    whole = _rows(dataclasses.replace(stored, shape=(1, *stored.shape)))

    def read(wanted: list[tuple[byte_ranges.Box, np.ndarray]]) -> None:
        numbers = change(whole((0, 1), (0, stored.shape[0]))[0])
        for ((start, stop),), own in wanted:
            own[...] = numbers[start:stop].astype(own.dtype)

    return Tensor(name, stored.file, "F32", stored.shape, 0, 0, read)


def _outputs(name: str, parts: list[Stored]) -> Tensor:
    """A tensor `[X, in, out]` or `[X, out]` whose outputs alternate between those of the file's tensors, `[X, out, in]`
    or `[X, out]`."""
    shape, turns = parts[0].shape, len(parts)
    if len(shape) == 2:
        return Tensor(
            name, parts[0].file, "F32", (shape[0], shape[1] * turns), 0, 0, _by_turns([_rows(one) for one in parts])
        )

    def made(part: Part | None, packed: Packed | None = None) -> Tensor:
        each, readers = 1 if part is None else part.each, [_rows(one, part) for one in parts]
        whole = shape[0], shape[2] // each, shape[1] * turns
        return Tensor(name, parts[0].file, "F32", whole, 0, 0, _turned_by_turns(readers, shape[1]), packed=packed)

    source = lambda part: byte_ranges.Source(made(part), False, part.kind)
    alike = len({one.kind.name for one in parts}) == 1
    return made(None, _packed(parts[0], source) if alike else None)


def _by_turns(readers: list[Reader]) -> Read:
    """A function that fills boxes `[X, out]`."""

    def read(wanted: list[tuple[byte_ranges.Box, np.ndarray]]) -> None:
        for (experts, (start, stop)), own in wanted:
            for turn, reader in enumerate(readers):
                rows = _every(start, stop, len(readers), turn)
                own[:, rows[0] * len(readers) + turn - start :: len(readers)] = reader(experts, rows).astype(own.dtype)

    return read


def _turned_by_turns(readers: list[Reader], outputs: int) -> Read:
    """A function that fills boxes `[X, in, out]` from matrices `[X outputs, in]`."""
    turns = len(readers)

    def read(wanted: list[tuple[byte_ranges.Box, np.ndarray]]) -> None:
        for ((first, last), inputs, (start, stop)), own in wanted:
            step = max(1, base.PIECE // (inputs[1] - inputs[0])) * turns
            for expert in range(first, last):
                for at in range(start, stop, step):
                    for turn, reader in enumerate(readers):
                        rows = _every(at, min(at + step, stop), turns, turn)
                        numbers = reader((expert * outputs + rows[0], expert * outputs + rows[1]), inputs)
                        begin = rows[0] * turns + turn - start
                        place = own[expert - first, :, begin : begin + (rows[1] - rows[0]) * turns : turns]
                        place[...] = numbers.T.astype(own.dtype)

    return read


def _every(start: int, stop: int, turns: int, turn: int) -> Span:
    """The range of one alternating tensor's outputs within a range of all outputs.

    >>> _every(3, 8, 2, 0), _every(3, 8, 2, 1)
    ((2, 4), (1, 4))
    """
    return -(-(start - turn) // turns), -(-(stop - turn) // turns)
