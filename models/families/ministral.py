"""Ministral 3 (huggingface.co/mistralai): Mistral's layers with YaRN, whose queries grow with their positions."""

from typing import Any

from specjax.models.attention import AttentionConfig
from specjax.models.errors import ModelError
from specjax.models.families import base
from specjax.models.families.base import Family, Fields
from specjax.models.families.llama import all_windowed
from specjax.models.fields import is_size, positive, shown
from specjax.models.model_config import ModelConfig
from specjax.models.ropes import QueryScale, RopeConfig

_BETA, _PERIOD = "llama_4_scaling_beta", "original_max_position_embeddings"
_ROPE = {
    "type": "yarn", "rope_theta": 1e6, "factor": 16.0, _PERIOD: 16384, "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0,
    "mscale_all_dim": 1.0, _BETA: 0.1,
}  # fmt: skip
"""That of a file that describes none."""


def _rope(get: Fields) -> RopeConfig:
    said = base.rope_fields(get, _ROPE)
    return base.rope(base.with_rope(get, {name: value for name, value in said.items() if name != _BETA}))


def _read(get: Fields, plain: ModelConfig) -> ModelConfig:
    said = base.rope_fields(get, _ROPE)
    own = all_windowed(get, plain)
    if not said.get(_BETA):
        return own
    if not is_size(said.get(_PERIOD)):
        raise ModelError(f"config.json: {_PERIOD} must be a positive integer, not {shown(said.get(_PERIOD))}")
    return own.every(AttentionConfig, query_scale=QueryScale(positive(_BETA, said[_BETA]), said[_PERIOD]))


def _write(config: ModelConfig) -> dict[str, Any]:
    grown, rope = config.near.query_scale, base.said(config.rope)
    own = {_BETA: 0.0, _PERIOD: rope.get(_PERIOD, 1)} if grown is None else {_BETA: grown.beta, _PERIOD: grown.period}
    return {"sliding_window": config.near.window, "rope_parameters": rope | own}


MINISTRAL_3 = Family(
    "ministral3", "Ministral3ForCausalLM",
    {
        "vocab_size": 131072, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 34,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-5,
    },
    _read, _write, rope=_rope, text=base.text_part, note="a window, how queries grow (`llama_4_scaling_beta`)",
)  # fmt: skip
