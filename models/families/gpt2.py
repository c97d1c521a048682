"""GPT-2 (Radford et al. 2019): layer norms, learned positions, and an MLP without a gate.

The file has q, k and v as one matrix. Matrices of layers are stored from inputs to outputs.
"""

import functools
import re
from typing import Any

from specjax.models import weights
from specjax.models.families import base
from specjax.models.families.base import Family, Fields
from specjax.models.fields import flag
from specjax.models.mlp import MLPConfig
from specjax.models.model_config import EmbeddingConfig, ModelConfig, PositionsConfig
from specjax.models.norms import NormConfig
from specjax.models.tensors import Tensor


def _read(get: Fields, plain: ModelConfig) -> ModelConfig:
    """Scores may be without their usual factor, and divided by the number of their layer."""
    usual = plain.near.head_dim**-0.5
    scaled, divided = (flag(name, get(name)) for name in ("scale_attn_weights", "scale_attn_by_inverse_layer_idx"))
    factor = lambda i: (usual if scaled else 1.0) / (i + 1 if divided else 1)
    own = plain.every(NormConfig, kind="wide", mean=True, bias=True)
    own = own.every(MLPConfig, hidden_act=base.activation(get), bias=True, gated=False)
    own = own.every(EmbeddingConfig, positions=PositionsConfig(plain.max_position_embeddings))
    scale = lambda i: None if factor(i) == usual else factor(i)
    return base.mixers(own, lambda i: {"rope": None, "qkv_bias": True, "o_bias": True, "scale": scale(i)})


def _write(config: ModelConfig) -> dict[str, Any]:
    scales = [one.scale for one in config.attentions]
    return {"scale_attn_weights": config.near.scale is None, "scale_attn_by_inverse_layer_idx": len({*scales}) > 1}


_MODULES = {
    "input_layernorm": "ln_1", "post_attention_layernorm": "ln_2", "self_attn.q_proj": "attn.c_attn#0",
    "self_attn.k_proj": "attn.c_attn#1", "self_attn.v_proj": "attn.c_attn#2", "self_attn.o_proj": "attn.c_proj",
    "mlp.up_proj": "mlp.c_fc", "mlp.down_proj": "mlp.c_proj",
}  # fmt: skip
_OUTER = {
    "model.embed_tokens": "transformer.wte", "model.embed_positions": "transformer.wpe", "model.layers": "transformer.h",
    "model.norm": "transformer.ln_f",
}  # fmt: skip
_BUFFER = re.compile(r"(^|\.)h\.\d+\.attn\.(bias|masked_bias)$")
_BARE = re.compile(r"(wte|wpe|ln_f|h\.\d+)\.")


def _layout(path: tuple[Any, ...]) -> tuple[str, bool]:
    name, transposed = weights.hf_name(path)
    return name, transposed and name == "lm_head.weight"


def _text(tensors: dict[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Under the names that transformers writes, and without masks: files on the hub lack the prefix, and some hold masks."""
    whole = lambda name: f"transformer.{name}" if _BARE.match(name) else name
    return {whole(name): tensor for name, tensor in tensors.items() if not _BUFFER.search(name)}


GPT2 = Family(
    "gpt2", "GPT2LMHeadModel",
    {
        "max_position_embeddings": 1024, "intermediate_size": lambda get: get("hidden_size") and 4 * get("hidden_size"),
        "rms_norm_eps": 1e-5, "hidden_act": "gelu_new", "tie_word_embeddings": True, "scale_attn_weights": True,
    },
    _read, _write, {"add_cross_attention": (False,)}, rope=None,
    names=functools.partial(base.renamed, modules=_MODULES, outer=_OUTER), layout=_layout, text=_text,
    fields={
        "hidden_size": ("n_embd", "hidden_size"), "num_hidden_layers": ("n_layer", "num_hidden_layers"),
        "num_attention_heads": ("n_head", "num_attention_heads"), "intermediate_size": ("n_inner",),
        "max_position_embeddings": ("n_positions", "max_position_embeddings"), "hidden_act": ("activation_function",),
        "rms_norm_eps": ("layer_norm_epsilon",), "num_key_value_heads": (), "head_dim": (),
    },
    note="the activation, scores without their usual factor (`scale_attn_weights`) or divided by the number of their layer",
)  # fmt: skip
