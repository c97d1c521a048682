"""Latent attention: DeepSeek-V2 (arXiv:2405.04434), DeepSeek-V3 and R1 (arXiv:2412.19437), Kimi K2 (arXiv:2507.20534),
GLM-4.7-Flash.

Their first layers have no experts. DeepSeek-V2's router takes softmaxes, and counts a group of experts by the best of them. A
file may hold further layers after the last (multi-token prediction), which a drafter uses.
"""

import dataclasses
from typing import Any

from specjax.models import hf_rope, weights
from specjax.models.errors import ModelError
from specjax.models.families import base
from specjax.models.families.base import SILU, Family, Fields
from specjax.models.families.glm import sparse, sparse_to_hf, tensor_name
from specjax.models.fields import flag, is_size, positive, shown
from specjax.models.latent import LatentAttentionConfig
from specjax.models.mlp import MLPConfig
from specjax.models.model_config import ModelConfig

_WIDTHS = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
_MODULES = {
    "q": "q_proj", "q_a": "q_a_proj", "q_a_norm": "q_a_layernorm", "q_b": "q_b_proj", "kv_a": "kv_a_proj_with_mqa",
    "kv_a_norm": "kv_a_layernorm", "k_b": "kv_b_proj", "v_b": "kv_b_proj", "o": "o_proj",
}  # fmt: skip
_SHARED = {"k_b": "#0", "v_b": "#1"}  # both are in one tensor, head by head


def latent(get: Fields, plain: ModelConfig) -> ModelConfig:
    """With latent attention in all layers, of the rope of `plain`."""
    # the file's name for qk_rope_head_dim is that of head_dim, see `Family.fields`
    widths = {name: get("head_dim" if name == "qk_rope_head_dim" else name) for name in _WIDTHS}
    rank = get("q_lora_rank")
    if wrong := [name for name, width in (widths | {"q_lora_rank": rank or 1}).items() if not is_size(width)]:
        raise ModelError(f"config.json needs positive integers for: {', '.join(wrong)}")
    if widths["qk_rope_head_dim"] % 2:
        raise ModelError(
            f"config.json: qk_rope_head_dim must be even, not {widths['qk_rope_head_dim']}: pairs of channels are rotated"
        )
    sharper = base.rope_fields(get).get("mscale_all_dim") if plain.rope.scaling else None
    mixer = LatentAttentionConfig(
        num_attention_heads=plain.near.num_attention_heads, **widths, q_lora_rank=rank, rope=plain.rope,
        bias=flag("attention_bias", get("attention_bias")),
        mscale_all_dim=positive("mscale_all_dim", sharper) if sharper else 0.0,
    )  # fmt: skip
    return plain.each(lambda i, layer: dataclasses.replace(layer, mixer=mixer))


def latent_to_hf(config: ModelConfig) -> dict[str, Any]:
    """The fields that `latent` reads, of a model that has it; otherwise none."""
    found = (layer.mixer for layer in config.layers if isinstance(layer.mixer, LatentAttentionConfig))
    mixer = next(found, None)
    if mixer is None:
        return {}
    out = {name: getattr(mixer, name) for name in (*_WIDTHS, "q_lora_rank")} | {"attention_bias": mixer.bias}
    out |= {"head_dim": out.pop("qk_rope_head_dim"), "num_key_value_heads": mixer.num_attention_heads}
    if mixer.rope is None or mixer.rope.scaling is None:
        return out
    scaling, sharper = hf_rope.to_hf(mixer.rope.scaling) or {}, mixer.mscale_all_dim
    scaling |= {"mscale": sharper, "mscale_all_dim": sharper} if sharper else {}
    return out | {"rope_theta": mixer.rope.theta, "rope_scaling": scaling}


def _read(get: Fields, plain: ModelConfig) -> ModelConfig:
    return sparse(get, latent(get, plain))


def _write(config: ModelConfig) -> dict[str, Any]:
    return sparse_to_hf(config) | latent_to_hf(config) | {"num_nextn_predict_layers": 0}


def _read_v2(get: Fields, plain: ModelConfig) -> ModelConfig:
    methods, method = ("greedy", "group_limited_greedy"), get("topk_method")
    if method not in methods:
        raise ModelError(f"config.json: topk_method must be {' or '.join(methods)}, not {shown(method)}")
    alone = method == "greedy"  # whatever the groups are
    counted = lambda name: 1 if alone and name in ("n_group", "topk_group") else get(name)
    own = sparse(counted, latent(get, plain), scoring="softmax", group_best=1)
    return own.every(MLPConfig, bias=flag("mlp_bias", get("mlp_bias")))


