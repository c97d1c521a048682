"""Ling 2 and Ring 2 (Ant Group 2025, arXiv:2510.22115; `bailing_moe`): DeepSeek-V3's routing, and one matrix for q, k and v.

transformers does not have them; the code that is published with them is in github.com/inclusionAI/Ling-V2. LLaDA 2 has
their layers, fields and tensors (`specjax.models.llada2`). Layers after the last (multi-token prediction) are a drafter's.
"""

import functools
from typing import Any

from specjax.models import hf_experts
from specjax.models.attention import AttentionConfig
from specjax.models.errors import ModelError
from specjax.models.families import base
from specjax.models.families.base import SILU, Family, Fields
from specjax.models.fields import flag, is_id, shown
from specjax.models.model_config import ModelConfig

_OF_EXPERTS = (
    "num_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "routed_scaling_factor",
    "n_group",
    "topk_group",
)
_MODULES = {
    "model.embed_tokens": "model.word_embeddings", "self_attn.o_proj": "attention.dense",
    "self_attn.q_norm": "attention.query_layernorm", "self_attn.k_norm": "attention.key_layernorm",
}  # fmt: skip
_JOINED = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")


def _read(get: Fields, plain: ModelConfig) -> ModelConfig:
    shared, dense = (get(name) or 0 for name in ("num_shared_experts", "first_k_dense_replace"))
    given = {"num_shared_experts": shared, "first_k_dense_replace": dense}
    if missing := [name for name, value in given.items() if not is_id(value)]:
        raise ModelError(f"config.json needs whole numbers for: {', '.join(missing)}")
    normed = get("num_experts_per_tok") != 1  # the weight of a single expert is its score
    experts = hf_experts.by_groups(get, norm_topk_prob=normed, num_shared_experts=shared)
    if dense >= plain.num_hidden_layers:
        raise ModelError(f"config.json: first_k_dense_replace {dense} leaves no layer with experts")
    channels, share = plain.near.rotary_dim, plain.rope.share
    if channels % 2 or not channels:
        raise ModelError(
            f"config.json: partial_rotary_factor {shown(share)} rotates {channels} channels, which must be an even number"
        )
    own = plain.every(
        AttentionConfig, qk_norm=plain.norm if flag("use_qk_norm", get("use_qk_norm")) else None,
        qkv_bias=flag("use_qkv_bias", get("use_qkv_bias")), o_bias=flag("use_bias", get("use_bias")),
    )  # fmt: skip
    return base.sparse(own, experts, [i >= dense for i in range(plain.num_hidden_layers)])


def write(config: ModelConfig) -> dict[str, Any]:
    """See `Family.write`."""
    c, experts = config, config.experts
    if experts is None:
        return {}
    return {name: getattr(experts, name) for name in (*_OF_EXPERTS, "num_shared_experts")} | {
        "use_qk_norm": c.near.qk_norm is not None, "use_qkv_bias": c.near.qkv_bias, "use_bias": c.near.o_bias,
        "first_k_dense_replace": base.sparse_layers(c).count(False), "partial_rotary_factor": c.rope.share,
        "num_nextn_predict_layers": 0,
    }  # fmt: skip


def tensor_name(name: str) -> str:
    """The name of a tensor that has this name in Llama's layout; see `specjax.models.weights.Names`.

    >>> tensor_name("model.layers.3.self_attn.k_proj.weight")
    'model.layers.3.attention.query_key_value.weight#1'
    """
    module, _, kind = name.rpartition(".")
    if module.endswith(".mlp.gate") and kind == "bias":
        return f"{module}.expert_bias"
    for i, joined in enumerate(_JOINED):
        if module.endswith(joined):
            return f"{module.removesuffix(joined)}attention.query_key_value.{kind}#{i}"
    for ours, theirs in _MODULES.items():
        if module.endswith(ours):
            return f"{module.removesuffix(ours)}{theirs}.{kind}"
    return name


LING_2 = Family(
    "bailing_moe", "BailingMoeV2ForCausalLM",
    {
        "max_position_embeddings": 32768, "head_dim": None, "num_experts": 256, "num_experts_per_tok": 8,
        "moe_intermediate_size": 512, "num_shared_experts": 1, "n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5,
        "first_k_dense_replace": 1, "partial_rotary_factor": 0.5, "use_qk_norm": True,
    },
    _read, write,
    SILU | {
        "score_function": ("sigmoid", None), "moe_router_enable_expert_bias": (True, None), "norm_topk_prob": (True, None),
        "norm_head": (False, None), "use_rmsnorm": (True, None), "use_sliding_window": (False, None),
    },
    rope=functools.partial(base.rope, partial=True), names=tensor_name,
    note="norms of q and k (`use_qk_norm`), biases (`use_qkv_bias`, `use_bias`), groups of experts (`n_group`); transformers "
    "does not read it",
)  # fmt: skip
