"""Llama 2 (arXiv:2307.09288) and 3 (arXiv:2407.21783); Mistral (arXiv:2310.06825): all of its layers have a window, or none."""

from typing import Any

from specjax.models.families import base
from specjax.models.families.base import Family, Fields
from specjax.models.fields import SLIDING, flag
from specjax.models.llama_config import LlamaConfig


def _read_llama(get: Fields) -> dict[str, Any]:
    return base.attention_bias(get) | {"mlp_bias": flag("mlp_bias", get("mlp_bias"))}


def _write_llama(config: LlamaConfig) -> dict[str, Any]:
    return {"attention_bias": config.qkv_bias, "mlp_bias": config.mlp_bias}


def all_windowed(get: Fields) -> dict[str, Any]:
    """Every layer has the window, where there is one."""
    window, layers = get("sliding_window"), get("num_hidden_layers")
    return {} if window is None else base.windows([SLIDING] * layers, window, layers)


LLAMA = Family(
    "LlamaForCausalLM", {"max_position_embeddings": 2048}, _read_llama, _write_llama,
    others=("MedusaLlamaModel", "MedusaModelLlama"),
    note="biases of attention (`attention_bias`) and MLP (`mlp_bias`)",
)  # fmt: skip
MISTRAL = Family(
    "MistralForCausalLM", {"max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096}, all_windowed,
    lambda config: {"sliding_window": config.sliding_window},
    others=("MedusaModelMistral",),
)  # fmt: skip
