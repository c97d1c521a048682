"""GLM-4.5 and later models of its architecture (arXiv:2508.06471).

Its router is DeepSeek-V3's. A part of each head is rotated. The first layers have no experts. A file may hold further
layers after the last (multi-token prediction), which a drafter uses.
"""

import functools
from typing import Any

from specjax.models import hf_experts
from specjax.models.attention import AttentionConfig
from specjax.models.errors import ModelError
from specjax.models.families import base
from specjax.models.families.base import Family, Fields
from specjax.models.fields import flag, is_id, is_size, positive, shown
from specjax.models.model_config import ModelConfig

_SHARED = (
    "num_experts_per_tok",
    "moe_intermediate_size",
    "routed_scaling_factor",
    "n_group",
    "topk_group",
    "norm_topk_prob",
)


def _read(get: Fields, plain: ModelConfig) -> ModelConfig:
    dense, shared, layers = get("first_k_dense_replace"), get("n_shared_experts"), plain.num_hidden_layers
    groups = {name: get(name) for name in ("n_group", "topk_group")}
    wrong = [name for name, value in groups.items() if not is_size(value)]
    wrong += [name for name in ("first_k_dense_replace", "n_shared_experts") if not is_id(get(name))]
    if wrong:
        raise ModelError(f"config.json needs whole numbers for: {', '.join(wrong)}")
    if dense >= layers:
        raise ModelError(f"config.json: first_k_dense_replace {shown(dense)} leaves no layer with experts")
    experts = hf_experts.from_hf(
        lambda name: get("n_routed_experts" if name == "num_experts" else name),
        scoring="sigmoid",
        norm_topk_prob=flag("norm_topk_prob", get("norm_topk_prob")),
        routed_scaling_factor=positive("routed_scaling_factor", get("routed_scaling_factor")),
        num_shared_experts=shared,
        **groups,
    )
    biased, normed = (flag(name, get(name)) for name in ("attention_bias", "use_qk_norm"))
    own = plain.every(AttentionConfig, qkv_bias=biased, qk_norm=plain.norm if normed else None)
    return base.sparse(own, experts, [i >= dense for i in range(layers)])


def _write(config: ModelConfig) -> dict[str, Any]:
    experts = config.experts
    if experts is None:
        return {}
    return {name: getattr(experts, name) for name in _SHARED} | {
        "n_routed_experts": experts.num_experts, "n_shared_experts": experts.num_shared_experts,
        "first_k_dense_replace": base.sparse_layers(config).count(False), "attention_bias": config.near.qkv_bias,
        "use_qk_norm": config.near.qk_norm is not None, "partial_rotary_factor": config.rope.share,
        "num_nextn_predict_layers": 0,
    }  # fmt: skip


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
