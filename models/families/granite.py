"""Granite 3 and dense Granite 4 (huggingface.co/ibm-granite): Llama's layers, with multipliers.

Granite 4 is written for layers of state space models and experts too: folders that have none of them are read.
"""

import functools
from typing import Any

from specjax.models.errors import ModelError
from specjax.models.families import base
from specjax.models.families.base import SILU, Family, Fields
from specjax.models.fields import FULL, flag, is_size, positive, shown
from specjax.models.llama_config import LlamaConfig

_OURS = {
    "embedding_multiplier": "embedding_scale", "logits_scaling": "logits_scaling", "residual_multiplier": "residual_multiplier",
}  # fmt: skip
_USUAL = {"max_position_embeddings": 2048, "attention_multiplier": 1.0} | dict.fromkeys(_OURS, 1.0)


def _read(get: Fields) -> dict[str, Any]:
    width = get("head_dim") or get("hidden_size") // get("num_attention_heads")
    scale = positive("attention_multiplier", get("attention_multiplier"))
    multipliers = {ours: positive(name, get(name)) for name, ours in _OURS.items()}
    return base.attention_bias(get) | multipliers | {"attention_scale": None if scale == width**-0.5 else scale}


def _read_3(get: Fields) -> dict[str, Any]:
    return _read(get) | {"mlp_bias": flag("mlp_bias", get("mlp_bias"))}


def _write(config: LlamaConfig) -> dict[str, Any]:
    c = config
    return {name: getattr(c, ours) for name, ours in _OURS.items()} | {
        "attention_multiplier": c.head_dim**-0.5 if c.attention_scale is None else c.attention_scale,
        "attention_bias": c.qkv_bias, "mlp_bias": c.mlp_bias,
    }  # fmt: skip


def _read_4(get: Fields) -> dict[str, Any]:
    """The MLP is what the file calls the shared one, and positions are there only where it says so."""
    types = get("layer_types") or get("layers_block_type") or ["mamba"]
    others = sorted({str(kind) for kind in types} - {FULL, "attention"})
    if others or len(types) != get("num_hidden_layers"):
        what = f"{', '.join(others)} layers" if others else f"{len(types)} layers"
        raise ModelError(
            f"config.json: layer_types has {what}; GraniteMoeHybridForCausalLM is read where all {get('num_hidden_layers')} "
            "are attention: state space layers (Mamba) are not supported"
        )
    if get("num_local_experts"):
        raise ModelError(
            f"config.json: num_local_experts {shown(get('num_local_experts'))} is not supported; "
            "GraniteMoeHybridForCausalLM is read without experts"
        )
    if not is_size(get("shared_intermediate_size")):
        raise ModelError("config.json needs positive integers for: shared_intermediate_size")
    rotates = get("position_embedding_type") == "rope"
    return _read(get) | {
        "intermediate_size": get("shared_intermediate_size"), "partial_rotary_factor": 1.0 if rotates else 0.0,
    }  # fmt: skip


def _write_4(config: LlamaConfig) -> dict[str, Any]:
    """With the sizes of state space layers that transformers checks though there are none."""
    c = config
    return _write(c) | {
        "layer_types": [FULL] * c.num_hidden_layers, "num_local_experts": 0, "num_experts_per_tok": 0,
        "shared_intermediate_size": c.intermediate_size, "position_embedding_type": "rope" if c.partial_rotary_factor else None,
        "mamba_n_heads": 1, "mamba_d_head": 2 * c.hidden_size, "mamba_expand": 2,
    }  # fmt: skip


_JOINED = {
    "mlp.gate_proj": "shared_mlp.input_linear.weight#0", "mlp.up_proj": "shared_mlp.input_linear.weight#1",
    "mlp.down_proj": "shared_mlp.output_linear.weight",
}  # fmt: skip


_NOTE = "multipliers of embeddings, scores, branches and logits; biases of attention"
GRANITE = Family("GraniteForCausalLM", _USUAL, _read_3, _write, note=f"{_NOTE} and MLP")
GRANITE_4 = Family(
    "GraniteMoeHybridForCausalLM", _USUAL | {"num_local_experts": 8, "shared_intermediate_size": 1024}, _read_4, _write_4,
    SILU | {"normalization_function": ("rmsnorm", None)}, names=functools.partial(base.joined, parts=_JOINED),
    note=f"{_NOTE}; no positions (`position_embedding_type`)",
)  # fmt: skip
