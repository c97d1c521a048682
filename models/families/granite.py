"""Granite 3, its models with experts, and dense Granite 4 (huggingface.co/ibm-granite): Llama's layers, with multipliers.

Granite 4 also allows state-space layers and experts; only folders without them are read.
"""

import functools
import re
from typing import Any

from specjax.models import hf_experts
from specjax.models.attention import AttentionConfig
from specjax.models.errors import ModelError
from specjax.models.families import base
from specjax.models.families.base import SILU, Family, Fields
from specjax.models.fields import FULL, flag, is_size, positive, shown
from specjax.models.layer import LayerConfig
from specjax.models.mlp import MLPConfig
from specjax.models.model_config import EmbeddingConfig, HeadConfig, ModelConfig

_MULTIPLIERS = ("attention_multiplier", "embedding_multiplier", "logits_scaling", "residual_multiplier")
_USUAL = {"max_position_embeddings": 2048} | dict.fromkeys(_MULTIPLIERS, 1.0)


def _read(get: Fields, plain: ModelConfig) -> ModelConfig:
    scores, embedding, logits, residual = (positive(name, get(name)) for name in _MULTIPLIERS)
    scale = None if scores == plain.near.head_dim**-0.5 else scores
    own = plain.every(AttentionConfig, **base.attention_bias(get), scale=scale).every(EmbeddingConfig, scale=embedding)
    return own.every(HeadConfig, logits_scaling=logits).every(LayerConfig, residual_multiplier=residual)


def _read_3(get: Fields, plain: ModelConfig) -> ModelConfig:
    return _read(get, plain).every(MLPConfig, bias=flag("mlp_bias", get("mlp_bias")))


def _write(config: ModelConfig) -> dict[str, Any]:
    c = config
    return {
        "attention_multiplier": c.near.scores_scale, "embedding_multiplier": c.embedding.scale,
        "logits_scaling": c.head.logits_scaling, "residual_multiplier": c.layers[0].residual_multiplier,
        "attention_bias": c.near.qkv_bias, "mlp_bias": c.dense.bias,
    }  # fmt: skip


def _read_moe(get: Fields, plain: ModelConfig) -> ModelConfig:
    """A softmax over the logits of the chosen experts is the chosen part of one over all, divided by its sum."""
    return base.sparse(_read(get, plain), hf_experts.from_hf(hf_experts.local(get)))


def _write_moe(config: ModelConfig) -> dict[str, Any]:
    if config.experts is None:
        return {}
    kept = {name: value for name, value in _write(config).items() if name != "mlp_bias"}
    return kept | hf_experts.local_to_hf(config.experts)


_EXPERT = re.compile(r"\.mlp\.experts\.(\d+)\.(gate|up|down)_proj\.weight$")


def tensor_name(name: str) -> str:
    """The name, with its place, of a tensor of experts that has this name in Llama's layout; see `weights.Names`.

    >>> tensor_name("model.layers.3.mlp.experts.5.up_proj.weight")
    'model.layers.3.block_sparse_moe.input_linear.weight#11:2'
    """
    found = _EXPERT.search(name)
    if found is None:
        return name.replace(".mlp.gate.", ".block_sparse_moe.router.layer.")
    expert, moe = int(found[1]), f"{name[: found.start()]}.block_sparse_moe"
    if found[2] == "down":
        return f"{moe}.output_linear.weight#{expert}:1"
    return f"{moe}.input_linear.weight#{2 * expert + (found[2] == 'up')}:2"


def _read_4(get: Fields, plain: ModelConfig) -> ModelConfig:
    """Reads Granite 4: the MLP is the file's shared MLP, and positions are used only if the file says so."""
    types = get("layer_types") or get("layers_block_type") or ["mamba"]
    others = sorted({str(kind) for kind in types} - {FULL, "attention"})
    if others or len(types) != get("num_hidden_layers"):
        what = f"{', '.join(others)} layers" if others else f"{len(types)} layers"
        raise ModelError(
            f"config.json: layer_types has {what}; GraniteMoeHybridForCausalLM is read if all {get('num_hidden_layers')} "
            "are attention: state space layers (Mamba) are not supported"
        )
    if get("num_local_experts"):
        raise ModelError(
            f"config.json: num_local_experts {shown(get('num_local_experts'))} is not supported; "
            "GraniteMoeHybridForCausalLM is read without experts"
        )
    if not is_size(get("shared_intermediate_size")):
        raise ModelError("config.json needs positive integers for: shared_intermediate_size")
    own = _read(get, plain).every(MLPConfig, intermediate_size=get("shared_intermediate_size"))
    return own if get("position_embedding_type") == "rope" else own.every(AttentionConfig, rope=None)


def _write_4(config: ModelConfig) -> dict[str, Any]:
    """Writes Granite 4, with the sizes of state-space layers, which transformers checks even if there are none."""
    c = config
    return _write(c) | {
        "layer_types": [FULL] * c.num_hidden_layers, "num_local_experts": 0, "num_experts_per_tok": 0,
        "shared_intermediate_size": c.dense.intermediate_size,
        "position_embedding_type": None if c.near.rope is None else "rope",
        "mamba_n_heads": 1, "mamba_d_head": 2 * c.hidden_size, "mamba_expand": 2,
    }  # fmt: skip


_JOINED = {
    "mlp.gate_proj": "shared_mlp.input_linear.weight#0", "mlp.up_proj": "shared_mlp.input_linear.weight#1",
    "mlp.down_proj": "shared_mlp.output_linear.weight",
}  # fmt: skip


_NOTE = "multipliers of embeddings, scores, branches and logits; biases of attention"
GRANITE = Family("granite", "GraniteForCausalLM", _USUAL, _read_3, _write, note=f"{_NOTE} and MLP")
GRANITE_MOE = Family(
    "granitemoe", "GraniteMoeForCausalLM",
    _USUAL | {
        "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_local_experts": 8, "num_experts_per_tok": 2,
    },
    _read_moe, _write_moe, names=tensor_name, note=_NOTE,
)  # fmt: skip
GRANITE_4 = Family(
    "granitemoehybrid", "GraniteMoeHybridForCausalLM",
    _USUAL | {"num_local_experts": 8, "shared_intermediate_size": 1024}, _read_4, _write_4,
    SILU | {"normalization_function": ("rmsnorm", None)}, names=functools.partial(base.joined, parts=_JOINED),
    note=f"{_NOTE}; no positions (`position_embedding_type`)",
)  # fmt: skip
