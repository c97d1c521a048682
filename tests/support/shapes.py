"""Configs of small models, by the names that Hugging Face's `config.json` has for what is changed in them."""

import dataclasses
from typing import Any

from specjax.models import ModelConfig, llama_config
from specjax.models.attention import AttentionConfig
from specjax.models.families import base
from specjax.models.layer import LayerConfig
from specjax.models.mlp import MLPConfig
from specjax.models.model_config import EmbeddingConfig, HeadConfig
from specjax.models.norms import NormConfig
from specjax.models.ropes import RopeConfig

_SIZES = ("num_attention_heads", "num_key_value_heads", "head_dim", "qkv_bias", "o_bias")
_PARTS: dict[str, tuple[type[Any], str]] = {name: (AttentionConfig, name) for name in _SIZES} | {
    "attention_sinks": (AttentionConfig, "sinks"), "attention_scale": (AttentionConfig, "scale"),
    "intermediate_size": (MLPConfig, "intermediate_size"), "mlp_bias": (MLPConfig, "bias"),
    "hidden_act": (MLPConfig, "hidden_act"), "rms_norm_eps": (NormConfig, "eps"), "norm": (NormConfig, "kind"),
    "pre_norms": (LayerConfig, "pre_norms"), "post_norms": (LayerConfig, "post_norms"),
    "residual_multiplier": (LayerConfig, "residual_multiplier"), "rope_theta": (RopeConfig, "theta"),
    "rope_scaling": (RopeConfig, "scaling"), "partial_rotary_factor": (RopeConfig, "share"),
    "vocab_size": (EmbeddingConfig, "vocab_size"), "embedding_scale": (EmbeddingConfig, "scale"),
    "tie_word_embeddings": (HeadConfig, "tied"), "logits_scaling": (HeadConfig, "logits_scaling"),
    "final_logit_softcapping": (HeadConfig, "soft_cap"),
}  # fmt: skip
_BASICS = ("rms_norm_eps", "rope_theta", "rope_scaling", "tie_word_embeddings")


def small(*sizes: int, **fields: Any) -> ModelConfig:
    """The config of a Llama of these sizes (`specjax.models.llama_config`), with the other fields changed."""
    own = {name: fields.pop(name) for name in list(fields) if name in _BASICS}
    names = (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        *_SIZES[:3],
        "max_position_embeddings",
    )
    given = dict(zip(names, sizes, strict=False)) | {name: fields.pop(name) for name in names if name in fields}
    return changed(llama_config(**given, **own), **fields)


def changed(
    config: ModelConfig, *, num_hidden_layers: int | None = None, sliding_window: Any = ...,
    sliding_layers: tuple[bool, ...] = (), rope_layers: tuple[bool, ...] = (), experts: Any = None,
    sparse_layers: tuple[bool, ...] = (), qk_norm: bool | None = None, qk_wide_norm: bool | None = None, **fields: Any,
) -> ModelConfig:  # fmt: skip
    """A config with these fields changed in all of its layers; of more layers than it has, the last one again."""
    if num_hidden_layers is not None:
        layers = config.layers + (config.layers[-1],) * max(num_hidden_layers - len(config.layers), 0)
        config = dataclasses.replace(config, layers=layers[:num_hidden_layers])
    for name in [name for name in fields if name in _PARTS]:
        kind, own = _PARTS[name]
        config = config.every(kind, **{own: fields.pop(name)})
    for name, asked in (("qk_norm", qk_norm), ("qk_wide_norm", qk_wide_norm)):
        if asked is not None:
            config = config.every(AttentionConfig, **{name: config.norm if asked else None})
    if sliding_window is not ... or sliding_layers:
        window = config.near.window if sliding_window is ... else sliding_window
        config = base.mixers(config, lambda i: {"window": window if not sliding_layers or sliding_layers[i] else None})
    if rope_layers:
        config = base.mixers(config, lambda i: {} if rope_layers[i] else {"rope": None})
    if experts is not None:
        config = base.sparse(config, experts, sparse_layers or None)
    return dataclasses.replace(config, **fields)
