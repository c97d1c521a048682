"""gpt-oss (OpenAI 2025, arXiv:2508.10925): attention sinks, biases, experts whose gates and inputs are clamped.

Published folders hold the experts' weights in MXFP4 (`specjax.models.packed.mxfp4`). Folders that transformers or
`save` writes hold plain numbers. Both are read.
"""

from typing import Any

from specjax.models import hf_experts, hf_rope, weights
from specjax.models.attention import AttentionConfig
from specjax.models.families import base
from specjax.models.families.base import Family, Fields
from specjax.models.fields import FULL, SLIDING, positive
from specjax.models.model_config import ModelConfig
from specjax.models.norms import NormConfig
from specjax.models.ropes import RopeConfig

_ROPE = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}  # fmt: skip


def _rope(get: Fields) -> RopeConfig:
    return base.rope(lambda name: _ROPE if name == "rope_parameters" and not get(name) else get(name))


def _read(get: Fields, plain: ModelConfig) -> ModelConfig:
    types = get("layer_types")
    types = [FULL if i % 2 else SLIDING for i in range(plain.num_hidden_layers)] if types is None else types
    experts = hf_experts.from_hf(
        hf_experts.local(get), scoring="chosen",
        swiglu_limit=positive("swiglu_limit", get("swiglu_limit")),
        swiglu_alpha=positive("swiglu_alpha", get("swiglu_alpha")),
    )  # fmt: skip
    own = base.windows(plain, types, get("sliding_window")).every(NormConfig, kind="wide")
    return base.sparse(own.every(AttentionConfig, **base.attention_bias(get), sinks=True), experts)


def _write(config: ModelConfig) -> dict[str, Any]:
    c = config
    out = {} if c.near.window is None else {"sliding_window": c.near.window}
    out |= {
        "layer_types": base.layer_types(c), "attention_bias": c.near.qkv_bias,
        "rope_scaling": hf_rope.to_hf(c.rope.scaling) or {"rope_type": "default"},
    }  # fmt: skip
    if c.experts is None or c.experts.swiglu_limit is None:
        return out
    return out | hf_experts.local_to_hf(c.experts) | {
        "swiglu_limit": c.experts.swiglu_limit, "swiglu_alpha": c.experts.swiglu_alpha,
    }  # fmt: skip


def hf_name(path: tuple[Any, ...]) -> tuple[str, bool]:
    """The Hugging Face name of a parameter; see `specjax.models.weights.Layout`."""
    keys = [getattr(key, "key", key) for key in path]
    match keys:
        case ["layers", layer, "attention", "sinks"]:
            return f"model.layers.{layer}.self_attn.sinks", False
        case ["layers", layer, "mlp", "router", kind]:
            return f"model.layers.{layer}.mlp.router.{'weight' if kind == 'kernel' else kind}", kind == "kernel"
        case ["layers", layer, "mlp", "experts", name, kind]:
            return f"model.layers.{layer}.mlp.experts.{name}_proj{'' if kind == 'kernel' else '_bias'}", False
    return weights.hf_name(path)


GPT_OSS = Family(
    "gpt_oss", "GptOssForCausalLM",
    {
        "vocab_size": 201088, "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 36,
        "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5, "sliding_window": 128, "num_local_experts": 128, "num_experts_per_tok": 4, "swiglu_limit": 7.0,
        "swiglu_alpha": 1.702, "attention_bias": True, "rope_theta": 150000.0,
    },
    _read, _write, rope=_rope, layout=hf_name,
    note="experts in MXFP4 (`quantization_config`), which layers have a window (`layer_types`)",
)  # fmt: skip
