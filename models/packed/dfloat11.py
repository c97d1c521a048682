"""DFloat11 (Zhang et al. 2025, arXiv:2504.11651) as its authors publish it: bfloat16 whose exponents are Huffman codes.

A module's `encoded_exponent` holds the codes of all of its numbers, several matrices in sequence, from the high bit of
each byte on. The stream is cut into chunks of eight bytes, and blocks of 512 chunks. `gaps` gives, in five bits for
each chunk, the start of the first code that begins in it. `output_positions` gives for each block the number of that
code. So any block can be read on its own.

`luts` are the tables in which codes are looked up, a byte at a time.
"""

import dataclasses
import re
from typing import Any

import ml_dtypes
import numpy as np

from specjax.models import byte_ranges
from specjax.models.errors import ModelError
from specjax.models.fields import an_object, shown
from specjax.models.packed import base
from specjax.models.packed.base import Format, Parts, Unpack
from specjax.models.tensors import Tensor

_CHUNK, _CHUNKS = 8, 512
"""Bytes of a chunk, and chunks of a block."""
_LONGEST = 4
"""Bytes of the longest code."""
_BLOCKS = 64
"""Blocks decoded at a time."""
_JUMP = 240
"""Entries from this value on are not exponents: they name the table for the next byte."""
_GAP = 5
_PARTS = ("encoded_exponent", "sign_mantissa", "luts", "output_positions", "gaps")


def read(config: dict[str, Any]) -> Unpack:
    """A function that unpacks the modules of a `dfloat11_config`.

    Raises:
      ModelError: on unsupported settings.
    """
    base.check_is(config, "DFloat11", bytes_per_thread=(_CHUNK,), threads_per_block=([_CHUNKS],))
    found = an_object("pattern_dict", config.get("pattern_dict"))
    try:
        patterns = [(re.compile(pattern), base.strings(found, pattern)) for pattern in found]
    except re.error as error:
        raise ModelError(f"config.json: dfloat11_config has pattern_dict {shown(found)}: {error}") from error

    def unpack(module: str, parts: Parts) -> Parts:
        if "encoded_exponent" not in parts:
            return parts
        names = next((names for pattern, names in patterns if pattern.fullmatch(module)), None)
        if names is None:
            raise ModelError(f"{module} is packed, but no pattern of dfloat11_config matches its name")
        stream = _Stream.of(module, parts)
        ends = [*_ends(module, parts, len(names) or 1), stream.count]
        rest = {name: tensor for name, tensor in parts.items() if name not in (*_PARTS, "split_positions")}
        for name, start, stop in zip(names or [""], [0, *ends], ends, strict=False):
            whole = f"{name}.weight".lstrip(".")
            if whole in rest:
                raise ModelError(f"{module} has a plain {whole} beside encoded_exponent")
            rest[whole] = stream.tensor(f"{module}.{whole}", start, stop)
        return rest

    return unpack


def _ends(module: str, parts: Parts, count: int) -> list[int]:
    """The end of each matrix except the last.

    Raises:
      ModelError: if their number does not match the matrices.
    """
    own = parts.get("split_positions")
    if own is None and count == 1:
        return []
    base.check(module, parts, {"split_positions": (("I64", "I32"), (count - 1,))}, f"{count} matrices in pattern_dict")
    ends = own.array().tolist() if own is not None and count > 1 else []
    if sorted(set(ends)) != ends:
        raise ModelError(f"{module}.split_positions {ends} do not rise")
    return ends


