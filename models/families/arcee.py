"""Arcee's AFM (huggingface.co/arcee-ai): Llama's layers, whose MLPs have no gate and the square of ReLU."""

from typing import Any

from specjax.models.families.base import Family, Fields
from specjax.models.families.llama import biases
from specjax.models.mlp import MLPConfig
from specjax.models.model_config import ModelConfig


def _read(get: Fields, plain: ModelConfig) -> ModelConfig:
    return biases(get, plain).every(MLPConfig, hidden_act="relu2", gated=False)


def _write(config: ModelConfig) -> dict[str, Any]:
    return {"attention_bias": config.near.qkv_bias, "mlp_bias": config.dense.bias}


ARCEE = Family(
    "arcee", "ArceeForCausalLM",
    {
        "vocab_size": 32000, "hidden_size": 2560, "intermediate_size": 18432, "num_hidden_layers": 32,
        "num_attention_heads": 32, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5,
    },
    _read, _write, {"hidden_act": ("relu2",)}, note="biases of attention and MLP",
)  # fmt: skip
