"""Hunyuan dense (huggingface.co/tencent): Llama's layers, whose heads of queries and keys are normalised after the rope.
A fixed factor stretches the rope's base."""

from typing import Any

from specjax.models.attention import AttentionConfig
from specjax.models.families import base
from specjax.models.families.base import SILU, Family, Fields
from specjax.models.fields import positive
from specjax.models.model_config import ModelConfig
from specjax.models.ropes import RopeConfig


def _rope(get: Fields) -> RopeConfig:
    """A rope of type `dynamic` with an `alpha` does not depend on the text. Its base is `theta * alpha ** (H / (H - 2))`."""
    said = base.rope_fields(get)
    if "dynamic" not in (said.get("rope_type"), said.get("type")) or not said.get("alpha"):
        return base.rope(get)
    found = base.rope(base.with_rope(get, {"rope_theta": said.get("rope_theta")}))
    width = get("head_dim") or get("hidden_size") // get("num_attention_heads")
    return RopeConfig(found.theta * positive("alpha", said["alpha"]) ** (width / (width - 2)))


def _read(get: Fields, plain: ModelConfig) -> ModelConfig:
    return plain.every(AttentionConfig, **base.attention_bias(get), qk_norm=plain.norm, norm_first=False)


def _write(config: ModelConfig) -> dict[str, Any]:
    return {"attention_bias": config.near.qkv_bias}


def tensor_name(name: str) -> str:
    """Hunyuan's name of a tensor that has this name in Llama's layout."""
    return name.replace(".self_attn.q_norm.", ".self_attn.query_layernorm.").replace(
        ".self_attn.k_norm.", ".self_attn.key_layernorm."
    )


HUNYUAN = Family(
    "hunyuan_v1_dense", "HunYuanDenseV1ForCausalLM",
    {
        "vocab_size": 290943, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
        "num_attention_heads": 32, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5,
    },
    _read, _write, SILU | {"num_experts": (1, 0, None)},  # one expert is the MLP
    rope=_rope, names=tensor_name, note="a longer base of the rope (`alpha`), biases of attention",
)  # fmt: skip
