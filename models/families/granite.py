"""Granite 3, its models with experts, and Granite 4 (huggingface.co/ibm-granite): Llama's layers, with multipliers.

Most layers of a hybrid Granite 4 have Mamba-2 in place of attention.
"""

import dataclasses
import re
from typing import Any

from specjax.models import hf_experts
from specjax.models.attention import AttentionConfig
from specjax.models.errors import ModelError
from specjax.models.families import base, jamba, state_spaces
from specjax.models.families.base import SILU, Family, Fields
from specjax.models.fields import FULL, flag, is_size, positive
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
        "attention_multiplier": c.attention_sizes.scores_scale, "embedding_multiplier": c.embedding.scale,
        "logits_scaling": c.head.logits_scaling, "residual_multiplier": c.layers[0].residual_multiplier,
        "attention_bias": c.attention_sizes.qkv_bias, "mlp_bias": c.dense.bias,
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


_KINDS = {"mamba": False, "linear_attention": False, "attention": True, FULL: True}


def _read_4(get: Fields, plain: ModelConfig) -> ModelConfig:
    """Reads Granite 4: the MLP is the file's shared MLP, beside which there may be experts. Positions are used only if the file
    says so."""
    layers = plain.num_hidden_layers
    attends = state_spaces.kinds(get("layer_types") or get("layers_block_type") or ["mamba"] * layers, layers, _KINDS)
    if not is_size(get("shared_intermediate_size")):
        raise ModelError("config.json needs positive integers for: shared_intermediate_size")
    own = _read(get, plain).every(MLPConfig, intermediate_size=get("shared_intermediate_size"))
    own = own if get("position_embedding_type") == "rope" else own.every(AttentionConfig, rope=None)
    if get("num_local_experts"):
        own = base.sparse(own, dataclasses.replace(hf_experts.from_hf(hf_experts.local(get)), shared=own.dense))
    if all(attends):
        return own
    mixer = state_spaces.mamba2(get, state_spaces.expanded(get), plain.norm, **state_spaces.proj_bias(get))
    return jamba.hybrid(own, mixer, attends)


def _write_4(config: ModelConfig) -> dict[str, Any]:
    """Writes Granite 4, with the sizes of state-space layers, which transformers checks even if there are none."""
    c, experts = config, config.experts
    spaces = {"mamba_n_heads": 1, "mamba_d_head": 2 * c.hidden_size, "mamba_expand": 2}
    sizes = {"num_local_experts": 0, "num_experts_per_tok": 0, "shared_intermediate_size": c.dense.intermediate_size}
    if experts is not None and experts.shared is not None:
        sizes = hf_experts.local_to_hf(experts) | {"shared_intermediate_size": experts.shared.intermediate_size}
    return _write(c) | sizes | (state_spaces.mamba2_to_hf(c) or spaces) | {
        "layer_types": [FULL if attends else "mamba" for attends in jamba.attends(c)],
        "position_embedding_type": None if all(one.rope is None for one in c.attentions) else "rope",
    }  # fmt: skip


_LINEAR = {"gate_proj": "input_linear#0", "up_proj": "input_linear#1", "down_proj": "output_linear"}
_MODULES = state_spaces.modules(state_spaces.NAMES) | {
    f"{mlp}.{ours}": f"shared_mlp.{theirs}" for mlp in ("mlp", "mlp.shared_experts") for ours, theirs in _LINEAR.items()
}


def tensor_name_4(name: str) -> str:
    """Granite 4's name of a tensor that has this name in Llama's layout.

    >>> tensor_name_4("model.layers.3.mlp.shared_experts.up_proj.weight")
    'model.layers.3.shared_mlp.input_linear.weight#1'
    """
    moe = ".mlp.experts." in name or ".mlp.gate." in name
    return tensor_name(name) if moe else base.renamed(name, _MODULES, {})


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
    _USUAL | state_spaces.USUAL | {
        "num_local_experts": 8, "num_experts_per_tok": 2, "shared_intermediate_size": 1024,
    },
    _read_4, _write_4,
    SILU | {"normalization_function": ("rmsnorm", None), "position_embedding_type": ("rope", "nope", None)},
    names=tensor_name_4, layout=state_spaces.layout,
    note=f"{_NOTE}; positions (`position_embedding_type`), which layers have attention (`layer_types`), experts "
    "(`num_local_experts`), limits of steps (`time_step_limit`)",
)  # fmt: skip
