"""Cohere's Command R and Command R7B (huggingface.co/CohereForAI): attention and MLP are side by side after one layer norm
without a bias, ropes turn neighbours, and logits are scaled. In the second, only layers with a window have positions."""

from typing import Any

from specjax.models import weights
from specjax.models.attention import AttentionConfig
from specjax.models.errors import ModelError
from specjax.models.families import base
from specjax.models.families.base import SILU, Family, Fields
from specjax.models.fields import FULL, SLIDING, flag, is_size, positive, shown
from specjax.models.layer import LayerConfig
from specjax.models.model_config import HeadConfig, ModelConfig
from specjax.models.norms import NormConfig


def _read(get: Fields, plain: ModelConfig) -> ModelConfig:
    own = plain.every(NormConfig, kind="wide", mean=True)
    own = own.every(AttentionConfig, **base.attention_bias(get)).every(LayerConfig, parallel="one_norm")
    return own.every(HeadConfig, logits_scaling=1 / positive("logit_scale", get("logit_scale")))


def _write(config: ModelConfig) -> dict[str, Any]:
    return {"attention_bias": config.near.qkv_bias, "logit_scale": 1 / config.head.logits_scaling}


def _read_1(get: Fields, plain: ModelConfig) -> ModelConfig:
    own, normed = _read(get, plain), flag("use_qk_norm", get("use_qk_norm"))
    return own.every(AttentionConfig, qk_head_norm=own.norm if normed else None)


def _write_1(config: ModelConfig) -> dict[str, Any]:
    return _write(config) | {"use_qk_norm": config.near.qk_head_norm is not None}


def _read_2(get: Fields, plain: ModelConfig) -> ModelConfig:
    types, every = get("layer_types"), get("sliding_window_pattern")
    if types is None and not is_size(every):
        raise ModelError(f"config.json: sliding_window_pattern must be a number of layers, not {shown(every)}")
    types = types or [SLIDING if (i + 1) % every else FULL for i in range(plain.num_hidden_layers)]
    own = base.windows(_read(get, plain), types, get("sliding_window"))
    return base.mixers(own, lambda i: {} if own.window(i) else {"rope": None})


def _write_2(config: ModelConfig) -> dict[str, Any]:
    return _write(config) | {"layer_types": base.layer_types(config), "sliding_window": config.near.window}


def hf_name(path: tuple[Any, ...]) -> tuple[str, bool]:
    """The Hugging Face name of a parameter; see `specjax.models.weights.Layout`."""
    match [getattr(key, "key", key) for key in path]:
        case ["layers", layer, "attention", "q_head_norm" | "k_head_norm" as name, _]:
            return f"model.layers.{layer}.self_attn.{name[0]}_norm.weight", False
    return weights.hf_name(path)


_USUAL = {
    "vocab_size": 256000, "hidden_size": 8192, "intermediate_size": 22528, "num_hidden_layers": 40, "num_attention_heads": 64,
    "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "logit_scale": 0.0625, "tie_word_embeddings": True,
}  # fmt: skip
_FIXED = SILU | {"position_embedding_type": ("rope_gptj", "rope", None)}
_EPS = {"rms_norm_eps": ("layer_norm_eps",)}
COHERE = Family(
    "cohere", "CohereForCausalLM", _USUAL | {"rope_theta": 5e5}, _read_1, _write_1, _FIXED, layout=hf_name, interleaved=True,
    fields=_EPS, note="biases of attention, norms of each head of q and k (`use_qk_norm`)",
)  # fmt: skip
COHERE_2 = Family(
    "cohere2", "Cohere2ForCausalLM", _USUAL | {"sliding_window": 4096, "sliding_window_pattern": 4}, _read_2, _write_2,
    _FIXED, interleaved=True, fields=_EPS | {"head_dim": ()},
    note="biases of attention, which layers have a window (`layer_types`)",
)  # fmt: skip
