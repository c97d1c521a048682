"""The published layout of DFlash 2 (z-lab, SpecForge): DFlash's with convolutions and a selector."""

from collections.abc import Mapping
from typing import Any

from specjax.draft.dflash.published import is_second, read_block, read_config
from specjax.draft.heads.layout import Layout, Reader, Sure
from specjax.models.errors import ModelError
from specjax.models.fields import is_size

_SIZES = {
    "reach": "conv_kernel_size", "group": "conv_group_size", "rank": "selector_rank", "candidates": "selector_top_k",
}  # fmt: skip
_CONVOLUTIONS = {"attention": "attention_conv", "mlp": "mlp_conv"}
_FACTORS = ("input_embedding_scale", "output_multiplier", "final_logit_softcapping")


def read(reader: Reader, config: dict[str, Any], target: Any) -> tuple[dict[str, Any], Any]:
    """Fields and parameters of a DFlash 2 head: DFlash's, convolutions and a selector."""
    config = read_config(reader, config, "dflash2")
    late = ".weight"  # of tables that torch's own saving writes
    reader.tensors = {n.removesuffix(late) if "_codebook" in n else n: x for n, x in reader.tensors.items()}
    sizes: dict[str, Any] = {field: config.get(key) for field, key in _SIZES.items()}
    if wrong := next((field for field, size in sizes.items() if not is_size(size)), None):
        raise ModelError(
            f"{reader.file}: {_SIZES[wrong]} is {sizes[wrong]!r}, and must be a size above 0 (without it, it is a dflash)"
        )
    fields, params = read_block(reader, {key: x for key, x in config.items() if key not in _FACTORS}, target)
    width, vocab, rank = fields["config"].hidden_size, target.lm.vocab_size, sizes["rank"]
    if "ids" in params:
        raise ModelError(f"{reader.file}: draft_vocab_size: DFlash 2 selects among all of the target's {vocab} tokens")
    if width % sizes["group"]:
        raise ModelError(f"{reader.file}: conv_group_size {sizes['group']} does not divide the {width} channels")
    if sizes["reach"] > fields["block"]:
        raise ModelError(
            f"{reader.file}: conv_kernel_size {sizes['reach']} is more than a block's {fields['block']} slots"
        )
    for i, layer in params["layers"].items():
        for part, name in _CONVOLUTIONS.items():
            outputs = 2 * sizes["reach"] * (width // sizes["group"])
            layer[part]["convolution"] = {
                "base": reader.take(f"layers.{i}.{name}.base_kernel", (2, sizes["reach"], width)),
                "projection": reader.linear(f"layers.{i}.{name}.kernel_projection", width, outputs),
            }
    at = "candidate_selector"
    params["selector"] = {
        "before": {"embedding": reader.take(f"{at}.predecessor_codebook", (vocab, rank))},
        "after": {"embedding": reader.take(f"{at}.successor_codebook", (vocab, rank))},
        "projection": reader.linear(f"{at}.hidden_projection", width, rank),
    }
    return {**fields, **sizes, **_factors(reader, config, target, params)}, params


def _factors(reader: Reader, config: dict[str, Any], target: Any, params: Any) -> dict[str, float]:
    """The factors of embeddings and logits, beside those that the target's own embeddings and head apply.

    A file's factors are of the bare tables.
    """
    said = {key: config.get(key) for key in _FACTORS}
    if wrong := next((key for key, x in said.items() if not (x is None or _is_factor(x))), None):
        raise ModelError(f"{reader.file}: {wrong} must be a number above 0, not {said[wrong]!r}")
    scale, multiplier, cap = ((said[key] or usual) for key, usual in zip(_FACTORS, (1.0, 1.0, 0.0), strict=True))
    own = target.lm.config
    if "embed" not in params:
        scale /= own.embedding.scale
    if "head" not in params:
        multiplier *= own.head.logits_scaling
        if own.head.soft_cap is not None:
            if (multiplier, cap) != (1.0, own.head.soft_cap):
                raise ModelError(
                    f"{reader.file}: final_logit_softcapping is {cap or None} and {target.name!r} caps its own logits at "
                    f"{own.head.soft_cap}: only heads with the target's cap, and no output_multiplier, are read"
                )
            cap = 0.0
    return {"input_scale": float(scale), "multiplier": float(multiplier), "soft_cap": float(cap)}


def _is_factor(x: Any) -> bool:
    return isinstance(x, (int, float)) and not isinstance(x, bool) and x > 0


def _said(config: Mapping[str, Any]) -> Sure:
    return Sure.OWN if is_second(config) else Sure.NO


LAYOUT = Layout(read, said=_said, what="DFlash 2 has convolutions and a selector", beside=("dflash",))