def _write_v2(config: ModelConfig) -> dict[str, Any]:
    groups = 1 if config.experts is None else config.experts.n_group
    method = "greedy" if groups == 1 else "group_limited_greedy"
    return sparse_to_hf(config) | latent_to_hf(config) | {"topk_method": method, "mlp_bias": config.dense.bias}


def read_lite(get: Fields, plain: ModelConfig) -> ModelConfig:
    types, layers = get("mlp_layer_types"), plain.num_hidden_layers
    first = types.count("dense") if isinstance(types, list) else get("first_k_dense_replace")
    if types is None:
        return _read(get, plain)
    if types != ["dense"] * first + ["sparse"] * (layers - first):
        raise ModelError(
            f"config.json: mlp_layer_types must have dense for the first layers and sparse for the others, not {shown(types)}"
        )
    get("first_k_dense_replace")  # the layers' own list counts
    return _read(lambda name: first if name == "first_k_dense_replace" else get(name), plain)


def write_lite(config: ModelConfig) -> dict[str, Any]:
    types = ["sparse" if one else "dense" for one in base.sparse_layers(config)]
    return _write(config) | {"mlp_layer_types": types}


def hf_name(path: tuple[Any, ...]) -> tuple[str, bool]:
    """The Hugging Face name of a parameter; see `specjax.models.weights.Layout`."""
    match [getattr(key, "key", key) for key in path]:
        case ["layers", layer, "attention", module, kind] if module in _MODULES:
            own = "bias" if kind == "bias" else "weight"
            name = f"model.layers.{layer}.self_attn.{_MODULES[module]}.{own}{_SHARED.get(module, '')}"
            return name, kind == "kernel"
    return weights.hf_name(path)


def heads(config: ModelConfig, name: str) -> int:
    return config.near.num_attention_heads


_NAMES = {"head_dim": ("qk_rope_head_dim",)}
"""What files say of `head_dim` means nothing."""
_FIXED = SILU | {"rope_interleave": (True, None), "moe_layer_freq": (1, None)}
_USUAL = {
    "num_key_value_heads": None, "head_dim": 64, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "v_head_dim": 128,
    "n_group": 1, "topk_group": 1, "norm_topk_prob": True,
}  # fmt: skip
_NOTE = (
    "one matrix of queries or two (`q_lora_rank`), biases of attention, groups of experts (`n_group`), YaRN's "
    "`mscale_all_dim`"
)
DEEPSEEK_V2 = Family(
    "deepseek_v2", "DeepseekV2ForCausalLM",
    _USUAL | {
        "max_position_embeddings": 2048, "q_lora_rank": 1536, "n_routed_experts": 64, "moe_intermediate_size": 1407,
        "n_shared_experts": 2, "first_k_dense_replace": 0, "routed_scaling_factor": 1.0, "topk_method": "greedy",
        "norm_topk_prob": False,
    },
    _read_v2, _write_v2,
    _FIXED | {"scoring_func": ("softmax", None), "norm_topk_prob": (False, None)},
    names=tensor_name, runs=heads, interleaved=True, layout=hf_name, fields=_NAMES, note=_NOTE,
)  # fmt: skip
DEEPSEEK_V3 = Family(
    "deepseek_v3", "DeepseekV3ForCausalLM",
    _USUAL | {
        "max_position_embeddings": 4096, "q_lora_rank": 1536, "n_routed_experts": 256, "num_experts_per_tok": 8,
        "moe_intermediate_size": 2048, "n_shared_experts": 1, "first_k_dense_replace": 3, "routed_scaling_factor": 2.5,
        "n_group": 8, "topk_group": 4,
    },
    _read, _write, _FIXED | {"scoring_func": ("sigmoid", None), "topk_method": ("noaux_tc", None)},
    others=("kimi_k2", "kimi_k25", "Kimi_K25ForConditionalGeneration", "KimiK25ForConditionalGeneration"),
    text=base.text_part, names=tensor_name, runs=heads, interleaved=True, layout=hf_name, fields=_NAMES, note=_NOTE,
)  # fmt: skip
GLM_4_LITE = Family(
    "glm4_moe_lite", "Glm4MoeLiteForCausalLM",
    _USUAL | {
        "max_position_embeddings": 202752, "rms_norm_eps": 1e-5, "q_lora_rank": 768, "qk_nope_head_dim": 192,
        "v_head_dim": 256, "n_routed_experts": 64, "num_experts_per_tok": 4, "moe_intermediate_size": 1536,
        "n_shared_experts": 1, "first_k_dense_replace": 1, "routed_scaling_factor": 1.8,
    },
    read_lite, write_lite, _FIXED | {"scoring_func": ("sigmoid", None), "topk_method": ("noaux_tc", None)},
    names=tensor_name, runs=heads, interleaved=True, layout=hf_name, fields=_NAMES,
    note=f"{_NOTE}, which layers have experts (`mlp_layer_types`)",
)  # fmt: skip
