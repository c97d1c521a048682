"""LFM2, dense and with experts (huggingface.co/LiquidAI): gated short convolutions and, between them, layers of attention whose
queries and keys are normed."""

import dataclasses
from typing import Any

from specjax.models import hf_experts
from specjax.models.attention import AttentionConfig
from specjax.models.errors import ModelError
from specjax.models.families import base
from specjax.models.families.base import Family, Fields
from specjax.models.fields import FULL, flag, is_id, is_positive, is_size, layer_kinds, positive, shown
from specjax.models.mlp import MLPConfig
from specjax.models.model_config import ModelConfig
from specjax.models.states.short_conv import ShortConvConfig
from specjax.models.weights import hf_name

_CONV = "conv"
_ADDED = 1e-6
"""What is added to the sum of a token's scores before they are divided by it."""


def _mixed(get: Fields, plain: ModelConfig, types: Any) -> ModelConfig:
    """With a short convolution in the layers that `types` has as `conv`."""
    kinds = layer_kinds(types, plain.num_hidden_layers, near=_CONV)
    if not is_size(get("conv_L_cache")):
        raise ModelError("config.json needs positive integers for: conv_L_cache")
    if get("conv_dim") not in (None, get("hidden_size")):
        raise ModelError(
            f"config.json: conv_dim {shown(get('conv_dim'))} is not supported; convolutions have the model's width "
            f"{get('hidden_size')}"
        )
    conv = ShortConvConfig(get("conv_L_cache"), flag("conv_bias", get("conv_bias")))
    own = plain.every(AttentionConfig, qk_norm=plain.norm)
    return own.each(lambda i, layer: dataclasses.replace(layer, mixer=conv) if kinds[i] == _CONV else layer)


def _inner_width(get: Fields) -> int:
    """The width of MLPs; files give that of an MLP without a gate, and by what to multiply and round it."""
    width = get("intermediate_size")
    if not flag("block_auto_adjust_ff_dim", get("block_auto_adjust_ff_dim")):
        return width
    width, factor, multiple = 2 * width // 3, get("block_ffn_dim_multiplier"), get("block_multiple_of")
    if factor is None:
        return width
    if not is_positive(factor) or not is_size(multiple):
        raise ModelError(
            f"config.json: block_ffn_dim_multiplier {shown(factor)} must be a positive number, and block_multiple_of "
            f"{shown(multiple)} a positive integer"
        )
    return -(-int(factor * width) // multiple) * multiple


def _read(get: Fields, plain: ModelConfig) -> ModelConfig:
    layers, types = range(plain.num_hidden_layers), get("layer_types")
    if types is None:
        full = get("full_attn_idxs")
        full = list(layers) if full is None else full
        if not isinstance(full, list) or any(not is_id(i) or i not in layers for i in full):
            raise ModelError(f"config.json: full_attn_idxs must be numbers of layers, not {shown(full)}")
        types = [FULL if i in full else _CONV for i in layers]
    return _mixed(get, plain, types).every(MLPConfig, intermediate_size=_inner_width(get))


def _kept(config: ModelConfig) -> dict[str, Any]:
    """What both say of their layers."""
    convs = [one for one in config.state_mixers if isinstance(one, ShortConvConfig)] or [ShortConvConfig()]
    return {
        "layer_types": [_CONV if isinstance(one.mixer, ShortConvConfig) else FULL for one in config.layers],
        "conv_L_cache": convs[0].kernel_size, "conv_bias": convs[0].bias,
    }  # fmt: skip


def _write(config: ModelConfig) -> dict[str, Any]:
    return _kept(config) | {"block_auto_adjust_ff_dim": False}


def _read_moe(get: Fields, plain: ModelConfig) -> ModelConfig:
    dense, layers = get("num_dense_layers"), plain.num_hidden_layers
    if not is_id(dense) or dense >= layers:
        raise ModelError(f"config.json: num_dense_layers {shown(dense)} leaves no layer with experts")
    experts = hf_experts.from_hf(
        get, scoring="sigmoid", norm_topk_prob=flag("norm_topk_prob", get("norm_topk_prob")), added_sum=_ADDED,
        routed_scaling_factor=positive("routed_scaling_factor", get("routed_scaling_factor")),
    )  # fmt: skip
    return base.sparse(_mixed(get, plain, get("layer_types")), experts, [i >= dense for i in range(layers)])


def _write_moe(config: ModelConfig) -> dict[str, Any]:
    experts = config.experts
    if experts is None:
        return {}
    named = ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "routed_scaling_factor", "norm_topk_prob")
    return _kept(config) | {name: getattr(experts, name) for name in named} | {
        "num_dense_layers": base.sparse_layers(config).count(False), "use_expert_bias": True,
    }  # fmt: skip


