"""Kangaroo's published adapters (Equationliu/Kangaroo): one layer without an MLP, and a norm."""

from collections.abc import Collection
from typing import Any

from specjax.draft.heads.layout import Layout, Reader, check_flags, check_width, layer_config
from specjax.models.attention import AttentionConfig
from specjax.models.errors import ModelError
from specjax.models.mlp import MLPConfig
from specjax.models.ropes import RopeConfig


def read(reader: Reader, config: dict[str, Any], target: Any) -> tuple[dict[str, Any], Any]:
    """Fields and parameters of an adapter. Its rope has base 10000 and no scaling, whatever the configuration says."""
    check_flags(reader, config)
    if config.get("num_hidden_layers", 1) != 1:
        raise ModelError(
            f"{reader.file}: num_hidden_layers is {config['num_hidden_layers']}; only adapters of one are read"
        )
    read = layer_config(reader, config, target)
    check_width(reader, read.hidden_size, target)
    size, plain = read.hidden_size, {"rope": RopeConfig(10000.0), "qkv_bias": False, "o_bias": False, "qk_norm": None}
    own = read.every(AttentionConfig, head_dim=size // read.near.num_attention_heads, **plain).every(
        MLPConfig, bias=False
    )
    params = {
        "attention_norm": reader.scale("layers.0.input_layernorm", size),
        "attention": reader.attention("layers.0", own, size),
        "norm": reader.scale("norm", size),
    }
    layer = reader.chosen.get("exit_layer") or (3 if target.lm.num_layers >= 40 else 2)
    if "exit_layer" not in reader.chosen:
        reader.notes.append(
            f"reads the output of layer {layer}, as published for a target of this depth: the file does not say it, "
            "exit_layer=N sets it"
        )
    return {"config": own, "exit_layer": layer}, params


def _held(names: Collection[str]) -> bool:
    return "layers.0.self_attn.q_proj.weight" in names and not any(".mlp." in name for name in names)


LAYOUT = Layout(read, held=_held)
