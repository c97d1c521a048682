"""Writes DFloat11's published layout; see `specjax.models.packed.dfloat11`.

The matrices of a decoder layer share a code and a stream; other matrices have their own. Codes have at most eight bits,
so that one table decodes them. A module with an exponent of 240 or more, which the layout cannot express, stays plain.
"""

import re
from collections.abc import Iterable
from typing import Any

import ml_dtypes
import numpy as np

from specjax.models.dfloat11 import code_lengths, code_table

_LAYER = re.compile(r"(.*\.layers\.\d+)\.(.+)")
_CHUNK, _CHUNKS, _JUMP = 64, 512, 240  # bits of a chunk; chunks of a block; the first entry that is no exponent


def packed(tensors: Iterable[tuple[str, np.ndarray]]) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """A file's bfloat16 tensors in packed form, and their `dfloat11_config`.

    Args:
      tensors: names and arrays of a plain file.
    """
    groups: dict[str, dict[str, np.ndarray]] = {}
    made: dict[str, np.ndarray] = {}
    for name, array in tensors:
        module, found = name.removesuffix(".weight"), None
        if array.ndim != 2 or module == name or array.dtype != ml_dtypes.bfloat16:
            made[name] = array
            continue
        found = _LAYER.fullmatch(module)
        groups.setdefault(found[1] if found else module, {})[found[2] if found else ""] = array
    patterns = {}
    for module, matrices in groups.items():
        parts = streams(list(matrices.values()))
        if parts is None:
            made |= {".".join(filter(None, (module, name, "weight"))): array for name, array in matrices.items()}
            continue
        made |= {f"{module}.{part}": array for part, array in parts.items()}
        patterns[re.escape(module)] = [name for name in matrices if name]
    config = {
        "version": "0.5.0",
        "threads_per_block": [_CHUNKS],
        "bytes_per_thread": _CHUNK // 8,
        "pattern_dict": patterns,
    }
    return made, config


def streams(matrices: list[np.ndarray]) -> dict[str, np.ndarray] | None:
    """The tensors of a module with some bfloat16 matrices; None if an exponent cannot be expressed."""
    bits = np.concatenate([matrix.reshape(-1) for matrix in matrices]).view(np.uint16)
    exponents = (bits >> 7).astype(np.uint8)
    counts = np.bincount(exponents, minlength=256)
    if counts[_JUMP:].any():
        return None
    lengths = code_lengths(counts)
    table, codes = code_table(lengths)
    own = lengths[exponents]
    ends = np.cumsum(own)
    at, inside = ends - own, (ends - own) % _CHUNK
    words = np.zeros(-(-int(ends[-1]) // _CHUNK) + 1, np.uint64)
    firsts = np.searchsorted(at, np.arange(0, int(at[-1]) + 1, _CHUNK))  # each has a start: codes are shorter
    over = np.maximum(inside + own - _CHUNK, 0)  # bits of it that are in the next chunk
    high = codes[exponents] >> over.astype(np.uint64) << (_CHUNK - inside - own + over).astype(np.uint64)
    words[: len(firsts)] = np.add.reduceat(high, firsts)
    crossing = np.flatnonzero(over)
    words[at[crossing] // _CHUNK + 1] |= codes[exponents[crossing]] << (_CHUNK - over[crossing]).astype(np.uint64)
    chunks = -(-len(firsts) // _CHUNKS) * _CHUNKS
    blocks = -(-int(ends[-1]) // (_CHUNK * _CHUNKS))
    gaps = np.zeros(blocks * _CHUNKS, np.uint8)
    gaps[: len(firsts)] = inside[firsts]
    starts = np.full(blocks + 1, len(bits), np.uint32)
    starts[: chunks // _CHUNKS] = firsts[::_CHUNKS]
    luts = np.stack([table.reshape(-1).astype(np.uint8), lengths.astype(np.uint8)])
    return {
        "encoded_exponent": words.astype(">u8").view(np.uint8)[: -(-int(ends[-1]) // 8)],
        "sign_mantissa": (bits >> 8 & 0x80 | bits & 0x7F).astype(np.uint8),
        "luts": luts,
        "output_positions": starts.astype("<u4").view(np.uint8),
        "gaps": np.packbits(np.unpackbits(gaps[:, None], axis=1)[:, 3:]),
        "split_positions": np.cumsum([matrix.size for matrix in matrices], dtype=np.int64)[:-1],
    }
