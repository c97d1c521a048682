"""Qwen3-Next and Qwen3.5 (Qwen team 2025 and 2026, huggingface.co/Qwen): three gated delta nets for each layer of attention,
whose heads have gates.

Qwen3-Next's files have what delta nets read of a token key head by key head, and those of Qwen3.5 part by part. Folders of
Qwen3.5 also hold a model that reads images, and both hold a further layer, which drafts (`mtp.*`).
"""

import dataclasses
import functools
import re
from typing import Any

from specjax.models import hf_experts, weights
from specjax.models.attention import AttentionConfig
from specjax.models.errors import ModelError
from specjax.models.families import base
from specjax.models.families.base import SILU, Family, Fields
from specjax.models.families.qwen import experts_of, experts_to_hf, tensor_name
from specjax.models.fields import FULL, is_size, layer_kinds, shown
from specjax.models.mlp import MLPConfig
from specjax.models.model_config import ModelConfig
from specjax.models.norms import NormConfig
from specjax.models.states.gated_delta import GatedDeltaConfig
from specjax.models.tensors import Tensor

LINEAR = "linear_attention"
_SIZES = {
    "linear_num_key_heads": "num_key_heads", "linear_num_value_heads": "num_value_heads",
    "linear_key_head_dim": "key_head_dim", "linear_value_head_dim": "value_head_dim", "linear_conv_kernel_dim": "kernel_size",
}  # fmt: skip
"""The names that files give to the sizes of a delta net."""


def _hybrid(get: Fields, plain: ModelConfig) -> ModelConfig:
    """The model without experts."""
    own = plain.every(NormConfig, kind="offset")
    own = own.every(AttentionConfig, **base.attention_bias(get), qk_norm=own.norm, gated=True)
    types, delta = _types(get, plain.num_hidden_layers), _delta(get, plain.norm.eps)
    mixed = lambda i, layer: dataclasses.replace(layer, mixer=delta if types[i] == LINEAR else layer.mixer)
    return own.each(mixed)


def _types(get: Fields, layers: int) -> list[str]:
    """The kind of each layer."""
    types, interval = get("layer_types"), get("full_attention_interval")
    if types is None:
        if not is_size(interval):
            raise ModelError(f"config.json: full_attention_interval must be a number of layers, not {shown(interval)}")
        types = [LINEAR if (i + 1) % interval else FULL for i in range(layers)]
    types = layer_kinds(types, layers, LINEAR)
    if FULL not in types:
        raise ModelError(f"config.json: layer_types has no layer of {FULL}; at least one is needed")
    return types


def _delta(get: Fields, eps: float) -> GatedDeltaConfig:
    sizes = {name: get(name) for name in _SIZES}
    if wrong := [name for name, size in sizes.items() if not is_size(size)]:
        raise ModelError(f"config.json needs positive integers for: {', '.join(wrong)}")
    found = GatedDeltaConfig(**{_SIZES[name]: size for name, size in sizes.items()}, eps=eps)
    if found.num_value_heads % found.num_key_heads:
        raise ModelError(
            f"config.json: {found.num_value_heads} value heads (linear_num_value_heads) do not split over "
            f"{found.num_key_heads} key heads (linear_num_key_heads)"
        )
    return found


def _shared(get: Fields) -> dict[str, Any]:
    """The fields of experts beside which every token uses one more, by a gate."""
    width = get("shared_expert_intermediate_size")
    if not is_size(width):
        raise ModelError("config.json needs positive integers for: shared_expert_intermediate_size")
    return {"shared": MLPConfig(width), "shared_gate": True}


def _read_next(get: Fields, plain: ModelConfig) -> ModelConfig:
    experts, sparse = experts_of(get, plain.num_hidden_layers)
    return base.sparse(_hybrid(get, plain), dataclasses.replace(experts, **_shared(get)), sparse)


def _read_moe(get: Fields, plain: ModelConfig) -> ModelConfig:
    return base.sparse(_hybrid(get, plain), dataclasses.replace(hf_experts.from_hf(get), **_shared(get)))


def _write(config: ModelConfig) -> dict[str, Any]:
    delta = _delta_of(config)
    sizes = {} if delta is None else {name: getattr(delta, ours) for name, ours in _SIZES.items()}
    return sizes | {
        "layer_types": [LINEAR if config.state_mixer(i) is not None else FULL for i in range(config.num_hidden_layers)],
        "attention_bias": config.near.qkv_bias, "partial_rotary_factor": config.rope.share,
    }  # fmt: skip


def _write_moe(config: ModelConfig) -> dict[str, Any]:
    if config.experts is None or config.experts.shared is None:
        return {}
    names = ("num_experts", "num_experts_per_tok", "moe_intermediate_size")
    own = {name: getattr(config.experts, name) for name in names}
    return _write(config) | own | {"shared_expert_intermediate_size": config.experts.shared.intermediate_size}


def _write_next(config: ModelConfig) -> dict[str, Any]:
    own = _write_moe(config)
    return own | experts_to_hf(config) if own else {}


def _delta_of(config: ModelConfig) -> GatedDeltaConfig | None:
    return next((one for one in config.state_mixers if isinstance(one, GatedDeltaConfig)), None)


def hf_name(path: tuple[Any, ...]) -> tuple[str, bool]:
    """The name of a parameter, of delta nets by our names of its parts; see `specjax.models.weights.Layout`."""
    match [getattr(key, "key", key) for key in path]:
        case ["layers", layer, "gated_delta", "rate"]:
            return f"model.layers.{layer}.linear_attn.A_log", False
        case ["layers", layer, "gated_delta", "shift"]:
            return f"model.layers.{layer}.linear_attn.dt_bias", False
        case ["layers", layer, "gated_delta", name, *kind]:
            return f"model.layers.{layer}.linear_attn.{name}.weight", kind != ["scale"]
    return weights.hf_name(path)


