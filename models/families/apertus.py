"""Apertus (arXiv:2509.14233): Llama's layers, with norms of the heads of queries and keys, and MLPs without a gate whose
activation has learned slopes."""

from typing import Any

from specjax.models import weights
from specjax.models.attention import AttentionConfig
from specjax.models.families import base
from specjax.models.families.base import Family, Fields
from specjax.models.mlp import MLPConfig
from specjax.models.model_config import ModelConfig
from specjax.models.ropes import RopeConfig

_ROPE = {
    "rope_type": "llama3", "rope_theta": 12e6, "factor": 8.0, "original_max_position_embeddings": 8192,
    "low_freq_factor": 1.0, "high_freq_factor": 4.0,
}  # fmt: skip
"""That of a file that describes none."""


def _rope(get: Fields) -> RopeConfig:
    return base.rope(base.with_rope(get, base.rope_fields(get, _ROPE)))


def _read(get: Fields, plain: ModelConfig) -> ModelConfig:
    own = plain.every(AttentionConfig, **base.attention_bias(get), qk_norm=plain.norm)
    return own.every(MLPConfig, hidden_act="xielu", gated=False)


def _write(config: ModelConfig) -> dict[str, Any]:
    return {"attention_bias": config.near.qkv_bias, "rope_parameters": base.said(config.rope)}


_NORMS = {"attention_norm": "attention_layernorm", "mlp_norm": "feedforward_layernorm"}


def hf_name(path: tuple[Any, ...]) -> tuple[str, bool]:
    """The Hugging Face name of a parameter; see `specjax.models.weights.Layout`."""
    keys = [getattr(key, "key", key) for key in path]
    match keys:
        case ["layers", layer, norm, _] if norm in _NORMS:
            return f"model.layers.{layer}.{_NORMS[norm]}.weight", False
        case ["layers", layer, "mlp", "act", name]:
            return f"model.layers.{layer}.mlp.act_fn.{name}", False
    return weights.hf_name(path)


APERTUS = Family(
    "apertus", "ApertusForCausalLM",
    {
        "vocab_size": 131072, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "max_position_embeddings": 65536, "rms_norm_eps": 1e-5, "rope_theta": 12e6,
    },
    _read, _write, {"hidden_act": ("xielu",)}, rope=_rope, layout=hf_name, note="biases of attention",
)  # fmt: skip
