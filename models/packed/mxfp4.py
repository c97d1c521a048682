"""MXFP4 (OCP Microscaling Formats, version 1.0): numbers of four bits in blocks of 32, which share a power of two.

A file has a tensor of blocks and a tensor of scales for each weight. Some rows of an expert are read at a time, and
decoded into their array.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import ml_dtypes
import numpy as np

from specjax.models import byte_ranges
from specjax.models.errors import ModelError
from specjax.models.packed import base
from specjax.models.packed.base import Format, Parts, Unpack
from specjax.models.packed_matrix import Packed
from specjax.models.tensors import Tensor

BLOCK = 32
"""Numbers that share a scale; two share a byte, the first in its low half."""
ROWS = 512
"""Rows of an expert read at a time."""
_CODES = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], np.float32)
_BIAS = 127  # a scale has the exponent bias of float32
_PAIRS = np.stack([np.r_[_CODES, -_CODES][np.arange(256) & 15], np.r_[_CODES, -_CODES][np.arange(256) >> 4]], axis=1)


def decoded(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Numbers `[..., 32 * n]` in float32.

    Args:
      blocks: `[..., n, 16]` uint8.
      scales: `[..., n]` uint8, powers of two above 2^-127.
    """
    pairs = np.ldexp(_PAIRS[blocks], (scales.astype(np.int32) - _BIAS)[..., None, None])
    return pairs.reshape(*scales.shape[:-1], -1)


def codes(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """The same numbers before they are scaled, as float4."""
    halves = np.stack([blocks & 15, blocks >> 4], axis=-1)
    return halves.reshape(*scales.shape[:-1], -1).view(ml_dtypes.float4_e2m1fn)


def powers(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """The scales as float8."""
    return scales.view(ml_dtypes.float8_e8m0fnu)


def read(config: dict[str, Any]) -> Unpack:
    """A function that unpacks the modules of a `quantization_config`."""
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
    """A module's tensor `[X, inputs, outputs]` from `NAME_blocks` `[X, outputs, inputs / 32, 16]` and `NAME_scales`.

    Raises:
      ModelError: if the two are inconsistent.
    """
    blocks, scales = (parts.get(f"{name}_{part}") for part in ("blocks", "scales"))
    name = f"{module}.{name}"
    if blocks is None or scales is None:
        raise ModelError(f"the weights do not fit config.json: {name}_blocks and {name}_scales come together")
    right = len(blocks.shape) == 4 and blocks.shape == (*scales.shape, BLOCK // 2)
    if not right or {blocks.dtype, scales.dtype} != {"U8"}:
        raise ModelError(
            f"{name}_blocks {blocks.dtype} {list(blocks.shape)} and {name}_scales {scales.dtype} {list(scales.shape)} are not "
            "blocks of 16 bytes with a scale each"
        )
    experts, outputs, groups = scales.shape
    blocks = dataclasses.replace(blocks, shape=(experts, outputs, groups * BLOCK // 2))  # rows are read in one piece
    shape = (experts, groups * BLOCK, outputs)

    def made(kind: str, shape: tuple[int, ...], make: Make, each: int, packed: Packed | None = None) -> Tensor:
        return Tensor(
            name, blocks.file, kind, shape, 0, 0, functools.partial(_fill, blocks, scales, make, each), packed=packed
        )

    part = lambda shape, make, each, kind: byte_ranges.Source(made("U8", shape, make, each), False, np.dtype(kind))
    packed = Packed(
        None,
        part(shape, codes, 1, ml_dtypes.float4_e2m1fn),
        part((experts, groups, outputs), powers, BLOCK, ml_dtypes.float8_e8m0fnu),
    )
    return made("BF16", shape, decoded, 1, packed)  # bfloat16 holds all of its numbers exactly


def outline(path: tuple[Any, ...], shape: jax.ShapeDtypeStruct) -> Any:
    """The leaf for a parameter of a model whose experts' matrices are in blocks, as in gpt-oss."""
    keys = [getattr(key, "key", None) for key in path]
    if "experts" not in keys or keys[-1] != "kernel":
        return shape
    part = lambda shape, kind: jax.ShapeDtypeStruct(shape, kind)
    experts, inputs, outputs = shape.shape
    return Packed(
        part((experts, 1, 1), shape.dtype),
        part(shape.shape, ml_dtypes.float4_e2m1fn),
        part((experts, inputs // BLOCK, outputs), ml_dtypes.float8_e8m0fnu),
    )


Make = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""A function from blocks and scales to the requested numbers, such as `decoded`."""


def _fill(blocks: Tensor, scales: Tensor, make: Make, each: int, wanted: list[tuple[Any, np.ndarray]]) -> None:
    """See `specjax.models.byte_ranges.fill`; boxes of the same part of an expert are read once.

    Args:
      blocks: the codes `[X, outputs, bytes]`.
      scales: of every block.
      make: makes the requested numbers of several rows of an expert.
      each: how many inputs share an entry of the result.
      wanted: boxes of the result, with inputs before outputs.
    """
    boxes: dict[byte_ranges.Box, list[np.ndarray]] = {}
    for box, own in wanted:
        boxes.setdefault(box, []).append(own)
    for ((first, last), (start, stop), outputs), owns in boxes.items():
        groups = start * each // BLOCK, -(-stop * each // BLOCK)
        before = start - groups[0] * BLOCK // each
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
                numbers = make(codes, powers)[0][:, before : before + stop - start].T
                for own in owns:
                    own[expert - first, :, rows[0] - outputs[0] : rows[1] - outputs[0]] = numbers.astype(own.dtype)


MXFP4 = Format(read, "blocks of 32 numbers of e2m1 with a scale of 8 bits, as gpt-oss has its experts", "other layouts")
