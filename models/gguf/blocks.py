"""The codes, scales and minima of GGUF's blocks, for the types whose numbers are `code * scale + minimum`.

The order of a block's bytes is that of ggml's `ggml-common.h`. A float16 `d` is a scale, `m` or `dmin` a minimum.
"Halves" are 16 bytes with 32 codes: byte j has code j in its low half, and code j + 16 in its high half.
"""

import dataclasses
from collections.abc import Callable

import ml_dtypes
import numpy as np

Blocks = np.ndarray
"""The bytes of N blocks, `[N, bytes]` uint8."""


@dataclasses.dataclass(frozen=True)
class Part:
    """One kind of number in a block.

    Attributes:
      kind: its type.
      each: how many of the block's numbers share an entry.
      read: returns the entries `[N, block / each]` of blocks.
    """

    kind: np.dtype
    each: int
    read: Callable[[Blocks], np.ndarray]


@dataclasses.dataclass(frozen=True)
class Layout:
    """The content of a block; see `specjax.models.packed_matrix.Packed`.

    Attributes:
      values: the codes.
      scale: floats, or the step sizes and counts.
      minimum: likewise; empty if none is added.
      table: see `Packed`.
    """

    values: Part
    scale: tuple[Part, ...]
    minimum: tuple[Part, ...] = ()
    table: tuple[float, ...] = ()


