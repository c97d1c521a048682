"""OPT (Zhang et al. 2022, arXiv:2205.01068): layer norms, learned positions, and an MLP of ReLUs without a gate.

OPT-350m alone norms the stream after each branch, has no final norm, and has embeddings of another width than the model's.
"""

import functools
import re
from typing import Any

from specjax.models.attention import AttentionConfig
from specjax.models.errors import ModelError
from specjax.models.families import base
from specjax.models.families.base import Family, Fields
from specjax.models.fields import flag, is_size, shown
from specjax.models.layer import LayerConfig
from specjax.models.mlp import MLPConfig
from specjax.models.model_config import EmbeddingConfig, HeadConfig, ModelConfig, PositionsConfig
from specjax.models.norms import NormConfig
from specjax.models.tensors import Tensor

_UNUSED_ROWS = 2
"""The rows of the table of positions before that of position 0."""


def _read(get: Fields, plain: ModelConfig) -> ModelConfig:
    width = get("word_embed_proj_dim")
    if width is not None and not is_size(width):
        raise ModelError(f"config.json: word_embed_proj_dim must be a positive integer or null, not {shown(width)}")
    width = None if width == plain.hidden_size else width
    biased, before, removed = (
        flag(name, get(name)) for name in ("enable_bias", "do_layer_norm_before", "_remove_final_layer_norm")
    )
    positions = PositionsConfig(plain.max_position_embeddings, _UNUSED_ROWS)
    own = plain.every(NormConfig, kind="wide", mean=True, bias=True).every(
        EmbeddingConfig, positions=positions, width=width
    )
    own = own.every(LayerConfig, pre_norms=before, sum_norms=not before).every(
        HeadConfig, normed=before and not removed
    )
    own = own.every(MLPConfig, hidden_act=base.activation(get), bias=biased, gated=False)
    return own.every(AttentionConfig, rope=None, qkv_bias=biased, o_bias=biased)


def _write(config: ModelConfig) -> dict[str, Any]:
    return {
        "enable_bias": config.near.qkv_bias,
        "word_embed_proj_dim": config.embedding.width or config.hidden_size,
        "do_layer_norm_before": config.layers[0].pre_norms,
        "_remove_final_layer_norm": not config.head.normed,
    }


_MODULES = {
    "input_layernorm": "self_attn_layer_norm", "post_attention_layernorm": "final_layer_norm",
    "self_attn.o_proj": "self_attn.out_proj", "mlp.up_proj": "fc1", "mlp.down_proj": "fc2",
}  # fmt: skip
_OUTER = {
    "model.embed_tokens": "model.decoder.embed_tokens", "model.embed_positions": "model.decoder.embed_positions",
    "model.layers": "model.decoder.layers", "model.norm": "model.decoder.final_layer_norm",
    "model.project_in": "model.decoder.project_in", "model.project_out": "model.decoder.project_out",
}  # fmt: skip
_BARE = re.compile(r"decoder\.")


def _text(tensors: dict[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Under the names that transformers writes: old files lack the first part."""
    return {f"model.{name}" if _BARE.match(name) else name: tensor for name, tensor in tensors.items()}


OPT = Family(
    "opt", "OPTForCausalLM",
    {
        "intermediate_size": 3072, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "hidden_act": "relu",
        "enable_bias": True, "do_layer_norm_before": True, "tie_word_embeddings": True,
    },
    _read, _write, {"layer_norm_elementwise_affine": (True,)},
    rope=None, names=functools.partial(base.renamed, modules=_MODULES, outer=_OUTER), text=_text,
    fields={
        "intermediate_size": ("ffn_dim",), "hidden_act": ("activation_function",), "rms_norm_eps": (),
        "num_key_value_heads": (), "head_dim": (),
    },
    note="the activation, no biases of linear layers (`enable_bias`); as in OPT-350m, norms of the stream after each branch "
    "(`do_layer_norm_before`) and embeddings of another width (`word_embed_proj_dim`)",
)  # fmt: skip
