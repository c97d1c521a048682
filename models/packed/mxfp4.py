"""MXFP4 (OCP Microscaling Formats, version 1.0): numbers of four bits in blocks of 32, which share a power of two.

A file has a tensor of blocks and one of scales for each weight. Some rows of an expert are read at a time, and made into plain
numbers on their way to the array that they belong to.
"""

import dataclasses
import functools
from typing import Any

import numpy as np

from specjax.models import byte_ranges
from specjax.models.errors import ModelError
from specjax.models.packed import base
from specjax.models.packed.base import Format, Parts, Unpack
from specjax.models.tensors import Tensor

BLOCK = 32
"""Numbers that share a scale; two lie in a byte, the first in its low half."""
ROWS = 512
"""Rows of an expert that are read at a time."""
_CODES = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], np.float32)
_BIAS = 127  # a scale is a float32's exponent
_PAIRS = np.stack([np.r_[_CODES, -_CODES][np.arange(256) & 15], np.r_[_CODES, -_CODES][np.arange(256) >> 4]], axis=1)


def decoded(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Numbers `[..., 32 * n]` in float32.

    Args:
      blocks: `[..., n, 16]` uint8.
      scales: `[..., n]` uint8, powers of two above 2^-127.
    """
    pairs = np.ldexp(_PAIRS[blocks], (scales.astype(np.int32) - _BIAS)[..., None, None])
    return pairs.reshape(*scales.shape[:-1], -1)


def read(config: dict[str, Any]) -> Unpack:
    """What unpacks the modules of a `quantization_config`."""
    left_out = base.not_converted(config)

    def unpack(module: str, parts: Parts) -> Parts:
        packed = [name.removesuffix("_blocks") for name in parts if name.endswith("_blocks")]
        if packed:
            base.check_left_out(module, left_out(module), "modules_to_not_convert")
        whole = {name: unpacked(module, parts, name) for name in packed}
        halves = {f"{name}_{part}" for name in packed for part in ("blocks", "scales")}
        return {name: tensor for name, tensor in parts.items() if name not in halves} | whole

    return unpack


def unpacked(module: str, parts: Parts, name: str) -> Tensor:
    """A module's tensor `[X, inputs, outputs]` that `NAME_blocks` `[X, outputs, inputs / 32, 16]` and `NAME_scales` hold.

    Raises:
      ModelError: where the two do not go together.
    """
    blocks, scales = (parts.get(f"{name}_{part}") for part in ("blocks", "scales"))
    name = f"{module}.{name}"
    if blocks is None or scales is None:
        raise ModelError(f"the weights do not fit config.json: {name}_blocks and {name}_scales come together")
    right = len(blocks.shape) == 4 and blocks.shape == (*scales.shape, BLOCK // 2)
    if not right or {blocks.dtype, scales.dtype} != {"U8"}:
        raise ModelError(
            f"{name}_blocks {blocks.dtype} {list(blocks.shape)} and {name}_scales {scales.dtype} {list(scales.shape)} are no "
            "blocks of 16 bytes with a scale each"
        )
    experts, outputs, groups = scales.shape
    blocks = dataclasses.replace(blocks, shape=(experts, outputs, groups * BLOCK // 2))  # rows are read in one piece
    # bfloat16 holds every one of its numbers
    shape = (experts, groups * BLOCK, outputs)
    return Tensor(name, blocks.file, "BF16", shape, 0, 0, functools.partial(_fill, blocks, scales))


def _fill(blocks: Tensor, scales: Tensor, wanted: list[tuple[Any, np.ndarray]]) -> None:
    """See `specjax.models.byte_ranges.fill`; boxes of the same part of an expert are read once."""
    boxes: dict[byte_ranges.Box, list[np.ndarray]] = {}
    for box, own in wanted:
        boxes.setdefault(box, []).append(own)
    for ((first, last), (start, stop), outputs), owns in boxes.items():
        groups = start // BLOCK, -(-stop // BLOCK)
        inside = slice(start - groups[0] * BLOCK, stop - groups[0] * BLOCK)
        for expert in range(first, last):
            for row in range(*outputs, ROWS):
                rows = row, min(row + ROWS, outputs[1])
                powers = np.empty((1, rows[1] - rows[0], groups[1] - groups[0]), np.uint8)
                codes = np.empty((*powers.shape, BLOCK // 2), np.uint8)
                bytes_of = groups[0] * BLOCK // 2, groups[1] * BLOCK // 2
                byte_ranges.fill(
                    blocks, [(((expert, expert + 1), rows, bytes_of), codes.reshape(1, len(codes[0]), -1))]
                )
                byte_ranges.fill(scales, [(((expert, expert + 1), rows, groups), powers)])
                numbers = decoded(codes, powers)[0][:, inside].T
                for own in owns:
                    own[expert - first, :, rows[0] - outputs[0] : rows[1] - outputs[0]] = numbers.astype(own.dtype)


MXFP4 = Format(read, "blocks of 32 numbers of e2m1 with a scale of 8 bits, as gpt-oss has its experts", "other layouts")
