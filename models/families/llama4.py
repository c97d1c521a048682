"""Llama 4 (huggingface.co/meta-llama): layers that rotate neighbouring channels and see chunks of the text, layers without
positions that see all of it, and experts."""

import dataclasses
import re
from typing import Any

from specjax.models import hf_experts, weights
from specjax.models.errors import ModelError
from specjax.models.families import base
from specjax.models.families.base import Family, Fields
from specjax.models.fields import CHUNKED, FULL, flag, is_id, is_size, layer_kinds, positive, shown
from specjax.models.mlp import MLPConfig
from specjax.models.model_config import ModelConfig
from specjax.models.norms import NormConfig
from specjax.models.ropes import QueryScale


def _read(get: Fields, plain: ModelConfig) -> ModelConfig:
    layers, chunk = plain.num_hidden_layers, get("attention_chunk_size")
    rotates = base.rotates(get, get("no_rope_layers") or None, layers)
    types = get("layer_types")
    types = [CHUNKED if turns and chunk is not None else FULL for turns in rotates] if types is None else types
    sees_chunks = [kind == CHUNKED for kind in layer_kinds(types, layers, CHUNKED)]
    if any(sees_chunks) and not is_size(chunk):
        raise ModelError(f"config.json: attention_chunk_size must be a positive integer, not {shown(chunk)}")
    scale = _query_scale(get)
    norm = NormConfig(plain.norm.eps, "bare") if flag("use_qk_norm", get("use_qk_norm")) else None
    parts = lambda i: {
        "window": chunk if sees_chunks[i] else None, "chunked": sees_chunks[i], **base.attention_bias(get),
        **({"qk_norm": norm, "norm_first": norm is None} if rotates[i] else {"rope": None, "query_scale": scale}),
    }  # fmt: skip
    return _sparse(get, base.mixers(plain, parts))


def _query_scale(get: Fields) -> QueryScale | None:
    """Of layers without positions. Old files have a number in place of true."""
    tuned = get("attn_temperature_tuning")
    if not flag("attn_temperature_tuning", bool(tuned) if isinstance(tuned, int) else tuned):
        return None
    if not is_size(get("floor_scale")):
        raise ModelError(f"config.json: floor_scale must be a positive integer, not {shown(get('floor_scale'))}")
    return QueryScale(positive("attn_scale", get("attn_scale")), get("floor_scale"), first=1)


def _sparse(get: Fields, config: ModelConfig) -> ModelConfig:
    """With experts in `moe_layers` or, without these, in every `interleave_moe_layer_step`th layer."""
    layers, step, uses = config.num_hidden_layers, get("interleave_moe_layer_step"), get("moe_layers")
    if not is_size(step) or not is_size(get("intermediate_size_mlp")):
        raise ModelError("config.json needs positive integers for: interleave_moe_layer_step, intermediate_size_mlp")
    uses = list(range(step - 1, layers, step)) if uses is None else uses
    if not isinstance(uses, list) or not all(is_id(i) for i in uses):
        raise ModelError(f"config.json: moe_layers must be numbers of layers, not {shown(uses)}")
    experts = hf_experts.from_hf(hf_experts.local(get), scoring="inputs")
    experts = dataclasses.replace(experts, shared=MLPConfig(experts.moe_intermediate_size))
    dense = config.every(MLPConfig, intermediate_size=get("intermediate_size_mlp"))
    return base.sparse(dense, experts, [i in uses for i in range(layers)])


def _write(config: ModelConfig) -> dict[str, Any]:
    c = config
    scale = next((one.query_scale for one in c.attentions if one.query_scale is not None), None)
    out = {
        "no_rope_layers": [int(one.rope is not None) for one in c.attentions],
        "layer_types": [FULL if one.window is None else CHUNKED for one in c.attentions],
        "attention_chunk_size": c.near.window, "use_qk_norm": any(one.qk_norm is not None for one in c.attentions),
        "attn_temperature_tuning": scale is not None, "attention_bias": c.near.qkv_bias,
        "intermediate_size_mlp": c.dense.intermediate_size,
        "moe_layers": [i for i, sparse in enumerate(base.sparse_layers(c)) if sparse],
    }  # fmt: skip
    out |= {} if scale is None else {"attn_scale": scale.beta, "floor_scale": scale.period}
    return out if c.experts is None else out | hf_experts.local_to_hf(c.experts)


_EXPERTS = {"gate": "gate_up_proj#0", "up": "gate_up_proj#1", "down": "down_proj"}
_MODULES = re.compile(r"\.mlp\.(gate(?=\.)|shared_experts|)")


def hf_name(path: tuple[Any, ...]) -> tuple[str, bool]:
    """The Hugging Face name of a parameter; see `specjax.models.weights.Layout`."""
    match [getattr(key, "key", key) for key in path]:
        case ["layers", layer, "mlp", "experts", name, _]:
            return f"model.layers.{layer}.mlp.experts.{_EXPERTS[name]}", False
    return weights.hf_name(path)


def tensor_name(name: str) -> str:
    """Llama 4's name of a tensor that has this name in Llama's layout.

    >>> tensor_name("model.layers.3.mlp.shared_experts.up_proj.weight")
    'model.layers.3.feed_forward.shared_expert.up_proj.weight'
    """
    own = {"gate": "router", "shared_experts": "shared_expert", "": ""}
    return _MODULES.sub(lambda found: f".feed_forward.{own[found[1]]}", name)


LLAMA_4 = Family(
    "llama4_text", "Llama4ForCausalLM",
    {
        "vocab_size": 202048, "hidden_size": 5120, "intermediate_size": 8192, "intermediate_size_mlp": 16384,
        "num_hidden_layers": 48, "num_attention_heads": 40, "num_key_value_heads": 8, "head_dim": 128,
        "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 5e5, "num_local_experts": 16,
        "num_experts_per_tok": 1, "interleave_moe_layer_step": 1, "use_qk_norm": True, "no_rope_layer_interval": 4,
        "attention_chunk_size": 8192, "attn_temperature_tuning": True, "floor_scale": 8192, "attn_scale": 0.1,
    },
    _read, _write, others=("Llama4ForConditionalGeneration", "llama4"), names=tensor_name, interleaved=True, layout=hf_name,
    text=base.text_part,
    note="which layers have no positions (`no_rope_layers`), which see chunks (`layer_types`), of which size "
    "(`attention_chunk_size`), which have experts (`moe_layers`), norms of q and k (`use_qk_norm`), queries that stay as they "
    "are (`attn_temperature_tuning`), biases of attention",
)  # fmt: skip
