"""GPTQ (Frantar et al. 2022, arXiv:2210.17323) as AutoGPTQ and GPTQModel write it: 2, 3, 4 or 8 bits.

The weight is stored transposed, `[in, out]`, and packed along `in` in `qweight` `[in * bits / 32, out]`. `qzeros`
`[groups, out * bits / 32]` are packed along `out`, `scales` are `[groups, out]`, and `g_idx` `[in]` gives the group of
each row.

Files of the first format (`checkpoint_format` `gptq`, or none) store every zero point minus one; files of `gptq_v2`
store it unchanged. If a file says that it is symmetric, every zero point must be 2^(bits - 1); another value means that
the file has the other format, which is an error.
"""

from typing import Any

import numpy as np

from specjax.models.errors import ModelError
from specjax.models.packed import base
from specjax.models.packed.base import Format, Parts, Span, Unpack
from specjax.models.tensors import Tensor

_OLD, _NEW = "gptq", "gptq_v2"


def read(config: dict[str, Any]) -> Unpack:
    """A function that unpacks the modules of a `quantization_config`.

    Raises:
      ModelError: on unsupported settings.
    """
    kind = config.get("checkpoint_format") or config.get("format") or _OLD
    base.check_is({"checkpoint_format": kind}, "GPTQ", checkpoint_format=(_OLD, _NEW))
    base.check_is(config, "GPTQ", bits=(4, 8, 3, 2), sym=(True, False), desc_act=(False, True), pack_dtype=("int32",))
    base.check_off(config, "GPTQ", "dynamic", "is_marlin_format", "adapter", "rotation")
    bits, symmetric, ordered = config.get("bits", 4), config.get("sym") is True, config.get("desc_act", False)
    group, left_out = base.group_of(config, "GPTQ"), base.not_converted(config)

    def unpack(module: str, parts: Parts) -> Parts:
        if "qweight" not in parts:
            return parts
        base.check_left_out(module, left_out(module), "modules_to_not_convert")
        words, out = base.matrix(module, parts, "qweight", ("I32",))
        wide = words * 32 // bits
        groups = 1 if group is None else -(-wide // group)
        wanted: base.Wanted = {
            "qzeros": (("I32",), (groups, -(-out * bits // 32))),
            "scales": (base.SCALES, (groups, out)),
        }
        if ordered or "g_idx" in parts:
            wanted["g_idx"] = (("I32", "I64"), (wide,))
        base.check(module, parts, wanted, f"bits {bits}, group_size {group or -1}, desc_act {ordered}")
        made = base.Scaled(
            module, parts["qweight"].file, (out, wide), base.turned(base.fields(parts["qweight"], bits, 0)),
            base.turned(base.plain(parts["scales"])), base.turned(_zeros(parts["qzeros"], bits, kind, symmetric)), 1,
            base.in_order(parts["g_idx"], groups, group or wide) if "g_idx" in parts else group or wide,
            (base.integers(bits), base.kind_of(parts["scales"])), 2 ** (bits - 1), axis=1,
        )  # fmt: skip
        return base.replaced(module, parts, ("qweight", *wanted), made.tensor())

    return unpack


def _zeros(tensor: Tensor, bits: int, kind: str, symmetric: bool) -> base.Reader:
    """The zero points `[groups, out]`."""
    stored = base.fields(tensor, bits, 1)

    def read(groups: Span, columns: Span) -> np.ndarray:
        found = stored(groups, columns)
        if (
            kind == _OLD and found.max() == 2**bits - 1
        ):  # 0 minus one, which also corrupted its neighbours when it was packed
            raise ModelError(
                f"{tensor.file}: {tensor.name} has zero points that did not fit the format {_OLD}; take {_NEW}"
            )
        zeros = found + np.uint8(kind == _OLD)
        if symmetric and (zeros != 2 ** (bits - 1)).any():
            raise ModelError(
                f"{tensor.file}: {tensor.name} is not symmetric in checkpoint_format {kind}, as quantization_config says it is"
            )
        return zeros

    return read


GPTQ = Format(
    read, "2, 3, 4 or 8 bits, any `group_size`, `g_idx` (`desc_act`), `checkpoint_format` `gptq` and `gptq_v2`",
    "other formats (`marlin`, `bitblas`), modules with settings of their own (`dynamic`), zero points that ran over in `gptq`",
)  # fmt: skip
