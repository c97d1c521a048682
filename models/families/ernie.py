"""ERNIE 4.5 (Baidu 2025, huggingface.co/baidu), dense and with experts: Llama's layers, whose ropes turn neighbouring channels,
and one switch for all biases."""

import re
from typing import Any

from specjax.models import hf_experts
from specjax.models.attention import AttentionConfig
from specjax.models.errors import ModelError
from specjax.models.families import base
from specjax.models.families.base import Family, Fields
from specjax.models.fields import flag, is_id, is_size, positive, shown
from specjax.models.mlp import MLPConfig
from specjax.models.model_config import HeadConfig, ModelConfig
from specjax.models.tensors import Tensor

_DRAFTING = re.compile(r"^model\.mtp_")


def _read(get: Fields, plain: ModelConfig) -> ModelConfig:
    biased = flag("use_bias", get("use_bias"))
    return plain.every(AttentionConfig, qkv_bias=biased, o_bias=biased).every(MLPConfig, bias=biased)


def _write(config: ModelConfig) -> dict[str, Any]:
    return {"use_bias": config.near.o_bias, "pad_token_id": None}


_SIZES = {"num_experts": "moe_num_experts", "num_experts_per_tok": "moe_k"}


def _read_moe(get: Fields, plain: ModelConfig) -> ModelConfig:
    """Experts in every `moe_layer_interval`th layer between two."""
    start, end, step = (get(f"moe_layer_{name}") for name in ("start_index", "end_index", "interval"))
    layers = plain.num_hidden_layers
    if not is_id(start) or not (is_id(end) or end == -1) or not is_size(step):
        raise ModelError(
            f"config.json: moe_layer_start_index {shown(start)}, moe_layer_end_index {shown(end)} and moe_layer_interval "
            f"{shown(step)} must be numbers of layers"
        )
    uses = [(i + 1) % step == 0 and start <= i <= (layers - 1 if end == -1 else end) for i in range(layers)]
    if not any(uses):
        raise ModelError("config.json: moe_layer_start_index and its like leave no layer with experts")
    shared = get("moe_num_shared_experts")
    if not is_id(shared):
        raise ModelError(f"config.json: moe_num_shared_experts must be a whole number, not {shown(shared)}")
    experts = hf_experts.from_hf(
        lambda name: get(_SIZES.get(name, name)), scoring="biased", num_shared_experts=shared,
        least_sum=positive("moe_norm_min", get("moe_norm_min")),
    )  # fmt: skip
    own = _read(get, base.sparse(plain, experts, uses))  # its biases are those of the shared experts too
    return own.every(HeadConfig, bias=flag("use_bias", get("use_bias")))


def _write_moe(config: ModelConfig) -> dict[str, Any]:
    experts = config.experts
    if experts is None:
        return {}
    uses = [i for i, sparse in enumerate(base.sparse_layers(config)) if sparse]
    return _write(config) | {
        "moe_num_experts": experts.num_experts, "moe_k": experts.num_experts_per_tok,
        "moe_intermediate_size": experts.moe_intermediate_size, "moe_num_shared_experts": experts.num_shared_experts,
        "moe_norm_min": experts.least_sum, "moe_layer_start_index": uses[0], "moe_layer_end_index": uses[-1],
        "moe_layer_interval": uses[1] - uses[0] if len(uses) > 1 else 1,
    }  # fmt: skip


def tensor_name(name: str) -> str:
    """The name of a tensor that has this name in Llama's layout; a router's biases are a matrix of one row."""
    return name.replace(".mlp.gate.bias", ".mlp.moe_statics.e_score_correction_bias:1")


def text_tensors(tensors: dict[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """The tensors of a folder's model, without those that draft for it."""
    return {name: tensor for name, tensor in tensors.items() if not _DRAFTING.match(name)}


ERNIE = Family(
    "ernie4_5", "Ernie4_5ForCausalLM",
    {
        "vocab_size": 103424, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 18,
        "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 128, "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "tie_word_embeddings": True,
    },
    _read, _write, others=("Ernie4_5_ForCausalLM",), interleaved=True, text=text_tensors,
    note="biases of attention and MLP (`use_bias`)",
)  # fmt: skip
ERNIE_MOE = Family(
    "ernie4_5_moe", "Ernie4_5_MoeForCausalLM",
    {
        "vocab_size": 103424, "hidden_size": 2560, "intermediate_size": 12288, "num_hidden_layers": 28,
        "num_attention_heads": 20, "num_key_value_heads": 4, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0, "tie_word_embeddings": True, "moe_num_experts": 64, "moe_k": 6,
        "moe_intermediate_size": 1536, "moe_num_shared_experts": 2, "moe_layer_start_index": 1, "moe_layer_end_index": -1,
        "moe_layer_interval": 1, "moe_norm_min": 1e-12,
    },
    _read_moe, _write_moe, names=tensor_name, interleaved=True, text=text_tensors,
    note="biases of attention, MLPs and head (`use_bias`), which layers have experts (`moe_layer_start_index` and its like)",
)  # fmt: skip
