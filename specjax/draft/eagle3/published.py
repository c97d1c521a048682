"""The published layouts of EAGLE-3 (SafeAILab/EAGLE, SpecForge, NVIDIA's ModelOpt, speculators)."""

from collections.abc import Mapping
from typing import Any

from specjax.draft.eagle3.writing import FORMATS, write_head
from specjax.draft.heads import speculators
from specjax.draft.heads.layout import Layout, Reader, Sure, check_flags, check_width, layer_config, named
from specjax.draft.heads.parts import embedding, read_ids, vocabulary_head, windowed, windows
from specjax.draft.heads.taps import IDS
from specjax.models.attention import AttentionConfig
from specjax.models.errors import ModelError

_NORMS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
_EAGLE3_FLAGS = (
    *_NORMS, IDS, "aux_hidden_state_layer_ids", "target_layer_ids", "num_target_layers", "draft_vocab_size", "eagle_config",
    "target_hidden_size", "embed_requires_grad",
)  # fmt: skip
_NESTED = {
    IDS: None, "use_aux_hidden_state": (None, True), "use_input_layernorm_in_first_layer": (None, True),
    "use_last_layernorm": (None, True), "use_mtp_layernorm": (None, False), "next_layer_regular": (None, True),
    "parallel_draft_step": (None, 1), "parallel_draft_heads_num_layers": None, "norm_before_fc": None,
}  # fmt: skip
"""Flags within an `eagle_config`, and their values in EAGLE-3; None for any value."""


def read(reader: Reader, config: dict[str, Any], target: Any, kind: str = "eagle3") -> tuple[dict[str, Any], Any]:
    """Fields and parameters of an EAGLE-3 or EAGLE-3.1 head, which may be narrower than its target.

    `kind` is speculators' name for it.
    """
    if speculators.is_one(config):
        config = speculators.flattened(reader, config, kind)
    check_flags(reader, config, *_EAGLE3_FLAGS)
    nested = _checked_nested(reader, config)
    at = "midlayer" if any(name.startswith("midlayer.") for name in reader.tensors) else "layers.0"
    own = _layer_config(reader, config, target, at)
    size, wide = own.hidden_size, target.lm.config.hidden_size
    key = "target_hidden_size" if config.get("target_hidden_size") else "hidden_size"
    check_width(reader, config.get(key, size), target, key)
    taps = read_ids(reader, config, target)
    layer = reader.layer(at, own, 2 * size)
    params: dict[str, Any] = {
        "fc": reader.linear("fc", len(taps) * wide, size),
        "input_norm": reader.scale(f"{at}.input_layernorm", size),
        "hidden_norm": reader.scale(f"{at}.hidden_norm", size),
        "mlp_norm": layer["mlp_norm"],
        "attention": layer["attention"],
        "mlp": layer["mlp"],
        "norm": reader.scale("norm", size),
        **embedding(reader, config, target, size),
        **vocabulary_head(reader, config, target, size),
    }
    flags = _norms(reader, {**config, **nested})
    if flags["norm_before_fc"]:
        params["fc_norm"] = reader.scale("input_norm", len(taps) * wide)
    if flags["fc_norm"]:
        params["tap_norms"] = {j: reader.scale(f"fc_norm.{j}", wide) for j in range(len(taps))}
    if own.num_hidden_layers > 1:
        params["more"] = {i - 1: _ordinary(reader, i, own) for i in range(1, own.num_hidden_layers)}
    return {"config": own, "layers": own.num_hidden_layers, "taps": taps, **flags}, params


def _ordinary(reader: Reader, i: int, own: Any) -> dict[str, Any]:
    """A layer after the first, which is like a target's in all respects."""
    layer = reader.layer(f"layers.{i}", own, own.hidden_size)
    return {**layer, "attention_norm": reader.scale(f"layers.{i}.input_layernorm", own.hidden_size)}


def _layer_config(reader: Reader, config: dict[str, Any], target: Any, at: str) -> Any:
    """The layers' config: the number of layers and the biases as in the tensors, windows as in `layer_types`.

    SafeAILab's and SpecForge's code has one layer whatever `num_hidden_layers` says, and no biases whatever
    `attention_bias` says; speculators' has as many layers as it says.
    """
    if any(name.startswith("additional_layers.") for name in reader.tensors):
        raise ModelError(
            f"{reader.folder}: additional_layers.* are of a fork of SGLang and are not supported: no published head has them"
        )
    found = [
        int(at) for at in (name.split(".")[1] for name in reader.tensors if name.startswith("layers.")) if at.isdigit()
    ]
    layers = 1 + max(found, default=0)
    if reader.format == "speculators":
        layers = config.get("num_hidden_layers", layers)
    own = layer_config(reader, config, target, layers)
    has = lambda name: f"{at}.self_attn.{name}_proj.bias" in reader.tensors
    must = bool(config.get("qkv_bias")) or reader.format == "speculators" and own.near.qkv_bias
    window, sliding = windows(reader, config, layers)
    biases = {"qkv_bias": must or has("q"), "o_bias": has("o")}
    return windowed(own.every(AttentionConfig, **biases), window, sliding)


def _norms(reader: Reader, config: dict[str, Any]) -> dict[str, bool]:
    """The flags of the head's norms."""
    flags = {name: bool(config.get(name)) for name in _NORMS}
    if flags["norm_before_fc"] and flags["fc_norm"]:
        raise ModelError(f"{reader.file}: norm_before_fc and fc_norm are both true, and only one of them can be")
    if "norm_output" in reader.chosen:
        flags["norm_output"] = bool(reader.chosen["norm_output"])
    elif flags["norm_output"] and reader.format != "speculators" and not flags["fc_norm"]:
        reader.notes.append(
            "feeds on its normed outputs (norm_output); SpecForge once wrote this flag for another thing: if acceptance falls "
            "with depth, try norm_output=false"
        )
    return flags


def _checked_nested(reader: Reader, config: dict[str, Any]) -> dict[str, Any]:
    """The contents of `eagle_config`.

    Raises:
      ModelError: for a flag that is unknown, or whose value makes it another head.
    """
    nested = config.get("eagle_config") or {}
    for key in sorted(nested):
        if key not in _NESTED:
            raise ModelError(f"{reader.file} has the unknown flag eagle_config.{key}")
        allowed = _NESTED[key]
        if allowed is not None and nested[key] not in allowed:
            raise ModelError(
                f"{reader.file}: eagle_config.{key} is {nested[key]!r}; EAGLE-3 heads have {allowed[-1]!r} there"
            )
    return nested


def _said(config: Mapping[str, Any]) -> Sure:
    of_its_kind = config.keys() & {"speculators_model_type", "draft_vocab_size", "eagle_config", IDS}
    return Sure.SHARED if named(config, "eagle3") or of_its_kind else Sure.NO


LAYOUT = Layout(
    read,
    said=_said,
    held=lambda names: any(name.endswith("hidden_norm.weight") for name in names),
    formats=dict.fromkeys(FORMATS, write_head),
)