TABLE = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""The numbers that the codes of IQ4 stand for."""
_INT4, _UINT4, _FLOAT4 = (np.dtype(kind) for kind in (ml_dtypes.int4, ml_dtypes.uint4, ml_dtypes.float4_e2m1fn))
_INT8, _UINT8, _HALF, _POWER = (np.dtype(kind) for kind in (np.int8, np.uint8, np.float16, ml_dtypes.float8_e8m0fnu))


def _halves(codes: np.ndarray) -> np.ndarray:
    """`[N, 16]` bytes to `[N, 32]` codes."""
    return np.concatenate([codes & 15, codes >> 4], axis=-1)


def _fifth(bits: np.ndarray) -> np.ndarray:
    """`[N, 4]` bytes to `[N, 32]`: 16 for each set bit."""
    return np.unpackbits(np.ascontiguousarray(bits), axis=-1, bitorder="little") << 4


def _quarters(codes: np.ndarray) -> np.ndarray:
    """`[N, 32 r]` bytes to `[N, 128 r]` codes of two bits: of each 32 bytes the lowest bits, then the next."""
    runs = codes.reshape(len(codes), -1, 1, 32)
    return (runs >> np.arange(0, 8, 2, dtype=np.uint8)[:, None] & 3).reshape(len(codes), -1)


def _runs(codes: np.ndarray) -> np.ndarray:
    """`[N, 128]` bytes to `[N, 256]` codes: of each 32 bytes the low halves, then the high ones."""
    runs = codes.reshape(len(codes), 4, 1, 32)
    return (runs >> np.array([[0], [4]], np.uint8) & 15).reshape(len(codes), 256)


def _planes(bits: np.ndarray) -> np.ndarray:
    """`[N, 32]` bytes to `[N, 256]`: number 32 k + i is bit k of byte i."""
    return (bits[:, None] >> np.arange(8, dtype=np.uint8)[:, None] & 1).reshape(len(bits), 256)


def _half(start: int, sign: int = 1) -> Callable[[Blocks], np.ndarray]:
    """Reads a float16 that begins at a byte."""
    return lambda b: np.ascontiguousarray(b[:, start : start + 2]).view(np.float16) * np.float16(sign)


def _six_bits(minima: bool, start: int) -> Callable[[Blocks], np.ndarray]:
    """The eight 6-bit scales, or minima, in 12 bytes of Q4_K and Q5_K."""

    def read(b: Blocks) -> np.ndarray:
        low, mid, high = (b[:, start + 4 * i : start + 4 * i + 4] for i in range(3))
        first, last = (mid, high >> 4) if minima else (low, high & 15)
        return np.concatenate([first & 63, last | first >> 6 << 4], axis=-1)

    return read


def _q3_scales(b: Blocks) -> np.ndarray:
    """The 16 6-bit scales, minus 32, in 12 bytes of Q3_K."""
    own = b[:, 96:108]
    low = np.concatenate([own[:, :8] & 15, own[:, :8] >> 4], axis=-1)
    high = (own[:, 8:, None] >> np.arange(0, 8, 2, dtype=np.uint8) & 3).swapaxes(-1, -2).reshape(-1, 16)
    return (low | high << 4).view(np.int8) - 32


def _q6_codes(b: Blocks) -> np.ndarray:
    low = b[:, :128].reshape(len(b), 2, 1, 64) >> np.array([[0], [4]], np.uint8) & 15
    return (low.reshape(len(b), 256) | _quarters(b[:, 128:192]) << 4).view(np.int8) - 32


def _xs_scales(b: Blocks) -> np.ndarray:
    """The eight 6-bit scales, minus 32, of IQ4_XS."""
    low = (b[:, 4:8, None] >> np.array([0, 4], np.uint8) & 15).reshape(-1, 8)
    high = np.ascontiguousarray(b[:, 2:4]).view(np.uint16) >> np.arange(0, 16, 2, dtype=np.uint16) & 3
    return (low | high.astype(np.uint8) << 4).view(np.int8) - 32


def _signed(codes: np.ndarray, less: int) -> np.ndarray:
    return codes.view(np.int8) - np.int8(less)


def _k(start: int, codes: Part, scales: int) -> Layout:
    """The layout of Q4_K and Q5_K: groups of 32 with a scale and a minimum, each counted in its own step size."""
    count = lambda minima: Part(_UINT8, 32, _six_bits(minima, scales))
    return Layout(
        codes, (Part(_HALF, 256, _half(start)), count(False)), (Part(_HALF, 256, _half(start + 2, -1)), count(True))
    )


def _of_32(
    kind: np.dtype, read: Callable[[Blocks], np.ndarray], minimum: bool = False, table: tuple[float, ...] = ()
) -> Layout:
    """The layout of types with 32 numbers, a scale, and perhaps a minimum after it."""
    low = (Part(_HALF, 32, _half(2)),) if minimum else ()
    return Layout(Part(kind, 1, read), (Part(_HALF, 32, _half(0)),), low, table)


LAYOUTS = {
    "Q4_0": _of_32(_INT4, lambda b: _signed(_halves(b[:, 2:]), 8)),
    "Q4_1": _of_32(_UINT4, lambda b: _halves(b[:, 4:]), True),
    "Q5_0": _of_32(_INT8, lambda b: _signed(_halves(b[:, 6:]) | _fifth(b[:, 2:6]), 16)),
    "Q5_1": _of_32(_INT8, lambda b: _halves(b[:, 8:]) | _fifth(b[:, 4:8]), True),
    "Q8_0": _of_32(_INT8, lambda b: b[:, 2:].view(np.int8)),
    "IQ4_NL": _of_32(_UINT4, lambda b: _halves(b[:, 2:]), table=TABLE),
    "MXFP4": Layout(
        Part(_FLOAT4, 1, lambda b: _halves(b[:, 1:]).view(_FLOAT4)), (Part(_POWER, 32, lambda b: b[:, :1].view(_POWER)),)
    ),
    "Q2_K": Layout(
        Part(_UINT4, 1, lambda b: _quarters(b[:, 16:80])),
        (Part(_HALF, 256, _half(80)), Part(_UINT8, 16, lambda b: b[:, :16] & 15)),
        (Part(_HALF, 256, _half(82, -1)), Part(_UINT8, 16, lambda b: b[:, :16] >> 4)),
    ),
    "Q3_K": Layout(
        Part(_INT4, 1, lambda b: _signed(_quarters(b[:, 32:96]) | _planes(b[:, :32]) << 2, 4)),
        (Part(_HALF, 256, _half(108)), Part(_INT8, 16, _q3_scales)),
    ),
    "Q4_K": _k(0, Part(_UINT4, 1, lambda b: _runs(b[:, 16:])), 4),
    "Q5_K": _k(0, Part(_INT8, 1, lambda b: _runs(b[:, 48:]) | _planes(b[:, 16:48]) << 4), 4),
    "Q6_K": Layout(
        Part(_INT8, 1, _q6_codes),
        (Part(_HALF, 256, _half(208)), Part(_INT8, 16, lambda b: b[:, 192:208].view(np.int8))),
    ),
    "IQ4_XS": Layout(
        Part(_UINT4, 1, lambda b: _halves(b[:, 8:].reshape(-1, 16)).reshape(len(b), 256)),
        (Part(_HALF, 256, _half(0)), Part(_INT8, 32, _xs_scales)),
        table=TABLE,
    ),
}  # fmt: skip
"""The layouts by ggml's names of types."""
