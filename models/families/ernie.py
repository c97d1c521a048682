"""ERNIE 4.5 (Baidu 2025, huggingface.co/baidu): Llama's layers, whose ropes turn neighbouring channels, and one switch for all
biases."""

import re
from typing import Any

from specjax.models.attention import AttentionConfig
from specjax.models.families.base import Family, Fields
from specjax.models.fields import flag
from specjax.models.mlp import MLPConfig
from specjax.models.model_config import ModelConfig
from specjax.models.tensors import Tensor

_DRAFTING = re.compile(r"^model\.mtp_")


def _read(get: Fields, plain: ModelConfig) -> ModelConfig:
    biased = flag("use_bias", get("use_bias"))
    return plain.every(AttentionConfig, qkv_bias=biased, o_bias=biased).every(MLPConfig, bias=biased)


def _write(config: ModelConfig) -> dict[str, Any]:
    return {"use_bias": config.near.o_bias, "pad_token_id": None}


def text_tensors(tensors: dict[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """The tensors of a folder's model, without those that draft for it."""
    return {name: tensor for name, tensor in tensors.items() if not _DRAFTING.match(name)}


ERNIE = Family(
    "ernie4_5", "Ernie4_5ForCausalLM",
    {
        "vocab_size": 103424, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 18,
        "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 128, "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "tie_word_embeddings": True,
    },
    _read, _write, others=("Ernie4_5_ForCausalLM",), interleaved=True, text=text_tensors,
    note="biases of attention and MLP (`use_bias`)",
)  # fmt: skip
