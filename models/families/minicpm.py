"""MiniCPM (Hu et al. 2024, arXiv:2404.06395), and BlockFFN (Song et al. 2025, arXiv:2507.08771), whose files are MiniCPM's with
latent attention and another feed-forward.

transformers does not have them; the code that is published with BlockFFN is in github.com/thunlp/BlockFFN. There a feed-forward
is one matrix (`block_linear`) or one for each expert (`block`); `save` writes the first. The embeddings, the branches and what
the head reads have multipliers.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from specjax.models.attention import AttentionConfig
from specjax.models.block_ffn import BlockFFNConfig
from specjax.models.byte_ranges import fill
from specjax.models.errors import ModelError
from specjax.models.families import base, deepseek
from specjax.models.families.base import SILU, Family, Fields
from specjax.models.fields import flag, is_size, positive, shown
from specjax.models.latent import LatentAttentionConfig
from specjax.models.layer import LayerConfig
from specjax.models.model_config import EmbeddingConfig, HeadConfig, ModelConfig
from specjax.models.tensors import Tensor

_LATENT = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
_BLOCKS = ("num_experts", "expert_size")
_KINDS = ("block", "block_linear")


def _one_of(get: Fields, name: str, *known: Any) -> Any:
    if (value := get(name)) not in known:
        raise ModelError(f"config.json: {name} must be {' or '.join(map(shown, known))}, not {shown(value)}")
    return value


def _attends(get: Fields, plain: ModelConfig) -> ModelConfig:
    """With the file's attention; its fields for the other one count nothing."""
    for name in _LATENT:
        get(name)
    if _one_of(get, "attention_type", "vanilla", "mla") == "vanilla":
        return plain.every(AttentionConfig, **base.attention_bias(get))
    width = plain.near.head_dim
    if get("v_head_dim") not in (None, width):
        raise ModelError(
            f"config.json: v_head_dim must be hidden_size / num_attention_heads, {width}, not {shown(get('v_head_dim'))}"
        )
    names = {"head_dim": "qk_rope_head_dim"}
    return deepseek.latent(lambda name: width if name == "v_head_dim" else get(names.get(name, name)), plain)


def _feeds(get: Fields, plain: ModelConfig) -> ModelConfig:
    """With the file's feed-forward."""
    sizes = {name: get(name) for name in _BLOCKS}
    if _one_of(get, "ffn_type", "vanilla", *_KINDS) == "vanilla":
        if not flag("ffn_gated", get("ffn_gated")):
            raise ModelError("config.json: ffn_gated must be true where ffn_type is vanilla")
        return plain
    if wrong := [name for name, size in sizes.items() if not is_size(size)]:
        raise ModelError(f"config.json needs positive integers for: {', '.join(wrong)}")
    _one_of(get, "router_act", "relu")
    _one_of(get, "norm_after_router", "rms")
    _one_of(get, "block_implementation", "torch", "kernel")
    return plain.every(LayerConfig, feed=BlockFFNConfig(**sizes, norm=plain.norm))


def _read(get: Fields, plain: ModelConfig) -> ModelConfig:
    embedding, depth, base_width = (
        positive(name, get(name)) for name in ("scale_emb", "scale_depth", "dim_model_base")
    )
    own = _feeds(get, _attends(get, plain)).every(EmbeddingConfig, scale=embedding)
    own = own.every(HeadConfig, logits_scaling=_factor(plain.hidden_size / base_width))
    return own.every(LayerConfig, residual_multiplier=_factor(depth / plain.num_hidden_layers**0.5))


