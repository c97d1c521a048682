"""Llama 2 (arXiv:2307.09288) and 3 (arXiv:2407.21783); Mistral (arXiv:2310.06825), in which all layers have a window,
or none."""

from typing import Any

from specjax.models.attention import AttentionConfig
from specjax.models.families import base
from specjax.models.families.base import Family, Fields
from specjax.models.fields import SLIDING, flag
from specjax.models.mlp import MLPConfig
from specjax.models.model_config import ModelConfig


def biases(get: Fields, plain: ModelConfig) -> ModelConfig:
    """The config with biases in attention and MLPs, as a file says."""
    biased = plain.every(AttentionConfig, **base.attention_bias(get))
    return biased.every(MLPConfig, bias=flag("mlp_bias", get("mlp_bias")))


def _write_llama(config: ModelConfig) -> dict[str, Any]:
    return {"attention_bias": config.near.qkv_bias, "mlp_bias": config.dense.bias}


def all_windowed(get: Fields, plain: ModelConfig) -> ModelConfig:
    """The config with the window in every layer, if there is one."""
    window = get("sliding_window")
    return plain if window is None else base.windows(plain, [SLIDING] * plain.num_hidden_layers, window)


LLAMA = Family(
    "llama", "LlamaForCausalLM", {"max_position_embeddings": 2048}, biases, _write_llama,
    others=("MedusaLlamaModel", "MedusaModelLlama"),
    note="biases of attention (`attention_bias`) and MLP (`mlp_bias`)",
)  # fmt: skip
MISTRAL = Family(
    "mistral", "MistralForCausalLM",
    {"max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096}, all_windowed,
    lambda config: {"sliding_window": config.near.window},
    others=("MedusaModelMistral", "Mistral3ForConditionalGeneration", "mistral3"), text=base.text_part,
)  # fmt: skip
