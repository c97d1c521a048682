"""Gemma 4's published assistants (`Gemma4AssistantForCausalLM`): layers without keys, and a head over all or some
clusters of the vocabulary.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from specjax.draft.heads.layout import Layout, Reader, Sure, check_flags, check_width
from specjax.models import hf_config
from specjax.models.errors import ModelError
from specjax.models.fields import an_object, flag, is_size
from specjax.models.model_config import ModelConfig

_NORMS = {
    "attention_norm": "input_layernorm", "attention_post_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm", "mlp_post_norm": "post_feedforward_layernorm",
}  # fmt: skip
_USUAL = {"num_centroids": 2048, "centroid_intermediate_top_k": 32, "backbone_hidden_size": 1536}
_ABSENT = ("hidden_size_per_layer_input", "vocab_size_per_layer_input", "enable_moe_block", "use_double_wide_mlp")
_MULTIMODAL = (
    "image_token_id", "boi_token_id", "eoi_token_id", "audio_token_id", "boa_token_id", "eoa_token_id",
    "eoa_token_index", "video_token_id",
)  # fmt: skip
"""Fields of the surrounding model's configuration about images and sound, which an assistant does not read."""


def read(reader: Reader, config: dict[str, Any], target: Any) -> tuple[dict[str, Any], Any]:
    """Fields and parameters of an assistant.

    Raises:
      ModelError: for layers with keys, experts or inputs of their own, and for an assistant of another target.
    """
    check_flags(reader, config, *_USUAL, *_MULTIMODAL, "text_config", "use_ordered_embeddings")
    said = {**_USUAL, **{name: x for name, x in config.items() if x is not None}}
    if wrong := [name for name in _USUAL if not is_size(said[name])]:
        raise ModelError(f"{reader.file}: {wrong[0]} must be a positive integer, not {said[wrong[0]]!r}")
    own = _layers(reader, an_object("text_config", config.get("text_config")), target)
    check_width(reader, said["backbone_hidden_size"], target, "backbone_hidden_size")
    size, wide = own.hidden_size, said["backbone_hidden_size"]
    params = {
        "enter": reader.linear("pre_projection", 2 * wide, size),
        "leave": reader.linear("post_projection", size, wide),
        "layers": {i: _layer(reader, i, own) for i in range(own.num_hidden_layers)},
        "norm": reader.scale("model.norm", size),
    }
    table = _table(reader, own, flag("tie_word_embeddings", said.get("tie_word_embeddings", True)))
    fields: dict[str, Any] = {"config": own}
    if not flag("use_ordered_embeddings", said.get("use_ordered_embeddings", False)):
        return fields, {**params, "head": {"kernel": table.T}}
    count, top = said["num_centroids"], said["centroid_intermediate_top_k"]
    if own.vocab_size % count or top > count:
        raise ModelError(
            f"{reader.file}: num_centroids {count}, of which centroid_intermediate_top_k {top} are read, do not split "
            f"{own.vocab_size} tokens"
        )
    params["centroids"] = reader.linear("masked_embedding.centroids", size, count)
    order = reader.take("masked_embedding.token_ordering", (own.vocab_size,)).astype(np.int64)
    if not reader.problems and not np.array_equal(np.sort(order), np.arange(own.vocab_size)):
        raise ModelError(f"{reader.folder}: masked_embedding.token_ordering does not name every token once")
    members = order.reshape(count, -1).astype(np.int32)
    params |= {"members": members, "clusters": {"kernel": table[members].swapaxes(1, 2)}}
    return fields | {"clusters": count, "top": top}, params


def _layers(reader: Reader, text: dict[str, Any], target: Any) -> ModelConfig:
    """The config of the layers. transformers says that all of them share keys; here none of them has any."""
    shared, layers = text.get("num_kv_shared_layers"), text.get("num_hidden_layers")
    if shared not in (None, 0, layers):
        raise ModelError(
            f"{reader.file}: num_kv_shared_layers is {shared!r} of {layers!r}; an assistant shares the keys of all layers"
        )
    if had := [name for name in _ABSENT if text.get(name)]:
        raise ModelError(f"{reader.file}: {had[0]} is {text[had[0]]!r}, which an assistant's layers do not have")
    bare = {
        "num_kv_shared_layers": 0,
        "hidden_size_per_layer_input": 0,
        "architectures": None,
        "model_type": "gemma4_text",
    }
    own = hf_config.from_hf({**text, **bare})
    if own.vocab_size != target.lm.vocab_size:
        raise ModelError(
            f"{reader.file}: vocab_size: the assistant reads {own.vocab_size} tokens, {target.name!r} has "
            f"{target.lm.vocab_size}: it belongs to another target"
        )
    return own


def _layer(reader: Reader, layer: int, config: ModelConfig) -> dict[str, Any]:
    own, at, size = config.attention(layer), f"model.layers.{layer}", config.hidden_size
    heads = own.num_attention_heads * own.head_dim
    attention = {
        "q": reader.linear(f"{at}.self_attn.q_proj", size, heads, bias=own.qkv_bias),
        "o": reader.linear(f"{at}.self_attn.o_proj", heads, size, bias=own.o_bias),
        "q_norm": reader.scale(f"{at}.self_attn.q_norm", own.head_dim),
    }
    inner = config.dense.intermediate_size
    shapes = {"gate": (size, inner), "up": (size, inner), "down": (inner, size)}
    return {
        "attention": attention,
        "mlp": {name: reader.linear(f"{at}.mlp.{name}_proj", *shape) for name, shape in shapes.items()},
        **{name: reader.scale(f"{at}.{stored}", size) for name, stored in _NORMS.items()},
        "scalar": reader.take(f"{at}.layer_scalar", (1,)),
    }


def _table(reader: Reader, config: ModelConfig, tied: bool) -> np.ndarray:
    """The rows of the head `[V, E]`. The assistant embeds no token itself, so a table that is not tied is not read."""
    shape = (config.vocab_size, config.hidden_size)
    table = reader.take("model.embed_tokens.weight", shape)
    if tied and "lm_head.weight" not in reader.tensors:
        return table
    head = reader.take("lm_head.weight", shape)
    if tied and not reader.problems and not np.array_equal(head, table):
        raise ModelError(f"{reader.folder}: lm_head.weight differs from model.embed_tokens.weight, which it is tied to")
    return head


def _said(config: Mapping[str, Any]) -> Sure:
    by_class = "gemma4assistant" in str(config.get("architectures")).lower()
    return Sure.NAMED if by_class or config.get("model_type") == "gemma4_assistant" else Sure.NO


LAYOUT = Layout(read, said=_said, beside=("gemma",))
