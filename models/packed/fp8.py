"""float8 with scales of blocks, as DeepSeek publishes its models (arXiv:2412.19437), or with one scale for a matrix.

`weight` `[out, in]` holds e4m3 numbers. Despite its name, `weight_scale_inv` (or `weight_scale`) is the factor of each
block. The last blocks of an axis may be smaller. Activations are not rounded here.
"""

import dataclasses
from typing import Any

from specjax.models.errors import ModelError
from specjax.models.fields import is_size, shown
from specjax.models.packed import base
from specjax.models.packed.base import Format, Parts, Unpack

_SCALES = ("weight_scale_inv", "weight_scale")
_ACTIVATIONS = ("input_scale", "activation_scale", "k_scale", "v_scale", "kv_scale")
"""Tensors with scales for activations or the cache, which are ignored."""


def read(config: dict[str, Any]) -> Unpack:
    """A function that unpacks the modules of a `quantization_config`.

    Raises:
      ModelError: on unsupported settings.
    """
    base.check_is(
        config, "fp8", fmt=("e4m3",), activation_scheme=("dynamic", "static"), scale_fmt=("float", "ue8m0", None),
        expert_dtype=("fp8", None),
    )  # fmt: skip
    block = config.get("weight_block_size")
    if block is not None and not (isinstance(block, list) and len(block) == 2 and all(map(is_size, block))):
        raise ModelError(f"config.json: fp8 weights with weight_block_size {shown(block)} are not read")
    fields = ("modules_to_not_convert", "ignored_layers")
    left_out = [(field, base.not_converted(config, field)) for field in fields]

    def unpack(module: str, parts: Parts) -> Parts:
        parts = {name: tensor for name, tensor in parts.items() if name not in _ACTIVATIONS}
        scales = next((name for name in _SCALES if name in parts), None)
        if scales is None:
            return parts
        for field, names in left_out:
            base.check_left_out(module, names(module), field)
        out, wide = base.matrix(module, parts, "weight", ("F8_E4M3",))
        tall_block, wide_block = block or (out, wide)
        grid = -(-out // tall_block), -(-wide // wide_block)
        stored = () if block is None and parts[scales].shape == () else (1,) if block is None else grid
        base.check(module, parts, {scales: ((*base.SCALES, "F8_E8M0"), stored)}, f"weight_block_size {block}")
        scale = dataclasses.replace(parts[scales], shape=grid)
        made = base.Scaled(
            module, parts["weight"].file, (out, wide), base.plain(parts["weight"]), base.plain(scale), 0.0,
            tall_block, wide_block, (base.kind_of(parts["weight"]), base.kind_of(scale)),
        )  # fmt: skip
        return base.replaced(module, parts, ("weight", scales), made.tensor())

    return unpack


FP8 = Format(
    read,
    "e4m3 with a scale for each block (`weight_block_size`), in float or e8m0, or one scale for a matrix",
    "e5m2; scales for a row",
)