_PARTS = {
    "query_taps": "conv1d.weight~#0", "key_taps": "conv1d.weight~#1", "value_taps": "conv1d.weight~#2",
    "output": "out_proj.weight",
}  # fmt: skip
_NEXT = _PARTS | {
    "query": "in_proj_qkvz.weight#0", "key": "in_proj_qkvz.weight#1", "value": "in_proj_qkvz.weight#2",
    "output_gate": "in_proj_qkvz.weight#3", "strength": "in_proj_ba.weight#0", "decay": "in_proj_ba.weight#1",
}  # fmt: skip
_NEWER = _PARTS | {
    "query": "in_proj_qkv.weight#0", "key": "in_proj_qkv.weight#1", "value": "in_proj_qkv.weight#2",
    "output_gate": "in_proj_z.weight", "strength": "in_proj_b.weight", "decay": "in_proj_a.weight",
}  # fmt: skip
_GATES = {"q_proj": 0, "o_gate_proj": 1}
_INNER = re.compile(r"^(.+)\.(self_attn|linear_attn)\.(\w+)\.(weight|bias)$")


def _named(name: str, parts: dict[str, str]) -> str:
    """The name of a tensor that has this name in Llama's layout, or in that of `hf_name`."""
    found = _INNER.match(name)
    if found is None:
        return tensor_name(name)
    at, module, part, kind = found.groups()
    if module == "linear_attn":
        return f"{at}.{module}.{parts.get(part, f'{part}.{kind}')}"
    return f"{at}.{module}.q_proj.{kind}#{_GATES[part]}" if part in _GATES else name


def _runs(config: ModelConfig, name: str) -> int:
    """Queries and gates of attention lie head by head, and what Qwen3-Next's delta nets read, key head by key head."""
    if ".self_attn." in name:
        return config.near.num_attention_heads
    delta = _delta_of(config)
    return delta.num_key_heads if delta is not None and ("in_proj_qkvz" in name or "in_proj_ba" in name) else 1


_FUSED = re.compile(r"^(.+\.mlp\.experts)\.(gate_up|down)_proj$")


def text_part(tensors: dict[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """The text's tensors (`specjax.models.families.base.text_part`), with experts one by one where a file joins them:
    `gate_up_proj` `[X, 2 F, E]`, the gate first, and `down_proj` `[X, E, F]`."""
    made: dict[str, Tensor] = {}
    for name, tensor in base.text_part(tensors, config).items():
        found = _FUSED.match(name)
        if found is None or len(tensor.shape) != 3:
            made[name] = tensor
            continue
        for i in range(tensor.shape[0]):
            own, at = tensor.rows(i, i + 1), f"{found[1]}.{i}"
            own = dataclasses.replace(own, shape=tensor.shape[1:])
            if found[2] == "down":
                made[f"{at}.down_proj.weight"] = own
                continue
            half = tensor.shape[1] // 2
            made |= {f"{at}.gate_proj.weight": own.rows(0, half), f"{at}.up_proj.weight": own.rows(half, 2 * half)}
    return made


_FIXED = SILU | {"attn_output_gate": (True, None), "output_gate_type": ("swish", "silu", None)}
_USUAL = {
    "max_position_embeddings": 32768, "head_dim": 256, "partial_rotary_factor": 0.25, "full_attention_interval": 4,
    "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}  # fmt: skip
_EXPERTS = {"moe_intermediate_size": 512, "shared_expert_intermediate_size": 512}
_NOTE = "which layers are delta nets (`layer_types`, `full_attention_interval`), biases of attention"
_family = functools.partial(
    Family, fixed=_FIXED, rope=functools.partial(base.rope, partial=True), runs=_runs, layout=hf_name, text=text_part
)

QWEN3_NEXT = _family(
    "qwen3_next", "Qwen3NextForCausalLM",
    _USUAL | _EXPERTS | {
        "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 48,
        "num_attention_heads": 16, "num_key_value_heads": 2, "num_experts": 512, "num_experts_per_tok": 10,
        "norm_topk_prob": True,
    },
    _read_next, _write_next, names=functools.partial(_named, parts=_NEXT),
    note=f"{_NOTE}, layers without experts (`mlp_only_layers`), weights that are not divided by their sum",
)  # fmt: skip
QWEN3_5 = _family(
    "qwen3_5_text", "Qwen3_5ForCausalLM",
    _USUAL | {
        "vocab_size": 248320, "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 32,
        "num_attention_heads": 16, "num_key_value_heads": 4,
    },
    _hybrid, _write, others=("Qwen3_5ForConditionalGeneration", "qwen3_5"),
    names=functools.partial(_named, parts=_NEWER), note=_NOTE,
)  # fmt: skip
QWEN3_5_MOE = _family(
    "qwen3_5_moe_text", "Qwen3_5MoeForCausalLM",
    _USUAL | _EXPERTS | {
        "vocab_size": 248320, "hidden_size": 2048, "num_hidden_layers": 40, "num_attention_heads": 16,
        "num_key_value_heads": 2, "num_experts": 256, "num_experts_per_tok": 8,
        "intermediate_size": lambda get: get("moe_intermediate_size"),
    },
    _read_moe, _write_moe, others=("Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe"),
    names=functools.partial(_named, parts=_NEWER), note=_NOTE,
)  # fmt: skip
