"""bitsandbytes' four bits (nf4 of QLoRA, Dettmers et al. 2023, arXiv:2305.14314, and fp4), as saved by it or
transformers.

Numbers are in row order over the whole weight `[out, in]`. Two codes share a byte of `weight`, the first in its high
half. A code is an index into `weight.quant_map` `[16]`, and every `blocksize` numbers share a scale of `weight.absmax`.

If scales are coded too, `weight.absmax` holds bytes, indices into `weight.nested_quant_map` `[256]`. Every
`nested_blocksize` of them share a scale of `weight.nested_absmax`, and `nested_offset` is added.
`weight.quant_state.bitsandbytes__nf4` holds sizes as JSON.
"""

import dataclasses
import json
import re
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from specjax.models.errors import ModelError
from specjax.models.fields import is_size, shown
from specjax.models.packed import base
from specjax.models.packed.base import Format, Parts, Reader, Span, Unpack
from specjax.models.packed_matrix import Packed
from specjax.models.tensors import Tensor

_NAME = re.compile(r"(?:(.*)\.)?(weight(?:\.\w+)*)")
_STATES = tuple(f"weight.quant_state.bitsandbytes__{kind}" for kind in ("nf4", "fp4"))


def split(name: str) -> tuple[str, str]:
    """A tensor's module, and its name there."""
    found = _NAME.fullmatch(name)
    if found is None:
        module, _, part = name.rpartition(".")
        return module, part
    return found[1] or "", found[2]


def read(config: dict[str, Any]) -> Unpack:
    """A function that unpacks the modules of a `quantization_config`.

    Raises:
      ModelError: on unsupported settings.
    """
    if config.get("load_in_8bit"):
        raise ModelError("config.json: bitsandbytes weights of 8 bits are not read; of 4 bits (nf4, fp4) they are")

    def unpack(module: str, parts: Parts) -> Parts:
        state = next((name for name in _STATES if name in parts), None)
        if state is None:
            return parts
        own = _Weight.of(module, parts, state)
        rest = {name: tensor for name, tensor in parts.items() if not name.startswith("weight")}
        return rest | {"weight": own.tensor()}

    return unpack


@dataclasses.dataclass(frozen=True)
class _Weight:
    """A packed weight.

    Attributes:
      module: its name.
      codes: its bytes, in a row.
      shape: `[out, in]`.
      block: numbers that share a scale.
      table: the number of each code.
      scales: the bytes, or floats, of all scales.
      nested: for coded scales: the number of each byte, the scales of these, how many share one, and the offset.
    """

    module: str
    codes: Tensor
    shape: tuple[int, int]
    block: int
    table: np.ndarray
    scales: Tensor
    nested: tuple[np.ndarray, np.ndarray, int, np.float32] | None

    @classmethod
    def of(cls, module: str, parts: Parts, state: str) -> "_Weight":
        """Makes it from a module's tensors; raises ModelError if they are inconsistent."""
        said = _said(parts[state])
        shape, block = said.get("shape"), said.get("blocksize")
        if not (isinstance(shape, list) and len(shape) == 2 and all(map(is_size, shape)) and is_size(block)):
            raise ModelError(
                f"{parts[state].name} says shape {shown(shape)} and blocksize {shown(block)}, which is not a matrix"
            )
        count = shape[0] * shape[1]
        blocks = -(-count // block)
        nested = "weight.nested_absmax" in parts
        inner = said.get("nested_blocksize") if nested else 1
        if not isinstance(inner, int) or not is_size(inner):
            raise ModelError(f"{parts[state].name} says nested_blocksize {shown(inner)}, which is not a size")
        wanted: base.Wanted = {
            "weight.quant_map": (("F32",), (16,)), "weight.absmax": (("U8",) if nested else ("F32",), (blocks,)),
        }  # fmt: skip
        if nested:
            wanted |= {
                "weight.nested_absmax": (("F32",), (-(-blocks // inner),)), "weight.nested_quant_map": (("F32",), (256,)),
            }  # fmt: skip
        base.check(module, parts, wanted, f"blocksize {block}")
        own = parts.get("weight")
        if own is None or own.size != -(-count // 2):
            raise ModelError(f"the weights do not fit config.json: {module}.weight has not {-(-count // 2)} bytes")
        whole = lambda name: base.part(parts[name], (0, parts[name].shape[0]))
        offset = np.float32(said.get("nested_offset") or 0)
        return cls(
            module, dataclasses.replace(own, dtype="U8", shape=(own.size,)), (shape[0], shape[1]), block,
            whole("weight.quant_map"), parts["weight.absmax"],
            (whole("weight.nested_quant_map"), whole("weight.nested_absmax"), inner, offset) if nested else None,
        )  # fmt: skip

    def tensor(self) -> Tensor:
        """The weight: packed if a row consists of whole blocks, otherwise plain."""
        (out, wide), file = self.shape, self.codes.file
        packed = None
        if wide % self.block == 0:
            groups = wide // self.block
            scales = self._rows(self._scales, groups)
            packed = Packed(
                None,
                base.component(file, self.shape, ml_dtypes.uint4, self._rows(self._codes, wide)),
                base.component(file, (out, groups), np.float32, scales),
                table=tuple(self.table.tolist()),
            )
        return base.weight(self.module, file, self.shape, self._rows(self._numbers, wide), packed=packed)

    @staticmethod
    def _rows(read: Callable[[Span], np.ndarray], wide: int) -> Reader:
        """A function that reads boxes of a matrix from `read`, which gives its numbers in row order, `wide` to each
        row."""

        def box(rows: Span, columns: Span) -> np.ndarray:
            return read((rows[0] * wide, rows[1] * wide)).reshape(-1, wide)[:, columns[0] : columns[1]]

        return box

    def _codes(self, span: Span) -> np.ndarray:
        octets = base.part(self.codes, (span[0] // 2, -(-span[1] // 2)))
        codes = np.stack([octets >> 4, octets & 15], axis=-1).reshape(-1)
        return codes[span[0] % 2 :][: span[1] - span[0]]

    def _scales(self, span: Span) -> np.ndarray:
        own = base.part(self.scales, span)
        if self.nested is None:
            return own
        numbers, scales, each, offset = self.nested
        return numbers[own] * scales[np.arange(*span) // each] + offset

    def _numbers(self, span: Span) -> np.ndarray:
        blocks = span[0] // self.block, -(-span[1] // self.block)
        scales = np.repeat(self._scales(blocks), self.block)[span[0] - blocks[0] * self.block :]
        return self.table[self._codes(span)] * scales[: span[1] - span[0]]


def _said(tensor: Tensor) -> dict[str, Any]:
    """The JSON object in a tensor's bytes."""
    try:
        found = json.loads(base.part(tensor, (0, tensor.size)).tobytes()) if tensor.dtype == "U8" else None
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise ModelError(f"{tensor.file}: {tensor.name} is not a JSON object; fetch it again")
    return found


BITSANDBYTES = Format(
    read,
    "4 bits, `nf4` and `fp4`, with coded scales too (`bnb_4bit_use_double_quant`)",
    "8 bits (`load_in_8bit`)",
    split,
)