@dataclasses.dataclass(frozen=True)
class _Stream:
    """A module's numbers as one sequence."""

    parts: Parts
    firsts: np.ndarray

    @staticmethod
    def of(module: str, parts: Parts) -> "_Stream":
        """The stream of a module's tensors.

        Raises:
          ModelError: if they are missing or inconsistent.
        """
        missing = [f"{module}.{name}" for name in _PARTS if name not in parts]
        if missing:
            raise ModelError(f"the weights do not fit dfloat11_config: missing {', '.join(missing)}")
        codes, rest, tables, firsts, gaps = (parts[name] for name in _PARTS)
        blocks, chunks = -(-codes.size // (_CHUNK * _CHUNKS)), -(-codes.size // _CHUNK)
        # gaps of chunks without codes may be left out
        fewest, most = -(-chunks * _GAP // 8), blocks * _CHUNKS * _GAP // 8
        wide = firsts.dtype == "I32"
        wanted: base.Wanted = {
            "encoded_exponent": (("U8",), (codes.size,)),
            "sign_mantissa": (("U8",), (rest.size,)),
            "luts": (("U8",), (tables.size // 256, 256)),
            "output_positions": (("U8", "I32"), (blocks + 1 if wide else 4 * (blocks + 1),)),
            "gaps": (("U8",), (gaps.size if fewest <= gaps.size <= most else most,)),
        }
        base.check(module, parts, wanted, f"bytes_per_thread {_CHUNK}, threads_per_block {_CHUNKS}")
        numbers = np.ascontiguousarray(firsts.array()).view("<u4").astype(np.int64)
        if numbers[0] != 0 or numbers[-1] != rest.size or (np.diff(numbers) < 0).any():
            raise ModelError(f"{module}.output_positions do not rise from 0 to the {rest.size} of sign_mantissa")
        return _Stream(parts, numbers)

    @property
    def count(self) -> int:
        """The number of numbers."""
        return int(self.firsts[-1])

    def tensor(self, name: str, start: int, stop: int) -> Tensor:
        """Some of the numbers as a flat tensor: the file does not give their shape."""

        def fill(wanted: list[tuple[byte_ranges.Box, np.ndarray]]) -> None:
            for ((first, _),), own in wanted:
                self.fill(start + first, own)

        return Tensor(name, self.parts["luts"].file, "BF16", (stop - start,), 0, 0, fill, flat=True)

    def fill(self, start: int, own: np.ndarray) -> None:
        """Reads the numbers from `start` on, some blocks of codes at a time.

        Raises:
          ModelError: if codes are not in `luts` or do not begin where `gaps` says, or if a block has another number of
            codes than `output_positions` says.
        """
        stop, count = start + len(own), len(self.firsts) - 1
        for block in range(int(np.searchsorted(self.firsts, start, side="right")) - 1, count, _BLOCKS):
            first, last = self.firsts[block], self.firsts[min(block + _BLOCKS, count)]
            span = max(start, int(first)), min(stop, int(last))
            if span[0] >= span[1]:
                return
            exponents = self._exponents(block, min(_BLOCKS, count - block))[span[0] - first : span[1] - first]
            rest = base.part(self.parts["sign_mantissa"], span).astype(np.uint16)
            bits = (rest & 0x80) << 8 | exponents.astype(np.uint16) << 7 | rest & 0x7F
            own[span[0] - start : span[1] - start] = bits.view(ml_dtypes.bfloat16)

    def _exponents(self, first: int, blocks: int) -> np.ndarray:
        """The exponents whose codes begin in some blocks; all chunks are decoded in parallel."""
        tensor, chunks, tables = self.parts["encoded_exponent"], blocks * _CHUNKS, self.parts["luts"].array()
        begin, width = first * _CHUNK * _CHUNKS, chunks * _CHUNK
        stream = np.zeros(width + _LONGEST + 1, np.uint8)
        own = base.part(tensor, (begin, min(begin + width + _LONGEST, tensor.size)))
        stream[: len(own)] = own
        fields = _CHUNKS * _GAP // 8
        gaps, size = np.zeros(blocks * fields, np.uint8), self.parts["gaps"].size
        said = base.part(self.parts["gaps"], (first * fields, min((first + blocks) * fields, size)))
        gaps[: len(said)] = said
        ends = 8 * _CHUNK * np.arange(1, chunks + 1)
        starts = ends - 8 * _CHUNK + np.unpackbits(gaps).reshape(-1, _GAP) @ (1 << np.arange(_GAP)[::-1])
        at = starts
        found, there = np.zeros((chunks, 8 * _CHUNK), np.uint8), np.zeros((chunks, 8 * _CHUNK), bool)
        for i in range(found.shape[1]):
            there[:, i] = at < ends
            found[:, i] = _looked_up(tables, stream, np.minimum(at, ends))
            at = np.where(there[:, i], at + np.maximum(tables[-1, found[:, i]], 1), at)
        counts, wanted = there.reshape(blocks, -1).sum(axis=1), np.diff(self.firsts[first : first + blocks + 1])
        open_end = np.arange(first, first + blocks) == len(self.firsts) - 2  # bits after the last code are no code
        followed = np.cumsum(there.sum(axis=1))[:-1] < wanted.sum()
        own, right = found[there][: wanted.sum()], np.where(open_end, counts >= wanted, counts == wanted)
        if (own >= _JUMP).any() or (at[:-1] != starts[1:])[followed].any() or not right.all():
            raise ModelError(
                f"{tensor.name} has other codes than luts, gaps and output_positions say, in blocks {first} to "
                f"{first + blocks - 1}"
            )
        return own


def _looked_up(tables: np.ndarray, stream: np.ndarray, at: np.ndarray) -> np.ndarray:
    """The exponents of the codes that begin at some bits; `_JUMP` or more if there is no such code."""
    byte, bit = at >> 3, at & 7
    table, found = np.zeros(len(at), np.int64), np.full(len(at), _JUMP, np.uint8)
    for i in range(_LONGEST):
        pair = stream[byte + i].astype(np.uint16) << 8 | stream[byte + i + 1]
        open_ = (found >= _JUMP) & (table < len(tables) - 1)
        found = np.where(open_, tables[np.minimum(table, len(tables) - 1), pair >> (8 - bit) & 255], found)
        if (found < _JUMP).all():
            break
        table = 256 - found.astype(np.int64)
    return found


DFLOAT11 = Format(
    read,
    "bfloat16 with Huffman-coded exponents, chunks of 8 bytes in blocks of 512; matrices by `pattern_dict`",
    "other chunks and blocks",
)
