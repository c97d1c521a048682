"""Jamba (arXiv:2403.19887) and Bamba (huggingface.co/ibm-ai-platform): Llama's layers, most with a state space, not attention.

Jamba has Mamba, experts in some layers and no positions; Bamba has Mamba-2.
"""

import dataclasses
import functools
from typing import Any

from specjax.models import hf_experts
from specjax.models.attention import AttentionConfig
from specjax.models.errors import ModelError
from specjax.models.families import base, state_spaces
from specjax.models.families.base import SILU, Family, Fields
from specjax.models.families.llama import biases
from specjax.models.fields import is_size, shown
from specjax.models.mixers import StateMixerConfig
from specjax.models.model_config import ModelConfig


def hybrid(config: ModelConfig, mixer: StateMixerConfig, attends: list[bool]) -> ModelConfig:
    """The model with the mixer in place of attention, except in the layers that attend."""
    change = lambda i, layer: layer if attends[i] else dataclasses.replace(layer, mixer=mixer)
    return config.each(change)


def attends(config: ModelConfig) -> list[bool]:
    """Which layers have attention."""
    return [config.slot_mixer(i) is not None for i in range(config.num_hidden_layers)]


def _every(get: Fields, kind: str, layers: int) -> list[bool]:
    """Which layers are of a kind, of which one is in every period.

    Raises:
      ModelError: on wrong fields.
    """
    period, offset = get(f"{kind}_layer_period"), get(f"{kind}_layer_offset")
    if not is_size(period) or offset not in range(period):
        raise ModelError(
            f"config.json: {kind}_layer_offset must be a number below {kind}_layer_period, not {shown(offset)} of "
            f"{shown(period)}"
        )
    return [i % period == offset for i in range(layers)]


def _read(get: Fields, plain: ModelConfig) -> ModelConfig:
    layers = plain.num_hidden_layers
    own = plain.every(AttentionConfig, rope=None)
    own = hybrid(own, state_spaces.mamba(get, state_spaces.expanded(get), plain.norm), _every(get, "attn", layers))
    sparse = _every(get, "expert", layers)
    if get("num_experts") == 1:
        return own
    own_get = lambda name: get("intermediate_size" if name == "moe_intermediate_size" else name)
    return base.sparse(own, hf_experts.from_hf(own_get, norm_topk_prob=False), sparse)


def _period(kind: str, uses: list[bool]) -> dict[str, Any]:
    """The period and the offset of layers of a kind; of other patterns, one that reads back as another model."""
    found = [i for i, used in enumerate(uses) if used]
    offset = found[0] if found else len(uses)
    period = found[1] - offset if len(found) > 1 else max(len(uses), offset + 1)
    return {f"{kind}_layer_period": period, f"{kind}_layer_offset": offset}


def _write(config: ModelConfig) -> dict[str, Any]:
    experts, sparse = config.experts, base.sparse_layers(config)
    sizes = {"num_experts": 1, "num_experts_per_tok": 1}
    if experts is not None:
        sizes = {"num_experts": experts.num_experts, "num_experts_per_tok": experts.num_experts_per_tok}
        sizes["intermediate_size"] = experts.moe_intermediate_size
    return state_spaces.mamba_to_hf(config) | _period("attn", attends(config)) | _period("expert", sparse) | sizes


SHELL = {"post_attention_layernorm": "pre_ff_layernorm"} | {
    f"mlp.{name}_proj": f"feed_forward.{name}_proj" for name in ("gate", "up", "down")
}
OUTER = {"model.norm": "model.final_layernorm"}
_JAMBA = SHELL | {"mlp.gate": "feed_forward.router"} | state_spaces.modules(state_spaces.NAMES_1)


def tensor_name(name: str) -> str:
    """Jamba's name of a tensor that has this name in Llama's layout."""
    return base.renamed(name.replace(".mlp.experts.", ".feed_forward.experts."), _JAMBA, OUTER)


JAMBA = Family(
    "jamba", "JambaForCausalLM",
    state_spaces.USUAL_1 | {
        "vocab_size": 65536, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 262144, "num_experts": 16,
        "num_experts_per_tok": 2, "attn_layer_period": 8, "attn_layer_offset": 4, "expert_layer_period": 2,
        "expert_layer_offset": 1,
    },
    _read, _write, SILU | {"mamba_inner_layernorms": (True, None)}, rope=None, names=tensor_name, layout=state_spaces.layout,
    note="which layers have attention (`attn_layer_period`) and experts (`expert_layer_period`)",
)  # fmt: skip


def _rope(get: Fields):
    """Bamba rotates half of each head, whatever a file says."""
    half = lambda name: 0.5 if name == "partial_rotary_factor" else get(name)
    return base.rope(half, partial=True)


def _read_bamba(get: Fields, plain: ModelConfig) -> ModelConfig:
    chosen = get("attn_layer_indices") or []
    layers = range(plain.num_hidden_layers)
    if not isinstance(chosen, list) or any(one not in layers for one in chosen):
        raise ModelError(f"config.json: attn_layer_indices must be numbers of layers, not {shown(chosen)}")
    own = state_spaces.mamba2(get, state_spaces.expanded(get), plain.norm, **state_spaces.proj_bias(get))
    return hybrid(biases(get, plain), own, [i in chosen for i in layers])


def _write_bamba(config: ModelConfig) -> dict[str, Any]:
    own = {"attention_bias": config.attention_sizes.qkv_bias, "mlp_bias": config.dense.bias}
    found = [i for i, used in enumerate(attends(config)) if used]
    return state_spaces.mamba2_to_hf(config) | own | {"attn_layer_indices": found}


BAMBA = Family(
    "bamba", "BambaForCausalLM",
    state_spaces.USUAL | {
        "vocab_size": 128000, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 262144, "rms_norm_eps": 1e-5,
    },
    _read_bamba, _write_bamba, SILU, rope=_rope, layout=state_spaces.layout,
    names=functools.partial(base.renamed, modules=SHELL | state_spaces.modules(state_spaces.NAMES), outer=OUTER),
    note="which layers have attention (`attn_layer_indices`), biases of attention and MLP, limits of steps "
    "(`time_step_limit`)",
)  # fmt: skip
