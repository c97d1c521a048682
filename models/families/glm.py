"""GLM-4.5 and later models of its architecture (arXiv:2508.06471); dots.llm1 (arXiv:2506.05767).

Their routers are DeepSeek-V3's, and their first layers have no experts. GLM rotates a part of each head. A file may hold
further layers after the last (multi-token prediction), which a drafter uses.
"""

import functools
from typing import Any

from specjax.models import hf_experts
from specjax.models.attention import AttentionConfig
from specjax.models.errors import ModelError
from specjax.models.families import base
from specjax.models.families.base import Family, Fields
from specjax.models.families.qwen import windows_from
from specjax.models.fields import flag, is_id, shown
from specjax.models.model_config import ModelConfig


def sparse(get: Fields, plain: ModelConfig, **fields: Any) -> ModelConfig:
    """With DeepSeek's experts in the layers from `first_k_dense_replace` on; `fields` are as for `hf_experts.by_groups`."""
    dense, shared, layers = get("first_k_dense_replace"), get("n_shared_experts"), plain.num_hidden_layers
    if wrong := [name for name in ("first_k_dense_replace", "n_shared_experts") if not is_id(get(name))]:
        raise ModelError(f"config.json needs whole numbers for: {', '.join(wrong)}")
    if dense >= layers:
        raise ModelError(f"config.json: first_k_dense_replace {shown(dense)} leaves no layer with experts")
    normed = flag("norm_topk_prob", get("norm_topk_prob"))
    experts = hf_experts.by_groups(hf_experts.routed(get), norm_topk_prob=normed, num_shared_experts=shared, **fields)
    return base.sparse(plain, experts, [i >= dense for i in range(layers)])


def _read(get: Fields, plain: ModelConfig) -> ModelConfig:
    biased, normed = (flag(name, get(name)) for name in ("attention_bias", "use_qk_norm"))
    return sparse(get, plain.every(AttentionConfig, qkv_bias=biased, qk_norm=plain.norm if normed else None))


def sparse_to_hf(config: ModelConfig) -> dict[str, Any]:
    """The fields that `sparse` reads, and the switch of biases."""
    experts = config.experts
    if experts is None:
        return {}
    return hf_experts.routed_to_hf(experts) | {
        "n_shared_experts": experts.num_shared_experts,
        "first_k_dense_replace": base.sparse_layers(config).count(False), "attention_bias": config.near.qkv_bias,
    }  # fmt: skip


def _write(config: ModelConfig) -> dict[str, Any]:
    return sparse_to_hf(config) | {
        "use_qk_norm": config.near.qk_norm is not None, "partial_rotary_factor": config.rope.share,
        "num_nextn_predict_layers": 0,
    }  # fmt: skip


def _read_dots(get: Fields, plain: ModelConfig) -> ModelConfig:
    own = plain.every(AttentionConfig, **base.attention_bias(get), qk_norm=plain.norm)
    return sparse(get, windows_from(get, own, get("sliding_window"), 62))


def _write_dots(config: ModelConfig) -> dict[str, Any]:
    return sparse_to_hf(config) | {"layer_types": base.layer_types(config), "sliding_window": config.near.window}


def tensor_name(name: str) -> str:
    """GLM's name of a tensor that has this name in Llama's layout."""
    return name.replace(".mlp.gate.bias", ".mlp.gate.e_score_correction_bias")


GLM4_MOE = Family(
    "glm4_moe", "Glm4MoeForCausalLM",
    {
        "max_position_embeddings": 131072, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "partial_rotary_factor": 0.5,
        "num_experts_per_tok": 8, "n_routed_experts": 128, "n_shared_experts": 1, "moe_intermediate_size": 1408,
        "routed_scaling_factor": 1.0, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "norm_topk_prob": True,
    },
    _read, _write, rope=functools.partial(base.rope, partial=True), names=tensor_name,
    note="norms of q and k (`use_qk_norm`), biases of q, k and v (`attention_bias`), groups of experts (`n_group`)",
)  # fmt: skip
DOTS1 = Family(
    "dots1", "Dots1ForCausalLM",
    {
        "vocab_size": 152064, "hidden_size": 4608, "intermediate_size": 10944, "num_hidden_layers": 62,
        "num_attention_heads": 32, "num_key_value_heads": 32, "max_position_embeddings": 2048,
        "moe_intermediate_size": 1408, "routed_scaling_factor": 1.0, "n_group": 1, "topk_group": 1,
        "first_k_dense_replace": 0, "sliding_window": 4096,
    },
    _read_dots, _write_dots, names=tensor_name,
    note="layers with a window (`layer_types`, `max_window_layers`), biases of attention, groups of experts (`n_group`)",
)  # fmt: skip
