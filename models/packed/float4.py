"""Numbers of four bits (e2m1) as compressed-tensors packs them: NVFP4 and MXFP4.

`weight_packed` `[out, in / 2]` has two codes per byte, the first in its low half. NVFP4 has an e4m3 scale for 16
neighbours, divided by one float32, `weight_global_scale` `[1]`. MXFP4 has a power of two for 32 neighbours, stored as
the byte of its exponent.
"""

import ml_dtypes
import numpy as np

from specjax.models.packed import base
from specjax.models.packed.base import Parts, Span
from specjax.models.packed_matrix import Packed, Steps

GROUPS = {"nvfp4-pack-quantized": 16, "mxfp4-pack-quantized": 32}
"""How many neighbours share a scale, by format."""
_KIND = np.dtype(ml_dtypes.float4_e2m1fn)


def unpacked(module: str, parts: Parts, form: str) -> Parts:
    """A module's tensors with the weight in place of its parts.

    Raises:
      ModelError: if they are inconsistent.
    """
    out, half = base.matrix(module, parts, "weight_packed", ("U8",))
    wide, group, nv = 2 * half, GROUPS[form], form.startswith("nv")
    groups = -(-wide // group)
    wanted: base.Wanted = {"weight_scale": (("F8_E4M3",) if nv else ("U8", "F8_E8M0"), (out, groups))}
    if nv:
        wanted["weight_global_scale"] = (("F32",), (1,))
    base.check(module, parts, wanted, form)
    octets, scales = parts["weight_packed"], parts["weight_scale"]
    divisor = base.part(parts["weight_global_scale"], (0, 1))[0] if nv else np.float32(1)

    def codes(rows: Span, columns: Span) -> np.ndarray:
        start = columns[0] // 2
        own = base.part(octets, rows, (start, -(-columns[1] // 2)))
        both = np.stack([own & 15, own >> 4], axis=-1).reshape(len(own), -1)
        return both[:, columns[0] - 2 * start :][:, : columns[1] - columns[0]].view(_KIND)

    def counts(rows: Span, columns: Span) -> np.ndarray:
        return base.part(scales, rows, columns).view(ml_dtypes.float8_e4m3fn if nv else ml_dtypes.float8_e8m0fnu)

    whole = lambda rows, columns: counts(rows, columns).astype(np.float32) / divisor
    decode = base.affine(codes, whole, 0.0, base.every(1), base.every(group))
    packed, file = None, octets.file
    if wide % group == 0:
        scale = base.component(file, (out, groups), ml_dtypes.float8_e4m3fn if nv else ml_dtypes.float8_e8m0fnu, counts)
        one = lambda rows, columns: np.full((rows[1] - rows[0], columns[1] - columns[0]), 1 / divisor, np.float32)
        scale = Steps(base.component(file, (out, 1), np.float32, one), scale) if nv else scale
        packed = Packed(None, base.component(file, (out, wide), _KIND, codes), scale)
    made = base.weight(module, file, (out, wide), decode, packed=packed)
    return base.replaced(module, parts, ("weight_packed", *wanted), made)
