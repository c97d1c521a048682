"""MiniMax-M2 (huggingface.co/MiniMaxAI): experts in every layer, queries and keys that are normed over all heads at once, and
ropes over a part of each head."""

from typing import Any

from specjax.models import hf_experts
from specjax.models.attention import AttentionConfig
from specjax.models.errors import ModelError
from specjax.models.families import base, mixtral
from specjax.models.families.base import SILU, Family, Fields
from specjax.models.fields import is_size, shown
from specjax.models.model_config import ModelConfig
from specjax.models.ropes import RopeConfig


def _rope(get: Fields) -> RopeConfig:
    """Published files say how many channels of a head are rotated, and not which share."""
    turned = get("rotary_dim")
    if turned is None:
        return base.rope(get, partial=True)
    if not is_size(turned) or turned > get("head_dim"):
        raise ModelError(f"config.json: rotary_dim must be a number of channels of a head, not {shown(turned)}")
    share = {"partial_rotary_factor": turned / get("head_dim")}
    return base.rope(lambda name: share.get(name) if get(name) is None else get(name), partial=True)


def _read(get: Fields, plain: ModelConfig) -> ModelConfig:
    kinds = get("attn_type_list")
    if kinds is not None and (not isinstance(kinds, list) or any(kind != 1 for kind in kinds)):
        raise ModelError(f"config.json: attn_type_list {shown(kinds)} has layers other than attention (1)")
    experts = hf_experts.from_hf(hf_experts.local(get), scoring="sigmoid")
    return base.sparse(plain.every(AttentionConfig, qk_wide_norm=plain.norm), experts)


def _write(config: ModelConfig) -> dict[str, Any]:
    if config.experts is None:
        return {}
    return hf_experts.local_to_hf(config.experts) | {"rotary_dim": config.near.rotary_dim}


def tensor_name(name: str) -> str:
    """MiniMax-M2's name of a tensor that has this name in Llama's layout."""
    return mixtral.tensor_name(name).replace(".gate.bias", ".e_score_correction_bias")


MINIMAX_M2 = Family(
    "minimax_m2", "MiniMaxM2ForCausalLM",
    {
        "vocab_size": 200064, "hidden_size": 3072, "intermediate_size": 1536, "num_hidden_layers": 62,
        "num_attention_heads": 48, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 196608,
        "rope_theta": 5e6, "num_local_experts": 256, "num_experts_per_tok": 8,
    },
    _read, _write,
    SILU | {
        "scoring_func": ("sigmoid", None), "use_routing_bias": (True, None), "shared_intermediate_size": (0, None),
        "qk_norm_type": ("per_layer", None),
    },
    rope=_rope, names=tensor_name,
    note="how many channels of a head are rotated (`rotary_dim`, `partial_rotary_factor`)",
)  # fmt: skip
