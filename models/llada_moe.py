"""The config files of LLaDA-MoE.

LLaDA-MoE (arXiv:2509.24389) has Qwen3-MoE's tensor names and some config fields of its own. A token sees the whole
canvas. Its weights are the probabilities of its experts among all experts, not divided by their sum.
"""

from typing import Any

from specjax.models import hf_config
from specjax.models.attention import AttentionConfig
from specjax.models.errors import ModelError
from specjax.models.families import base
from specjax.models.fields import check_fixed, flag, is_size, shown
from specjax.models.model_config import ModelConfig

MASK = 156895
"""The mask's id in published models, whose `config.json` omits it."""

# Values that the loader relies on. A config with other values describes another model.
_FIXED = {
    "clip_qkv": (None,), "shared_expert_intermediate_size": (None,), "moe_router_enable_expert_bias": (False, None),
    "moe_router_score_function": ("softmax", None), "norm_topk_prob": (False, None), "routed_scaling_factor": (1, None),
    "router_num_group": (None,), "router_topk_group": (None,),
}  # fmt: skip


def from_hf(config: dict[str, Any]) -> ModelConfig:
    """Reads the `config.json` of LLaDA-MoE.

    Raises:
      ModelError: on what the loader does not support, and on missing or inconsistent fields.
    """
    check_fixed(config, _FIXED, "LLaDA-MoE")
    layers, sparse = config.get("num_hidden_layers"), config.get("moe_layer_freq") or None
    if sparse is not None and (not isinstance(sparse, list) or len(sparse) != layers):
        raise ModelError(f"config.json: moe_layer_freq must have a number for each layer, not {shown(sparse)}")
    missing = [
        name for name in ("dense_intermediate_size", "expert_intermediate_size") if not is_size(config.get(name))
    ]
    if missing:
        raise ModelError(f"config.json needs positive integers for: {', '.join(missing)}")
    defaults = {"num_key_value_heads": None, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5}
    renamed = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "head_dim": None,
        "intermediate_size": config["dense_intermediate_size"],
        "moe_intermediate_size": config["expert_intermediate_size"],
        "norm_topk_prob": False,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [i for i, kind in enumerate(sparse or []) if not kind],
        "use_sliding_window": False,
        "layer_types": None,
    }
    shape = hf_config.from_hf(defaults | config | renamed, besides={*_FIXED, "moe_layer_freq", "qk_layernorm"})
    normed = flag("qk_layernorm", config.get("qk_layernorm"))
    return shape.every(AttentionConfig, qk_norm=shape.norm if normed else None)


def to_hf(config: ModelConfig, plain: dict[str, Any]) -> dict[str, Any]:
    """The `config.json` of LLaDA-MoE, from Qwen3-MoE's.

    Raises:
      ModelError: if LLaDA-MoE cannot express the model.
    """
    c = config
    wide = c.near.head_dim * c.near.num_attention_heads == c.hidden_size
    if c.experts is None or c.experts.norm_topk_prob or c.near.window is not None or not wide:
        raise ModelError(
            "a diffusion model with experts and without blocks is written as LLaDA-MoE, which has no sliding window, has heads "
            "that fill its width, and does not divide the experts' weights by their sum"
        )
    of_qwen = ("moe_intermediate_size", "intermediate_size", "head_dim", "decoder_sparse_step", "mlp_only_layers")
    windows = ("use_sliding_window", "sliding_window", "max_window_layers", "layer_types")
    kept = {name: value for name, value in plain.items() if name not in of_qwen + windows}
    own = {
        "dense_intermediate_size": c.dense.intermediate_size,
        "expert_intermediate_size": c.experts.moe_intermediate_size,
        "moe_layer_freq": [int(sparse) for sparse in base.sparse_layers(c)],
        "qk_layernorm": c.near.qk_norm is not None,
    }
    return {name: allowed[0] for name, allowed in _FIXED.items()} | kept | own
