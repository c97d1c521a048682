"""OPT (Zhang et al. 2022, arXiv:2205.01068): layer norms, learned positions, and an MLP of ReLUs without a gate."""

import functools
import re
from typing import Any

from specjax.models.attention import AttentionConfig
from specjax.models.errors import ModelError
from specjax.models.families import base
from specjax.models.families.base import Family, Fields
from specjax.models.fields import flag, shown
from specjax.models.mlp import MLPConfig
from specjax.models.model_config import EmbeddingConfig, ModelConfig, PositionsConfig
from specjax.models.norms import NormConfig
from specjax.models.tensors import Tensor

_UNUSED_ROWS = 2
"""The rows of the table of positions before that of position 0."""


def _read(get: Fields, plain: ModelConfig) -> ModelConfig:
    """OPT-350m alone normalises after each branch, and has embeddings of another width."""
    width = get("word_embed_proj_dim")
    if width not in (None, plain.hidden_size):
        raise ModelError(
            f"config.json: word_embed_proj_dim {shown(width)} is not supported; OPTForCausalLM is read with embeddings of the "
            f"model's width, {plain.hidden_size}"
        )
    biased = flag("enable_bias", get("enable_bias"))
    positions = PositionsConfig(plain.max_position_embeddings, _UNUSED_ROWS)
    own = plain.every(NormConfig, kind="wide", mean=True, bias=True).every(EmbeddingConfig, positions=positions)
    own = own.every(MLPConfig, hidden_act=base.activation(get), bias=biased, gated=False)
    return own.every(AttentionConfig, rope=None, qkv_bias=biased, o_bias=biased)


def _write(config: ModelConfig) -> dict[str, Any]:
    return {
        "enable_bias": config.near.qkv_bias,
        "word_embed_proj_dim": config.hidden_size,
        "do_layer_norm_before": True,
    }


_MODULES = {
    "input_layernorm": "self_attn_layer_norm", "post_attention_layernorm": "final_layer_norm",
    "self_attn.o_proj": "self_attn.out_proj", "mlp.up_proj": "fc1", "mlp.down_proj": "fc2",
}  # fmt: skip
_OUTER = {
    "model.embed_tokens": "model.decoder.embed_tokens", "model.embed_positions": "model.decoder.embed_positions",
    "model.layers": "model.decoder.layers", "model.norm": "model.decoder.final_layer_norm",
}  # fmt: skip
_BARE = re.compile(r"decoder\.")


def _text(tensors: dict[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Under the names that transformers writes: old files lack the first part."""
    return {f"model.{name}" if _BARE.match(name) else name: tensor for name, tensor in tensors.items()}


OPT = Family(
    "opt", "OPTForCausalLM",
    {
        "intermediate_size": 3072, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "hidden_act": "relu",
        "enable_bias": True, "tie_word_embeddings": True,
    },
    _read, _write,
    {
        "do_layer_norm_before": (True,), "_remove_final_layer_norm": (False,), "layer_norm_elementwise_affine": (True,),
    },
    rope=None, names=functools.partial(base.renamed, modules=_MODULES, outer=_OUTER), text=_text,
    fields={
        "intermediate_size": ("ffn_dim",), "hidden_act": ("activation_function",), "rms_norm_eps": (),
        "num_key_value_heads": (), "head_dim": (),
    },
    note="the activation, no biases of linear layers (`enable_bias`)",
)  # fmt: skip
