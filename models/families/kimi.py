"""Kimi-Linear (Moonshot AI 2025, arXiv:2510.26692): three layers of Kimi delta attention for each of latent attention, without
positions, and DeepSeek-V3's experts."""

import dataclasses
import re
from typing import Any

from specjax.models.errors import ModelError
from specjax.models.families import deepseek, glm
from specjax.models.families.base import SILU, Family, Fields
from specjax.models.families.qwen_next import LINEAR
from specjax.models.fields import FULL, an_object, is_size, layer_kinds, shown
from specjax.models.latent import LatentAttentionConfig
from specjax.models.model_config import ModelConfig
from specjax.models.states.kda import KimiDeltaConfig
from specjax.models.tensors import Tensor

_SIZES = {
    "linear_num_heads": "num_heads", "linear_head_dim": "head_dim", "linear_conv_kernel_dim": "short_conv_kernel_size",
}  # fmt: skip
"""The names of sizes in files of transformers, and in `linear_attn_config` of the published one, which counts first."""
_LISTS = {LINEAR: "kda_layers", FULL: "full_attn_layers"}
"""The lists of layers there, which count from 1."""


def _read(get: Fields, plain: ModelConfig) -> ModelConfig:
    own = deepseek.read_lite(get, plain).every(LatentAttentionConfig, rope=None)
    said = an_object("linear_attn_config", get("linear_attn_config"))
    sizes = [said.get(inner, get(name)) for name, inner in _SIZES.items()]
    if wrong := [name for name, size in zip(_SIZES, sizes, strict=True) if not is_size(size)]:
        raise ModelError(f"config.json needs positive integers for: {', '.join(wrong)}")
    heads, width, kernel = sizes
    delta = KimiDeltaConfig(heads, heads, width, width, kernel, plain.norm.eps)
    types = _types(get, said, plain.num_hidden_layers)
    return own.each(lambda i, layer: dataclasses.replace(layer, mixer=delta) if types[i] == LINEAR else layer)


def _types(get: Fields, said: dict[str, Any], layers: int) -> list[str]:
    """The kind of each layer."""
    types = get("layer_types")
    if types is None and all(name in said for name in _LISTS.values()):
        listed = [(i, kind) for kind, name in _LISTS.items() if isinstance(said[name], list) for i in said[name]]
        kinds, numbers = dict(item for item in listed if is_size(item[0])), set(range(1, layers + 1))
        if len(listed) != layers or kinds.keys() != numbers:
            raise ModelError(
                f"config.json: kda_layers and full_attn_layers must be lists that name each of {layers} layers once, from 1 on"
            )
        types = [kinds[i + 1] for i in range(layers)]
    types = [FULL if i and i % 4 == 0 else LINEAR for i in range(layers)] if types is None else types
    if FULL not in layer_kinds(types, layers, LINEAR):
        raise ModelError(f"config.json: layer_types {shown(types)} has no layer of {FULL}; at least one is needed")
    return types


def _write(config: ModelConfig) -> dict[str, Any]:
    delta = next((one for one in config.state_mixers if isinstance(one, KimiDeltaConfig)), None)
    if delta is None or config.experts is None:
        return {}
    types = [LINEAR if config.state_mixer(i) is not None else FULL for i in range(config.num_hidden_layers)]
    said: dict[str, Any] = dict(
        zip(_SIZES.values(), (delta.num_key_heads, delta.key_head_dim, delta.kernel_size), strict=True)
    )
    said |= {name: [i + 1 for i, one in enumerate(types) if one == kind] for kind, name in _LISTS.items()}
    return deepseek.write_lite(config) | {
        "layer_types": types, "linear_attn_config": said, "pad_token_id": None,
    }  # fmt: skip


_MODULES = {
    "query": "q_proj", "key": "k_proj", "value": "v_proj", "query_taps": "q_conv1d", "key_taps": "k_conv1d",
    "value_taps": "v_conv1d", "decay_inner": "f_a_proj", "decay": "f_b_proj", "strength": "b_proj", "gate_inner": "g_a_proj",
    "output_gate": "g_b_proj", "norm": "o_norm", "output": "o_proj",
}  # fmt: skip
_EXPERT = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}


def hf_name(path: tuple[Any, ...]) -> tuple[str, bool]:
    """The Hugging Face name of a parameter; see `specjax.models.weights.Layout`."""
    match [getattr(key, "key", key) for key in path]:
        case ["layers", layer, "kimi_delta", "head_rate"]:
            return f"model.layers.{layer}.self_attn.A_log", False
        case ["layers", layer, "kimi_delta", "shift"]:
            return f"model.layers.{layer}.self_attn.dt_bias", False
        case ["layers", layer, "kimi_delta", name, *kind]:
            mark = "" if kind else "~"
            return f"model.layers.{layer}.self_attn.{_MODULES[name]}.weight{mark}", kind != ["scale"]
    return deepseek.hf_name(path)


def tensor_name(name: str) -> str:
    """The name of a tensor that has this name in Llama's layout; see `specjax.models.weights.Names`.

    >>> tensor_name("model.layers.3.mlp.experts.7.up_proj.weight")
    'model.layers.3.block_sparse_moe.experts.7.w3.weight'
    """
    at, inside, part = name.partition(".mlp.")
    if not inside or not part.startswith(("gate.", "experts.", "shared_experts.")):
        return name
    if part.startswith("experts."):
        experts, number, module, kind = part.split(".")
        part = f"{experts}.{number}.{_EXPERT[module]}.{kind}"
    return glm.tensor_name(f"{at}.mlp.{part}").replace(".mlp.", ".block_sparse_moe.")


_DENSE = re.compile(r"\.block_sparse_moe\.((gate|up|down)_proj\.)")


def _text(tensors: dict[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """With the MLPs of layers without experts under the names of published files; transformers writes others."""
    return {_DENSE.sub(r".mlp.\1", name): tensor for name, tensor in tensors.items()}


KIMI_LINEAR = Family(
    "kimi_linear", "KimiLinearForCausalLM",
    {
        "vocab_size": 163840, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 27,
        "num_attention_heads": 32, "num_key_value_heads": None, "head_dim": 64, "max_position_embeddings": 1048576,
        "rms_norm_eps": 1e-5, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "v_head_dim": 128, "n_routed_experts": 256,
        "num_experts_per_tok": 8, "moe_intermediate_size": 1024, "n_shared_experts": 1, "first_k_dense_replace": 1,
        "routed_scaling_factor": 2.446, "n_group": 1, "topk_group": 1, "norm_topk_prob": True, "linear_num_heads": 32,
        "linear_head_dim": 128, "linear_conv_kernel_dim": 4,
    },
    _read, _write,
    SILU | {"moe_router_activation_func": ("sigmoid", None), "mla_use_nope": (True, None), "moe_layer_freq": (1, None)},
    rope=None, names=tensor_name, runs=deepseek.heads, layout=hf_name, text=_text,
    fields={
        "head_dim": ("qk_rope_head_dim",), "max_position_embeddings": ("model_max_length", "max_position_embeddings"),
        "norm_topk_prob": ("moe_renormalize", "norm_topk_prob"), "n_group": ("num_expert_group", "n_group"),
        "n_routed_experts": ("num_experts", "num_local_experts"),
        "num_experts_per_tok": ("num_experts_per_token", "num_experts_per_tok"),
        "n_shared_experts": ("num_shared_experts", "n_shared_experts"),
    },
    note="which layers are Kimi delta attention (`linear_attn_config`, `layer_types`) and have experts (`mlp_layer_types`), "
    "one matrix of queries or two (`q_lora_rank`), groups of experts",
)  # fmt: skip