_OUTER = {"model.norm": "model.embedding_norm"}
_MODULES = {
    "input_layernorm": "operator_norm", "post_attention_layernorm": "ffn_norm", "self_attn.o_proj": "self_attn.out_proj",
    "self_attn.q_norm": "self_attn.q_layernorm", "self_attn.k_norm": "self_attn.k_layernorm",
    "mlp.gate_proj": "feed_forward.w1", "mlp.up_proj": "feed_forward.w3", "mlp.down_proj": "feed_forward.w2",
    "short_conv.inner": "conv.in_proj#0", "short_conv.outer": "conv.in_proj#1", "short_conv.read": "conv.in_proj#2",
    "short_conv.conv": "conv.conv", "short_conv.mixed": "conv.out_proj",
}  # fmt: skip
_EXPERTS = {
    ".mlp.gate.bias": ".feed_forward.expert_bias", ".mlp.gate.": ".feed_forward.gate.",
    ".mlp.experts.": ".feed_forward.experts.",
    ".gate_proj.": ".w1.", ".up_proj.": ".w3.", ".down_proj.": ".w2.",
}  # fmt: skip


def layout(path: tuple[Any, ...]) -> tuple[str, bool]:
    """`hf_name`, with the parameters of short convolutions."""
    match [getattr(key, "key", key) for key in path]:
        case ["layers", layer, "short_conv", module, kind]:
            name = f"model.layers.{layer}.short_conv.{module}.{'bias' if kind == 'bias' else 'weight'}"
            return name, kind in ("kernel", "taps")
    return hf_name(path)


def tensor_name(name: str) -> str:
    """LFM2's name of a tensor that has this name in Llama's layout.

    >>> tensor_name("model.layers.3.mlp.experts.5.up_proj.weight")
    'model.layers.3.feed_forward.experts.5.w3.weight'
    >>> tensor_name("model.layers.3.short_conv.conv.weight")
    'model.layers.3.conv.conv.weight~'
    """
    own = base.renamed(name, _MODULES, _OUTER)
    for ours, theirs in _EXPERTS.items():
        own = own.replace(ours, theirs)
    return f"{own}~" if own.endswith(".conv.conv.weight") else own


_FIELDS = {
    "rms_norm_eps": ("norm_eps",), "hidden_act": (),
    "tie_word_embeddings": ("tie_embedding", "tie_word_embeddings"),
}  # fmt: skip
_USUAL = {
    "vocab_size": 65536, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "max_position_embeddings": 128000, "rms_norm_eps": 1e-5, "rope_theta": 1e6, "tie_word_embeddings": True,
    "conv_L_cache": 3, "conv_bias": False,
}  # fmt: skip
_NOTE = (
    "which layers are convolutions (`layer_types`), over how many tokens (`conv_L_cache`), biases of them (`conv_bias`)"
)
LFM2 = Family(
    "lfm2", "Lfm2ForCausalLM",
    _USUAL | {
        "hidden_size": 2560, "intermediate_size": 12288, "block_auto_adjust_ff_dim": True, "block_multiple_of": 256,
        "block_ffn_dim_multiplier": 1.0,
    },
    _read, _write, {}, names=tensor_name, layout=layout,
    fields=_FIELDS | {"intermediate_size": ("block_ff_dim", "intermediate_size")},
    note=f"{_NOTE}; all attention without `full_attn_idxs` and `layer_types`; how the MLP's width is rounded",
)  # fmt: skip
LFM2_MOE = Family(
    "lfm2_moe", "Lfm2MoeForCausalLM",
    _USUAL | {
        "hidden_size": 2048, "intermediate_size": 7168, "moe_intermediate_size": 1792, "num_dense_layers": 2,
        "num_experts": 32, "num_experts_per_tok": 4, "routed_scaling_factor": 1.0, "norm_topk_prob": True,
    },
    _read_moe, _write_moe, {"use_expert_bias": (True,)}, names=tensor_name, layout=layout, fields=_FIELDS,
    note=f"{_NOTE}; how many layers have no experts (`num_dense_layers`)",
)  # fmt: skip
