"""LongSpec's published layers (sail-sg/LongSpec): `LlamaGlideDecoderLayer` and `Qwen2GlideDecoderLayer`."""

from collections.abc import Collection, Mapping
from typing import Any

from specjax.draft.heads.layout import Layout, Reader, Sure, check_flags, check_width, layer_config
from specjax.models.attention import AttentionConfig

_NORMS = {
    "attention_norm": "input_layernorm", "cross_norm": "post_self_attention_layernorm",
    "mlp_norm": "post_cross_attention_layernorm",
}  # fmt: skip


def read(reader: Reader, config: dict[str, Any], target: Any) -> tuple[dict[str, Any], Any]:
    """Fields and parameters of a layer. The authors' attention to the target has products of keys and values that are never
    used; they are read past."""
    check_flags(reader, config)
    own = layer_config(reader, config, target)
    check_width(reader, own.hidden_size, target)
    own = own.every(AttentionConfig, qkv_bias=True, o_bias=False)
    size, mixer = own.hidden_size, own.attention()
    heads, kv = mixer.num_attention_heads * mixer.head_dim, mixer.num_key_value_heads * mixer.head_dim
    for name in ("k", "v"):
        if f"cross_attn.{name}_proj.weight" in reader.tensors:
            reader.linear(f"cross_attn.{name}_proj", size, kv, bias=True)
    attention = {n: reader.linear(f"self_attn.{n}_proj", size, heads if n == "q" else kv, bias=True) for n in "qkv"}
    inner = own.dense.intermediate_size
    shapes = {"gate": (size, inner), "up": (size, inner), "down": (inner, size)}
    params = {
        "attention": {**attention, "o": reader.linear("self_attn.o_proj", heads, size)},
        "cross": {
            "q": reader.linear("cross_attn.q_proj", size, heads, bias=True),
            "o": reader.linear("cross_attn.o_proj", heads, size),
        },
        "mlp": {name: reader.linear(f"mlp.{name}_proj", *shape) for name, shape in shapes.items()},
        **{name: reader.scale(stored, size) for name, stored in _NORMS.items()},
    }
    return {"config": own}, params


def _said(config: Mapping[str, Any]) -> Sure:
    return Sure.NAMED if "glidedecoderlayer" in str(config.get("architectures")).lower() else Sure.NO


def _held(names: Collection[str]) -> bool:
    return "cross_attn.q_proj.weight" in names and "self_attn.q_proj.weight" in names


LAYOUT = Layout(read, said=_said, held=_held)
