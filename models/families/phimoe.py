"""Phi-3.5-MoE (arXiv:2404.14219): Mixtral's layers with layer norms, biases, and a router that chooses two experts by
SparseMixer-2 (arXiv:2409.12136)."""

import dataclasses
from typing import Any

from specjax.models import hf_experts
from specjax.models.attention import AttentionConfig
from specjax.models.families import base, mixtral
from specjax.models.families.base import SILU, Family, Fields
from specjax.models.families.llama import all_windowed
from specjax.models.fields import an_object, flag, positive
from specjax.models.model_config import HeadConfig, ModelConfig
from specjax.models.norms import NormConfig
from specjax.models.ropes import RopeConfig


def _rope(get: Fields) -> RopeConfig:
    """`longrope` has a factor of cosines and sines for short texts and one for long ones."""
    name = "rope_scaling" if get("rope_scaling") else "rope_parameters"
    rope = an_object(name, get(name))
    if "longrope" not in (rope.get("rope_type"), rope.get("type")):
        return base.rope(get)
    short, long = (positive(field, rope.get(field)) for field in ("short_mscale", "long_mscale"))
    named = {"rope_scaling": rope | {"attention_factor": long}, "rope_parameters": None}
    width = get("head_dim") or get("hidden_size") // get("num_attention_heads")
    made = base.rope(lambda field: named.get(field, get(field)), long=width)
    assert made.scaling is not None, "a long rope is scaled"
    return dataclasses.replace(made, scaling=dataclasses.replace(made.scaling, short_magnitude=short))


def _read(get: Fields, plain: ModelConfig) -> ModelConfig:
    jitter = positive("router_jitter_noise", get("router_jitter_noise"))
    experts = hf_experts.from_hf(hf_experts.local(get), scoring="sparsemixer", router_jitter_noise=jitter)
    own = all_windowed(get, plain).every(AttentionConfig, **base.attention_bias(get))
    own = own.every(NormConfig, kind="wide", mean=True, bias=True)
    return base.sparse(own.every(HeadConfig, bias=flag("lm_head_bias", get("lm_head_bias"))), experts)


def _write(config: ModelConfig) -> dict[str, Any]:
    c, experts, scaling = config, config.experts, config.rope.scaling
    if experts is None:
        return {}
    out = hf_experts.local_to_hf(experts) | {
        "router_jitter_noise": experts.router_jitter_noise, "sliding_window": c.near.window,
        "attention_bias": c.near.qkv_bias, "lm_head_bias": c.head.bias,
    }  # fmt: skip
    if scaling is None or scaling.kind != "longrope":
        return out
    original = {"original_max_position_embeddings": scaling.original_max_position_embeddings}
    rope = {
        "type": "longrope", "short_factor": list(scaling.short_factor), "long_factor": list(scaling.long_factor),
        "short_mscale": scaling.short_magnitude or scaling.magnitude, "long_mscale": scaling.magnitude,
    }  # fmt: skip
    return out | original | {"rope_scaling": rope | original}


PHIMOE = Family(
    "phimoe", "PhimoeForCausalLM",
    {
        "vocab_size": 32064, "hidden_size": 4096, "intermediate_size": 6400, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
        "rope_theta": 1e6, "num_local_experts": 16, "num_experts_per_tok": 2, "router_jitter_noise": 0.01,
    },
    _read, _write, SILU | {"num_experts_per_tok": (2,)}, others=("PhiMoEForCausalLM",), rope=_rope,
    names=mixtral.tensor_name,
    note="a window, biases of attention and of the head (`lm_head_bias`), the rope `longrope` with factors of its own "
    "(`short_mscale`, `long_mscale`)",
)  # fmt: skip
