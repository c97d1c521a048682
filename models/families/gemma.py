"""Gemma 1 (arXiv:2403.08295): Llama's layers, with GELU, norms that scale by 1 more than their weights, and embeddings times
the square root of their width."""

from typing import Any

from specjax.models.attention import AttentionConfig
from specjax.models.families import base
from specjax.models.families.base import Family, Fields
from specjax.models.mlp import MLPConfig
from specjax.models.model_config import EmbeddingConfig, ModelConfig
from specjax.models.norms import NormConfig

_GELU = "gelu_pytorch_tanh"


def _read(get: Fields, plain: ModelConfig) -> ModelConfig:
    own = plain.every(AttentionConfig, **base.attention_bias(get)).every(NormConfig, kind="offset")
    return own.every(MLPConfig, hidden_act=_GELU).every(EmbeddingConfig, scale=plain.hidden_size**0.5)


def _write(config: ModelConfig) -> dict[str, Any]:
    return {"attention_bias": config.near.qkv_bias}


GEMMA = Family(
    "gemma", "GemmaForCausalLM",
    {
        "vocab_size": 256000, "hidden_size": 3072, "intermediate_size": 24576, "num_hidden_layers": 28,
        "num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 256, "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
    },
    _read, _write,
    {
        "hidden_act": (_GELU, "gelu"),  # which published files say, and mean the approximation
        "hidden_activation": (_GELU, "gelu", None), "use_bidirectional_attention": (False, None),
    },
    note="biases of attention",
)  # fmt: skip
