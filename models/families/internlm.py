"""InternLM3 (huggingface.co/internlm): Llama's layers. Biases of queries, keys and values are one switch
(`qkv_bias`), and those of all other products another (`bias`)."""

from typing import Any

from specjax.models.attention import AttentionConfig
from specjax.models.families.base import Family, Fields
from specjax.models.fields import flag
from specjax.models.mlp import MLPConfig
from specjax.models.model_config import ModelConfig


def _read(get: Fields, plain: ModelConfig) -> ModelConfig:
    """transformers writes `attention_bias` and `mlp_bias`, and the published files the names of their own code."""
    said = lambda theirs, own: flag(own, get(own) if get(theirs) is None else get(theirs))
    inner, others = said("attention_bias", "qkv_bias"), said("mlp_bias", "bias")
    return plain.every(AttentionConfig, qkv_bias=inner, o_bias=others).every(MLPConfig, bias=others)


def _write(config: ModelConfig) -> dict[str, Any]:
    return {"qkv_bias": config.near.qkv_bias, "bias": config.dense.bias}


INTERNLM_3 = Family(
    "internlm3", "InternLM3ForCausalLM",
    {
        "vocab_size": 128512, "hidden_size": 4096, "intermediate_size": 10240, "num_hidden_layers": 48,
        "num_attention_heads": 32, "num_key_value_heads": 2, "head_dim": 128, "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-5,
    },
    _read, _write, note="biases of attention and MLP, the rope `dynamic`",
)  # fmt: skip
