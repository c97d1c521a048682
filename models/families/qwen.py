"""Qwen2 and Qwen2-MoE (arXiv:2407.10671), Qwen3 and Qwen3-MoE (arXiv:2505.09388)."""

import dataclasses
from collections.abc import Callable
from typing import Any

from specjax.models import hf_experts
from specjax.models.attention import AttentionConfig
from specjax.models.errors import ModelError
from specjax.models.experts import ExpertsConfig
from specjax.models.families import base
from specjax.models.families.base import Family, Fields
from specjax.models.fields import FULL, SLIDING, flag, is_id, is_size, shown
from specjax.models.mlp import MLPConfig
from specjax.models.model_config import ModelConfig

_USUAL = {"max_position_embeddings": 32768, "num_key_value_heads": 32, "sliding_window": 4096}


_Has = Callable[[int, int], bool]
"""Whether a layer has the window, from its number and `max_window_layers`, where `layer_types` does not say it."""


def windows_from(
    get: Fields, plain: ModelConfig, window: Any, usual: int, has: _Has = lambda layer, start: layer >= start
) -> ModelConfig:
    """With the window in layers from `max_window_layers` on, where `layer_types` does not say in which.

    Args:
      get: a field of the file.
      plain: the model without windows.
      window: the window; None: there is none.
      usual: `max_window_layers` where the file leaves it out.
      has: another rule.

    Raises:
      ModelError: on wrong fields.
    """
    layers, types = plain.num_hidden_layers, get("layer_types")
    if types is None:
        start = get("max_window_layers")
        start = usual if start is None else start
        if start != 0 and not is_size(start):
            raise ModelError(f"config.json: max_window_layers must be a number of layers, not {shown(start)}")
        types = [SLIDING if window and has(i, start) else FULL for i in range(layers)]
    return base.windows(plain, types, window)


def _windows(get: Fields, plain: ModelConfig, **rule: _Has) -> ModelConfig:
    window = get("sliding_window") if flag("use_sliding_window", get("use_sliding_window")) else None
    return windows_from(get, plain, window, 28, **rule)


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


def experts_of(get: Fields, layers: int) -> tuple[ExpertsConfig, list[bool]]:
    """Experts, and the layers that have them: every `decoder_sparse_step`th but those of `mlp_only_layers`."""
    step = 1 if get("decoder_sparse_step") is None else get("decoder_sparse_step")
    dense = get("mlp_only_layers") or []
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
    return experts, sparse


def experts_to_hf(config: ModelConfig) -> dict[str, Any]:
    names = ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob")
    return {name: getattr(config.experts, name) for name in names} | {
        "decoder_sparse_step": 1,
        "mlp_only_layers": [i for i, sparse in enumerate(base.sparse_layers(config)) if not sparse],
    }


def _read_2_moe(get: Fields, plain: ModelConfig) -> ModelConfig:
    """Where `layer_types` does not say it, every second layer before `max_window_layers` has the window, as in transformers."""
    layers, width = plain.num_hidden_layers, get("shared_expert_intermediate_size")
    if not is_size(width):
        raise ModelError("config.json needs positive integers for: shared_expert_intermediate_size")
    experts, sparse = experts_of(get, layers)
    experts = dataclasses.replace(experts, shared=MLPConfig(width), shared_gate=True)
    own = _windows(get, plain, has=lambda layer, end: layer % 2 == 0 and layer < end)
    return base.sparse(own.every(AttentionConfig, qkv_bias=flag("qkv_bias", get("qkv_bias"))), experts, sparse)


def _write_2_moe(config: ModelConfig) -> dict[str, Any]:
    if config.experts is None or config.experts.shared is None:
        return {}
    return _windows_to_hf(config) | experts_to_hf(config) | {
        "shared_expert_intermediate_size": config.experts.shared.intermediate_size, "qkv_bias": config.near.qkv_bias
    }  # fmt: skip


def tensor_name(name: str) -> str:
    """Qwen2-MoE's name of a tensor that has this name in Llama's layout."""
    return name.replace(".mlp.shared_experts.", ".mlp.shared_expert.")


def _read_moe(get: Fields, plain: ModelConfig) -> ModelConfig:
    return base.sparse(_read_3(get, plain), *experts_of(get, plain.num_hidden_layers))


def _write_moe(config: ModelConfig) -> dict[str, Any]:
    return {} if config.experts is None else _write_3(config) | experts_to_hf(config)


QWEN2 = Family(
    "qwen2", "Qwen2ForCausalLM", _USUAL, _read_2, _windows_to_hf,
    others=(
        "MiMoForCausalLM", "Qwen2VLForConditionalGeneration", "qwen2_vl", "Qwen2_5_VLForConditionalGeneration", "qwen2_5_vl",
    ),
    text=base.text_part, note="windows (`use_sliding_window`)",
)  # fmt: skip
QWEN2_MOE = Family(
    "qwen2_moe", "Qwen2MoeForCausalLM",
    _USUAL | {
        "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 24,
        "num_attention_heads": 16, "num_key_value_heads": 16, "num_experts": 60, "num_experts_per_tok": 4,
        "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632, "qkv_bias": True,
    },
    _read_2_moe, _write_2_moe, names=tensor_name,
    note="windows (`use_sliding_window`), layers without experts (`mlp_only_layers`), no biases (`qkv_bias`), weights that are "
    "divided by their sum (`norm_topk_prob`)",
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
