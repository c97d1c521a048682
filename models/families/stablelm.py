"""StableLM 3B and StableLM 2 (Bellagente et al. 2024, arXiv:2402.17834): Llama's layers with layer norms. Larger ones have one
norm before attention and MLP, which are side by side, and norms of each head of q and k.
"""

import functools
from typing import Any

from specjax.models import weights
from specjax.models.attention import AttentionConfig
from specjax.models.families import base
from specjax.models.families.base import Family, Fields
from specjax.models.fields import flag
from specjax.models.layer import LayerConfig
from specjax.models.mlp import MLPConfig
from specjax.models.model_config import ModelConfig
from specjax.models.norms import NormConfig


def _read(get: Fields, plain: ModelConfig) -> ModelConfig:
    normed, biased = (flag(name, get(name)) for name in ("qk_layernorm", "use_qkv_bias"))
    parallel = "one_norm" if flag("use_parallel_residual", get("use_parallel_residual")) else None
    own = plain.every(NormConfig, kind="wide", mean=True, bias=True)
    bare = NormConfig(plain.norm.eps, "wide", mean=True)
    own = own.every(AttentionConfig, qkv_bias=biased, qk_head_norm=bare if normed else None)
    return own.every(MLPConfig, hidden_act=base.activation(get)).every(LayerConfig, parallel=parallel)


def _write(config: ModelConfig) -> dict[str, Any]:
    near = config.near
    return {
        "use_qkv_bias": near.qkv_bias, "qk_layernorm": near.qk_head_norm is not None,
        "use_parallel_residual": config.layers[0].parallel is not None, "partial_rotary_factor": config.rope.share,
    }  # fmt: skip


def _layout(path: tuple[Any, ...]) -> tuple[str, bool]:
    match [getattr(key, "key", key) for key in path]:
        case ["layers", layer, "attention", "q_head_norm" | "k_head_norm" as name, _]:
            return f"model.layers.{layer}.self_attn.{name[0]}_layernorm.norms.{{}}.weight", False
    return weights.hf_name(path)


STABLELM = Family(
    "stablelm", "StableLmForCausalLM",
    {
        "max_position_embeddings": 4096, "num_key_value_heads": 32, "rms_norm_eps": 1e-5, "hidden_act": "silu",
        "partial_rotary_factor": 0.25,
    },
    _read, _write, {}, fields={"rms_norm_eps": ("layer_norm_eps",), "head_dim": ()}, layout=_layout,
    rope=functools.partial(base.rope, partial=True),
    note="the share of a head that is rotated (`partial_rotary_factor`), biases of q, k and v (`use_qkv_bias`), norms of each "
    "head of q and k (`qk_layernorm`), attention beside the MLP (`use_parallel_residual`), the activation",
)  # fmt: skip
