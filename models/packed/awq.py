"""AWQ (Lin et al. 2023, arXiv:2306.00978) in AutoAWQ's format for its `gemm` kernels: four bits, with zero points.

The weight is stored transposed, `[in, out]`. Eight columns share a word of `qweight` `[in, out / 8]`, in a special
order. `qzeros` `[groups, out / 8]` are packed in the same way, and `scales` are `[groups, out]`.
"""

from typing import Any

from specjax.models.fields import shown
from specjax.models.packed import base
from specjax.models.packed.base import Format, Parts, Unpack

_BITS, _WORD = 4, 8
_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""The part of a word that holds each column: from the low end, the columns are 0, 2, 4, 6, 1, 3, 5 and 7."""


def read(config: dict[str, Any]) -> Unpack:
    """A function that unpacks the modules of a `quantization_config`.

    Raises:
      ModelError: on unsupported settings.
    """
    version = config.get("version") or config.get("format") or "gemm"
    version = version.lower() if isinstance(version, str) else version
    version = "llm-awq" if config.get("backend") == "llm-awq" else version
    base.check_is(config | {"version": version}, "AWQ", bits=(_BITS,), zero_point=(True,), version=("gemm",))
    group, left_out = base.group_of(config, "AWQ"), base.not_converted(config)

    def unpack(module: str, parts: Parts) -> Parts:
        if "qweight" not in parts:
            return parts
        base.check_left_out(module, left_out(module), "modules_to_not_convert")
        wide, words = base.matrix(module, parts, "qweight", ("I32",))
        width = group or wide
        groups, out = -(-wide // width), words * _WORD
        wanted: base.Wanted = {"qzeros": (("I32",), (groups, words)), "scales": (base.SCALES, (groups, out))}
        base.check(module, parts, wanted, f"bits {_BITS}, group_size {shown(width)}")
        fields = lambda name: base.turned(base.fields(parts[name], _BITS, 1, _ORDER))
        made = base.Scaled(
            module, parts["qweight"].file, (out, wide), fields("qweight"), base.turned(base.plain(parts["scales"])),
            fields("qzeros"), 1, width, (base.integers(_BITS), base.kind_of(parts["scales"])), 2 ** (_BITS - 1), axis=1,
        )  # fmt: skip
        return base.replaced(module, parts, ("qweight", *wanted), made.tensor())

    return unpack


AWQ = Format(
    read, "4 bits with zero points, `version` `gemm`, any `group_size`",
    "other versions (`gemv`, `gemv_fast`, `marlin`, `exllama`, llm-awq's own), weights without zero points",
)  # fmt: skip
