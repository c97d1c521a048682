"""MiniMax-M2 (huggingface.co/MiniMaxAI): experts in every layer, queries and keys that are normed over all heads at once, and
ropes over a part of each head. MiniMax-01 (arXiv:2501.08313): layers of lightning attention, and branches that are added to
their own normed inputs."""

import dataclasses
import re
from typing import Any

from specjax.models import hf_experts
from specjax.models.attention import AttentionConfig
from specjax.models.errors import ModelError
from specjax.models.families import base, mixtral
from specjax.models.families.base import SILU, Family, Fields
from specjax.models.fields import FULL, is_size, layer_kinds, positive, shown
from specjax.models.layer import LayerConfig
from specjax.models.model_config import ModelConfig
from specjax.models.ropes import RopeConfig
from specjax.models.states.lightning import LightningConfig
from specjax.models.tensors import Tensor
from specjax.models.weights import hf_name


def _rope(get: Fields) -> RopeConfig:
    """Published files say how many channels of a head are rotated, and not which share."""
    turned = get("rotary_dim")
    if turned is None:
        return base.rope(get, partial=True)
    if not is_size(turned) or turned > get("head_dim"):
        raise ModelError(f"config.json: rotary_dim must be a number of channels of a head, not {shown(turned)}")
    share = {"partial_rotary_factor": turned / get("head_dim")}
    return base.rope(lambda name: share.get(name) if get(name) is None else get(name), partial=True)


def _read(get: Fields, plain: ModelConfig) -> ModelConfig:
    kinds = get("attn_type_list")
    if kinds is not None and (not isinstance(kinds, list) or any(kind != 1 for kind in kinds)):
        raise ModelError(f"config.json: attn_type_list {shown(kinds)} has layers other than attention (1)")
    experts = hf_experts.from_hf(hf_experts.local(get), scoring="sigmoid")
    return base.sparse(plain.every(AttentionConfig, qk_wide_norm=plain.norm), experts)


def _write(config: ModelConfig) -> dict[str, Any]:
    if config.experts is None:
        return {}
    return hf_experts.local_to_hf(config.experts) | {"rotary_dim": config.near.rotary_dim}


def tensor_name(name: str) -> str:
    """MiniMax-M2's name of a tensor that has this name in Llama's layout."""
    return mixtral.tensor_name(name).replace(".gate.bias", ".e_score_correction_bias")


MINIMAX_M2 = Family(
    "minimax_m2", "MiniMaxM2ForCausalLM",
    {
        "vocab_size": 200064, "hidden_size": 3072, "intermediate_size": 1536, "num_hidden_layers": 62,
        "num_attention_heads": 48, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 196608,
        "rope_theta": 5e6, "num_local_experts": 256, "num_experts_per_tok": 8,
    },
    _read, _write,
    SILU | {
        "scoring_func": ("sigmoid", None), "use_routing_bias": (True, None), "shared_intermediate_size": (0, None),
        "qk_norm_type": ("per_layer", None),
    },
    rope=_rope, names=tensor_name,
    note="how many channels of a head are rotated (`rotary_dim`, `partial_rotary_factor`)",
)  # fmt: skip


_LINEAR = "linear_attention"
_FACTORS = ("{}_attn_alpha_factor", "{}_attn_beta_factor", "mlp_alpha_factor", "mlp_beta_factor")
_KINDS = {FULL: "full", _LINEAR: "linear"}
_BUFFER = re.compile(r"\.self_attn\.(slope_rate|query_decay|key_decay|diagonal_decay)$")


def _read_01(get: Fields, plain: ModelConfig) -> ModelConfig:
    types, layers, own = get("layer_types"), plain.num_hidden_layers, plain.near
    types = [FULL if i % 2 == 0 else _LINEAR for i in range(layers)] if types is None else types
    if get("layer_types") is None and get("attn_type_list") is not None:
        raise ModelError(
            "config.json: attn_type_list is of MiniMax's own files; the -hf files with layer_types are read"
        )
    kinds = layer_kinds(types, layers, near=_LINEAR)

    def change(i: int, layer: LayerConfig) -> LayerConfig:
        names = [name.format(_KINDS[kinds[i]]) for name in _FACTORS]
        layer = dataclasses.replace(layer, normed_stream=tuple(positive(name, get(name)) for name in names))  # type: ignore[arg-type]
        if kinds[i] == FULL:
            return layer
        rate = 1 - i / (layers - 1 + 1e-5) + 1e-5
        return dataclasses.replace(layer, mixer=LightningConfig(own.num_attention_heads, own.head_dim, rate))

    return base.sparse(plain, hf_experts.from_hf(hf_experts.local(get))).each(change)


def _write_01(config: ModelConfig) -> dict[str, Any]:
    if config.experts is None:
        return {}
    kinds = [_LINEAR if isinstance(layer.mixer, LightningConfig) else FULL for layer in config.layers]
    own = {"layer_types": kinds} | hf_experts.local_to_hf(config.experts)
    for kind, layer in zip(kinds, config.layers, strict=True):
        own |= dict(
            zip([name.format(_KINDS[kind]) for name in _FACTORS], layer.normed_stream or (1.0,) * 4, strict=True)
        )
    return own


_PARTS = {
    "query": "qkv_proj.weight#0",
    "key": "qkv_proj.weight#1",
    "value": "qkv_proj.weight#2",
    "attended": "out_proj.weight",
}


def layout(path: tuple[Any, ...]) -> tuple[str, bool]:
    """`hf_name`, with the parameters of lightning attention."""
    match [getattr(key, "key", key) for key in path]:
        case ["layers", layer, "lightning", module, kind]:
            return f"model.layers.{layer}.self_attn.{_PARTS.get(module, f'{module}.weight')}", kind == "kernel"
    return hf_name(path)


def without_buffers(tensors: dict[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """The tensors of a folder's model without the decays of lightning attention, which are computed."""
    return {name: tensor for name, tensor in tensors.items() if not _BUFFER.search(name)}


def name_01(name: str) -> str:
    """MiniMax-01's name of a tensor that has this name in Llama's layout."""
    return mixtral.tensor_name(name) if ".mlp." in name else name


MINIMAX_01 = Family(
    "minimax", "MiniMaxForCausalLM",
    {
        "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
        "rope_theta": 1e6, "num_local_experts": 8, "num_experts_per_tok": 2,
        **{name.format(kind): 1.0 for name in _FACTORS for kind in _KINDS.values()},
    },
    _read_01, _write_01, SILU | {"sliding_window": (None,), "postnorm": (True, None), "shared_intermediate_size": (0, None)},
    names=name_01, layout=layout, text=without_buffers,
    runs=lambda config, name: config.near.num_attention_heads,
    note="which layers have lightning attention (`layer_types`), the factors of streams and branches "
    "(`full_attn_alpha_factor` and its like)",
)  # fmt: skip
