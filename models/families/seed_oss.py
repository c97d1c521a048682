"""Seed-OSS (ByteDance 2025, huggingface.co/ByteDance-Seed): Llama's layers with biases on q, k and v, and with heads
whose total width exceeds the model's."""

from typing import Any

from specjax.models.attention import AttentionConfig
from specjax.models.families.base import Family, Fields
from specjax.models.fields import flag
from specjax.models.mlp import MLPConfig
from specjax.models.model_config import ModelConfig

_BIASES = {"qkv_bias": "attention_bias", "o_bias": "attention_out_bias"}


def _read(get: Fields, plain: ModelConfig) -> ModelConfig:
    own = plain.every(AttentionConfig, **{ours: flag(name, get(name)) for ours, name in _BIASES.items()})
    return own.every(MLPConfig, bias=flag("mlp_bias", get("mlp_bias")))


def _write(config: ModelConfig) -> dict[str, Any]:
    biases = {name: getattr(config.near, ours) for ours, name in _BIASES.items()}
    return biases | {"mlp_bias": config.dense.bias}


SEED_OSS = Family(
    "seed_oss", "SeedOssForCausalLM",
    {
        "vocab_size": 155136, "hidden_size": 4096, "intermediate_size": 27648, "num_hidden_layers": 64,
        "num_attention_heads": 80, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 524288,
        "attention_bias": True,
    },
    _read, _write, note="biases of q, k and v (`attention_bias`), of o (`attention_out_bias`) and of the MLP",
)  # fmt: skip