def _write(config: ModelConfig) -> dict[str, Any]:
    c, first = config, config.layers[0]
    depth, branch, divisor = c.num_hidden_layers**0.5, first.residual_multiplier, c.head.logits_scaling
    found = {
        "scale_emb": c.embedding.scale, "scale_depth": _said(branch * depth, lambda one: one / depth),
        "dim_model_base": _said(c.hidden_size / divisor, lambda one: c.hidden_size / one),
        "attention_bias": c.attention_sizes.o_bias,
        "attention_type": "vanilla", "ffn_type": "vanilla", "ffn_gated": True,
    }  # fmt: skip
    if isinstance(first.mixer, LatentAttentionConfig):
        own = deepseek.latent_to_hf(c)
        found |= own | {"attention_type": "mla", "qk_rope_head_dim": own.pop("head_dim")}
    if isinstance(first.feed, BlockFFNConfig):
        found |= {name: getattr(first.feed, name) for name in _BLOCKS}
        found |= {"ffn_type": "block_linear", "router_act": "relu", "norm_after_router": "rms"}
        found |= {"block_implementation": "torch", "ffn_gated": False}
    return found


def _factor(value: float) -> float:
    """A factor made of a file's numbers, without the rounding of its last digits: what is written is read again."""
    return round(value, 12)


def _said(value: float, read: Callable[[float], float]) -> float:
    """A file's number without its last digits, if the factor that is read from it is the same."""
    short = round(value, 9)
    return short if short and _factor(read(short)) == _factor(read(value)) else value


def layout(path: tuple[Any, ...]) -> tuple[str, bool]:
    """The name of a parameter; see `specjax.models.weights.Layout`."""
    match [getattr(key, "key", key) for key in path]:
        case ["layers", layer, "mlp", "blocks", name, "kernel"]:
            return f"model.layers.{layer}.mlp.{name}_proj", True
        case ["layers", layer, "mlp", "router", "kernel"]:
            return f"model.layers.{layer}.mlp.router_proj.weight", True
        case ["layers", layer, "mlp", "router_norm", _]:
            return f"model.layers.{layer}.mlp.router_norm.weight", False
    return deepseek.hf_name(path)


def matrices(tensors: dict[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """A folder's tensors, with the matrices of experts side by side."""
    found = {}
    for name, tensor in tensors.items():
        apart = len(tensor.shape) == 3 and tensor.read is None
        if apart and name.endswith(".mlp.up_proj"):
            tensor = dataclasses.replace(tensor, shape=(tensor.shape[0] * tensor.shape[1], tensor.shape[2]))
        elif apart and name.endswith(".mlp.down_proj"):
            tensor = _side_by_side(tensor)
        found[name] = tensor
    return found


def _side_by_side(tensor: Tensor) -> Tensor:
    """`[X, E, F]` as `[E, X F]`."""
    experts, width, size = tensor.shape

    def read(wanted: list[tuple[Any, np.ndarray]]) -> None:
        boxes = []
        for (rows, (first, last)), own in wanted:
            for expert in range(first // size, -(-last // size)):
                lo, hi = max(first, expert * size), min(last, (expert + 1) * size)
                box = (expert, expert + 1), rows, (lo - expert * size, hi - expert * size)
                boxes.append((box, own[None, :, lo - first : hi - first]))
        fill(tensor, boxes)

    return dataclasses.replace(tensor, shape=(width, experts * size), read=read)


def _heads(config: ModelConfig, name: str) -> int:
    return config.near.num_attention_heads


MINICPM = Family(
    "minicpm", "MiniCPMForCausalLM",
    {
        "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
        "num_attention_heads": 32, "max_position_embeddings": 4096, "tie_word_embeddings": True, "attention_type": "vanilla",
        "q_lora_rank": 768, "kv_lora_rank": 256, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "ffn_type": "vanilla",
        "ffn_gated": True, "router_act": "relu", "expert_size": 128, "num_experts": 40, "norm_after_router": "sum",
        "block_implementation": "torch", "scale_emb": 1.0, "scale_depth": 1.0, "dim_model_base": 1.0,
    },
    _read, _write, SILU, runs=_heads, layout=layout, text=matrices, fields={"head_dim": ()},
    note="latent attention (`attention_type`), BlockFFN in place of the MLP (`ffn_type`), multipliers of embeddings, branches "
    "and logits, biases of attention; transformers does not read it",
)  # fmt: skip
