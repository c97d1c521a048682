"""GLM-4 (arXiv:2406.12793) and GLM-4-0414 (huggingface.co/zai-org): Llama's layers, whose ropes turn neighbouring channels
of each head's first half. The second normalises what attention and MLP give, too."""

import functools
from typing import Any

from specjax.models import weights
from specjax.models.attention import AttentionConfig
from specjax.models.families import base
from specjax.models.families.base import Family, Fields
from specjax.models.fields import flag
from specjax.models.layer import LayerConfig
from specjax.models.model_config import ModelConfig


def _read(get: Fields, plain: ModelConfig) -> ModelConfig:
    return plain.every(AttentionConfig, qkv_bias=flag("attention_bias", get("attention_bias")))


def _read_0414(get: Fields, plain: ModelConfig) -> ModelConfig:
    return _read(get, plain).every(LayerConfig, post_norms=True)


def _write(config: ModelConfig) -> dict[str, Any]:
    return {
        "attention_bias": config.near.qkv_bias, "partial_rotary_factor": config.rope.share,
        "pad_token_id": None,  # transformers assumes one that a small vocabulary has not
    }  # fmt: skip


_NORMS = {"attention_post_norm": "post_self_attn_layernorm", "mlp_post_norm": "post_mlp_layernorm"}


def hf_name(path: tuple[Any, ...]) -> tuple[str, bool]:
    """The Hugging Face name of a parameter; see `specjax.models.weights.Layout`."""
    keys = [getattr(key, "key", key) for key in path]
    match keys:
        case ["layers", layer, norm, _] if norm in _NORMS:
            return f"model.layers.{layer}.{_NORMS[norm]}.weight", False
    return weights.hf_name(path)


_USUAL = {
    "vocab_size": 151552, "hidden_size": 4096, "intermediate_size": 13696, "num_hidden_layers": 40, "num_attention_heads": 32,
    "num_key_value_heads": 2, "head_dim": 128, "max_position_embeddings": 131072, "rms_norm_eps": 1.5625e-7,
    "partial_rotary_factor": 0.5, "attention_bias": True,
}  # fmt: skip
_JOINED = {"mlp.gate_proj": "mlp.gate_up_proj.weight#0", "mlp.up_proj": "mlp.gate_up_proj.weight#1"}
_SHARED: dict[str, Any] = {
    "rope": functools.partial(base.rope, partial=True), "names": functools.partial(base.joined, parts=_JOINED),
    "interleaved": True, "note": "biases of q, k and v (`attention_bias`), the share of a head that is rotated",
}  # fmt: skip
GLM = Family("glm", "GlmForCausalLM", _USUAL, _read, _write, **_SHARED)
GLM_0414 = Family("glm4", "Glm4ForCausalLM", _USUAL, _read_0414, _write, layout=hf_name, **_SHARED)
