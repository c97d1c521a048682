"""Qwen2 (arXiv:2407.10671), Qwen3 and Qwen3-MoE (arXiv:2505.09388)."""

from typing import Any

from specjax.models import hf_experts
from specjax.models.attention import AttentionConfig
from specjax.models.errors import ModelError
from specjax.models.families import base
from specjax.models.families.base import Family, Fields
from specjax.models.fields import FULL, SLIDING, flag, is_id, is_size, shown
from specjax.models.model_config import ModelConfig

_USUAL = {"max_position_embeddings": 32768, "num_key_value_heads": 32, "sliding_window": 4096}


def _windows(get: Fields, plain: ModelConfig) -> ModelConfig:
    """Layers from `max_window_layers` on have the window, where `layer_types` does not say which."""
    layers, types = plain.num_hidden_layers, get("layer_types")
    window = get("sliding_window") if flag("use_sliding_window", get("use_sliding_window")) else None
    if types is None:
        start = get("max_window_layers")
        start = 28 if start is None else start
        if start != 0 and not is_size(start):
            raise ModelError(f"config.json: max_window_layers must be a number of layers, not {shown(start)}")
        types = [SLIDING if window and i >= start else FULL for i in range(layers)]
    return base.windows(plain, types, window)


def _windows_to_hf(config: ModelConfig) -> dict[str, Any]:
    types = base.layer_types(config)
    windowed = SLIDING in types
    return {
        "use_sliding_window": windowed, "sliding_window": config.near.window,
        "max_window_layers": types.index(SLIDING) if windowed else config.num_hidden_layers, "layer_types": types,
    }  # fmt: skip


def _read_2(get: Fields, plain: ModelConfig) -> ModelConfig:
    return _windows(get, plain).every(AttentionConfig, qkv_bias=True)


def _read_3(get: Fields, plain: ModelConfig) -> ModelConfig:
    return _windows(get, plain).every(AttentionConfig, **base.attention_bias(get), qk_norm=plain.norm)


def _write_3(config: ModelConfig) -> dict[str, Any]:
    return _windows_to_hf(config) | {"attention_bias": config.near.qkv_bias}


def _read_moe(get: Fields, plain: ModelConfig) -> ModelConfig:
    """Experts in every `decoder_sparse_step`th layer but those of `mlp_only_layers`."""
    step = 1 if get("decoder_sparse_step") is None else get("decoder_sparse_step")
    dense, layers = get("mlp_only_layers") or [], plain.num_hidden_layers
    if not is_size(step) or not isinstance(dense, list) or not all(is_id(i) for i in dense):
        raise ModelError(
            f"config.json: decoder_sparse_step {shown(step)} must be a positive integer, and mlp_only_layers {shown(dense)} "
            "numbers of layers"
        )
    named = lambda name: get("num_local_experts") if name == "num_experts" and get(name) is None else get(name)
    experts = hf_experts.from_hf(named, norm_topk_prob=flag("norm_topk_prob", get("norm_topk_prob")))
    sparse = [i not in dense and (i + 1) % step == 0 for i in range(layers)]
    if not any(sparse):
        raise ModelError("config.json: mlp_only_layers and decoder_sparse_step leave no layer with experts")
    return base.sparse(_read_3(get, plain), experts, sparse)


def _write_moe(config: ModelConfig) -> dict[str, Any]:
    if config.experts is None:
        return {}
    names = ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob")
    return _write_3(config) | {name: getattr(config.experts, name) for name in names} | {
        "decoder_sparse_step": 1,
        "mlp_only_layers": [i for i, sparse in enumerate(base.sparse_layers(config)) if not sparse],
    }  # fmt: skip


QWEN2 = Family(
    "qwen2", "Qwen2ForCausalLM", _USUAL, _read_2, _windows_to_hf,
    others=(
        "MiMoForCausalLM", "Qwen2VLForConditionalGeneration", "qwen2_vl", "Qwen2_5_VLForConditionalGeneration", "qwen2_5_vl",
    ),
    text=base.text_part, note="windows (`use_sliding_window`)",
)  # fmt: skip
QWEN3 = Family(
    "qwen3", "Qwen3ForCausalLM", _USUAL | {"head_dim": 128}, _read_3, _write_3,
    others=("Qwen3VLForConditionalGeneration", "qwen3_vl"), text=base.text_part,
    note="windows (`use_sliding_window`), biases of attention",
)  # fmt: skip
QWEN3_MOE = Family(
    "qwen3_moe", "Qwen3MoeForCausalLM", _USUAL | {"num_key_value_heads": 4}, _read_moe, _write_moe,
    note="layers without experts (`mlp_only_layers`), weights that are not divided by their sum",
)  # fmt: skip
