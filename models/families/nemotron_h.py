"""Nemotron-H (arXiv:2504.03624) and Nemotron 3 (huggingface.co/nvidia): a layer is one of Mamba-2, attention without positions,
an MLP of squared ReLUs, or experts of such MLPs, with one norm.
"""

import dataclasses
import re
from typing import Any

from specjax.models import hf_experts
from specjax.models.attention import AttentionConfig
from specjax.models.errors import ModelError
from specjax.models.experts import ExpertsConfig
from specjax.models.families import base, state_spaces
from specjax.models.families.base import Family, Fields
from specjax.models.fields import flag, is_size, shown
from specjax.models.layer import LayerConfig
from specjax.models.mlp import MLPConfig
from specjax.models.model_config import ModelConfig

_PATTERN = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
_KINDS = {"linear_attention": "mamba", "full_attention": "attention"} | {kind: kind for kind in _PATTERN.values()}


def _types(get: Fields) -> list[str]:
    """The kind of every layer: published files have a pattern of letters.

    Raises:
      ModelError: on unknown kinds.
    """
    pattern, types = get("hybrid_override_pattern"), get("layers_block_type") or get("layer_types")
    if types is None and pattern is None:
        return ["mamba", "moe", "attention", "mlp"]
    if types is None and (not isinstance(pattern, str) or not pattern or not {*pattern} <= {*_PATTERN}):
        raise ModelError(f"config.json: hybrid_override_pattern must be made of M, *, - and E, not {shown(pattern)}")
    types = [_PATTERN[letter] for letter in pattern] if types is None else types
    return state_spaces.kinds(types, len(types) if isinstance(types, list) else 0, _KINDS, "layers_block_type")


def _experts(get: Fields, mlp: MLPConfig) -> ExpertsConfig:
    latent, act = get("moe_latent_size"), mlp.hidden_act
    if latent is not None and not is_size(latent):
        raise ModelError(f"config.json: moe_latent_size must be a positive integer or null, not {shown(latent)}")
    if mlp.bias:
        raise ModelError("config.json: mlp_bias true is not supported in a Nemotron-H with experts")
    if not is_size(get("moe_shared_expert_intermediate_size")):
        raise ModelError("config.json needs positive integers for: moe_shared_expert_intermediate_size")
    shared = MLPConfig(get("moe_shared_expert_intermediate_size"), act, gated=False)
    found = hf_experts.by_groups(hf_experts.routed(get), norm_topk_prob=flag("norm_topk_prob", get("norm_topk_prob")))
    return dataclasses.replace(found, shared=shared, ungated=act, latent_size=latent, dense=mlp)


def _read(get: Fields, plain: ModelConfig) -> ModelConfig:
    types = _types(get)
    mlp = MLPConfig(plain.dense.intermediate_size, base.activation(get), flag("mlp_bias", get("mlp_bias")), gated=False)
    parts: dict[str, dict[str, Any]] = {
        "attention": {"mixer": plain.every(AttentionConfig, rope=None).near, "feed": None},
        "mlp": {"mixer": None, "feed": mlp},
    }
    if "mamba" in types:
        own = state_spaces.mamba2(get, None, plain.norm, **state_spaces.proj_bias(get))
        parts["mamba"] = {"mixer": own, "feed": None}
    if "moe" in types:
        parts["moe"] = {"mixer": None, "feed": _experts(get, mlp)}
    return plain.each(lambda i, layer: LayerConfig(**parts[types[i]], norm=plain.norm))


def _kind(config: ModelConfig, i: int) -> str:
    layer = config.layers[i]
    if layer.mixer is None:
        return "-" if layer.experts is None else "E"
    return "M" if config.state_mixer(i) is not None else "*"


def _write(config: ModelConfig) -> dict[str, Any]:
    out = {"hybrid_override_pattern": "".join(_kind(config, i) for i in range(config.num_hidden_layers))}
    out |= {name: value for name, value in state_spaces.mamba2_to_hf(config).items() if name != "mamba_expand"}
    experts, mlp = config.experts, config.dense
    act = mlp.hidden_act if experts is None or experts.ungated is None else experts.ungated
    out |= {"hidden_act": act, "mlp_bias": mlp.bias}
    if experts is None:
        return out
    shared = 0 if experts.shared is None else experts.shared.intermediate_size
    return out | hf_experts.routed_to_hf(experts) | {
        "moe_shared_expert_intermediate_size": shared, "moe_latent_size": experts.latent_size, "n_shared_experts": 1,
    }  # fmt: skip


_MODULES = {"input_layernorm": "norm", "post_attention_layernorm": "norm"} | {
    f"self_attn.{name}_proj": f"mixer.{name}_proj" for name in "qkvo"
} | {
    "mlp.up_proj": "mixer.up_proj", "mlp.down_proj": "mixer.down_proj", "mlp.gate": "mixer.gate",
    "mlp.into_latent": "mixer.fc1_latent_proj", "mlp.out_of_latent": "mixer.fc2_latent_proj",
} | state_spaces.modules(state_spaces.NAMES, "mixer")  # fmt: skip


def tensor_name(name: str) -> str:
    """Nemotron-H's name of a tensor that has this name in Llama's layout."""
    name = re.sub(r"\.mlp\.((shared_)?experts)\.", r".mixer.\1.", name).replace("mlp.gate.bias", "mlp.gate.score_bias")
    return base.renamed(name, _MODULES, state_spaces.BACKBONE).replace(".score_bias", ".e_score_correction_bias")


NEMOTRON_H = Family(
    "nemotron_h", "NemotronHForCausalLM",
    state_spaces.USUAL | {
        "vocab_size": 131072, "hidden_size": 4096, "intermediate_size": 21504, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5,
        "hidden_act": "relu2", "mamba_d_head": 64, "mamba_d_state": 128, "mamba_n_groups": 8, "n_routed_experts": 8,
        "num_experts_per_tok": 2, "moe_intermediate_size": 7688, "moe_shared_expert_intermediate_size": 7688,
        "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.0,
        "num_hidden_layers": lambda get: len(_types(get)),
    },
    _read, _write, {"sliding_window": (None,), "attention_bias": (False, None), "mamba_hidden_act": ("silu", None),
                    "n_shared_experts": (1, None)},
    rope=None, names=tensor_name, layout=state_spaces.layout,
    fields={
        "num_hidden_layers": (), "rms_norm_eps": ("layer_norm_epsilon",), "hidden_act": ("mlp_hidden_act",),
        "mamba_n_heads": ("mamba_num_heads",), "mamba_d_head": ("mamba_head_dim",), "mamba_d_state": ("ssm_state_size",),
        "mamba_n_groups": ("n_groups", "mamba_n_groups"), "mamba_d_conv": ("conv_kernel", "mamba_d_conv"),
        "mamba_conv_bias": ("use_conv_bias", "mamba_conv_bias"), "mamba_proj_bias": ("use_bias",),
        "time_step_limit": ("mamba_dt_limit", "time_step_limit"),
    },
    note="the kind of every layer (`hybrid_override_pattern`, `layers_block_type`), groups of experts (`n_group`), experts in "
    "a narrower space (`moe_latent_size`), limits of steps (`time_step_limit`)",
)  # fmt: skip
