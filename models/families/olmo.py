"""OLMo 2 (arXiv:2501.00656) and OLMo 3: attention and MLP read the stream unnormed, and their outputs are normed.

OLMoE (arXiv:2409.02060) has Llama's norms, and experts in place of every MLP. All norm queries and keys over all heads.
"""

from typing import Any

from specjax.models import gemma_text, hf_experts, hf_rope
from specjax.models.attention import AttentionConfig
from specjax.models.families import base
from specjax.models.families.base import Family, Fields
from specjax.models.fields import FULL, SLIDING, an_object, flag, positive
from specjax.models.layer import LayerConfig
from specjax.models.model_config import ModelConfig
from specjax.models.norms import NormConfig
from specjax.models.ropes import RopeConfig

_THETA = 500000.0
_USUAL = {"max_position_embeddings": 2048, "rms_norm_eps": 1e-5}


def _read(get: Fields, plain: ModelConfig) -> ModelConfig:
    own = plain.every(AttentionConfig, **base.attention_bias(get), qk_wide_norm=plain.norm)
    return own.every(LayerConfig, pre_norms=False, post_norms=True).every(NormConfig, kind="wide")


def _write(config: ModelConfig) -> dict[str, Any]:
    return {"attention_bias": config.near.qkv_bias}


def _read_3(get: Fields, plain: ModelConfig) -> ModelConfig:
    """`rope_theta` and `rope_scaling` apply to layers without a window; in `rope_parameters` each kind of layer has its
    own."""
    layers, types = plain.num_hidden_layers, get("layer_types")
    types = [SLIDING if (i + 1) % 4 else FULL for i in range(layers)] if types is None else types
    given = an_object("rope_parameters", get("rope_parameters"))
    theta = _THETA if get("rope_theta") is None else get("rope_theta")
    near, far = (an_object(f"rope_parameters: {kind}", given.get(kind)) for kind in (SLIDING, FULL))
    near, far = (
        {"rope_theta": _THETA} | near,
        {"rope_theta": theta} | far | an_object("rope_scaling", get("rope_scaling")),
    )
    read = lambda rope: RopeConfig(*hf_rope.from_hf({"rope_parameters": rope}, get("max_position_embeddings")))
    own, ropes = base.windows(_read(get, plain), types, get("sliding_window")), {SLIDING: read(near), FULL: read(far)}
    return base.mixers(own, lambda i: {"rope": ropes[types[i]]})


def _write_3(config: ModelConfig) -> dict[str, Any]:
    ropes = base.ropes_by_kind(config)
    return _write(config) | {
        "layer_types": base.layer_types(config), "sliding_window": config.near.window,
        "rope_parameters": base.rope_parameters(ropes), "rope_theta": ropes[FULL].theta,
        "rope_scaling": hf_rope.to_hf(ropes[FULL].scaling),
    }  # fmt: skip


def _read_moe(get: Fields, plain: ModelConfig) -> ModelConfig:
    named = lambda name: get("intermediate_size" if name == "moe_intermediate_size" else name)
    experts = hf_experts.from_hf(named, norm_topk_prob=flag("norm_topk_prob", get("norm_topk_prob")))
    clip = None if get("clip_qkv") is None else positive("clip_qkv", get("clip_qkv"))
    own = plain.every(AttentionConfig, **base.attention_bias(get), qk_wide_norm=plain.norm, clip=clip)
    return base.sparse(own, experts)


def _write_moe(config: ModelConfig) -> dict[str, Any]:
    experts = config.experts
    if experts is None:
        return {}
    names = ("num_experts", "num_experts_per_tok", "norm_topk_prob")
    return _write(config) | {name: getattr(experts, name) for name in names} | {
        "intermediate_size": experts.moe_intermediate_size, "clip_qkv": config.near.clip,
    }  # fmt: skip


OLMOE = Family(
    "olmoe", "OlmoeForCausalLM",
    {
        "vocab_size": 50304, "hidden_size": 2048, "intermediate_size": 2048, "num_hidden_layers": 16,
        "num_attention_heads": 16, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "num_experts": 64,
        "num_experts_per_tok": 8,
    },
    _read_moe, _write_moe,
    note="queries, keys and values within a distance of zero (`clip_qkv`), biases of attention, weights that are divided by "
    "their sum (`norm_topk_prob`)",
)  # fmt: skip
OLMO2 = Family(
    "olmo2", "Olmo2ForCausalLM", _USUAL, _read, _write, layout=gemma_text.hf_name, note="biases of attention"
)
OLMO3 = Family(
    "olmo3", "Olmo3ForCausalLM", _USUAL | {"sliding_window": 4096}, _read_3, _write_3, rope=None, layout=gemma_text.hf_name,
    note="scaled ropes in layers without a window, biases of attention",
)  # fmt: skip
