"""What a masked-diffusion model adds to a transformer, and the config files of LLaDA, Dream, SDAR and Fast-dLLM v2.

LLaDA (arXiv:2502.09992) is Llama-shaped with names of its own, in `config.json` and in the weights; Dream
(arXiv:2508.15487) has Qwen2's. Both see the whole canvas in both directions. SDAR (arXiv:2510.06303; TraDo is one) has Qwen3's
names and Fast-dLLM v2 (arXiv:2509.26328) Qwen2's; they see their own block and those before it.
"""

import dataclasses
import re
from typing import Any

from specjax.models import hf_config
from specjax.models.errors import ModelError
from specjax.models.fields import is_id, is_size, shown
from specjax.models.llama import LlamaConfig


@dataclasses.dataclass(frozen=True)
class Masked:
    """How a model is used for masked diffusion.

    Attributes:
      mask_id: the id of an open position.
      shift: its output at position i - 1 is for position i (Dream, which began as an autoregressive model).
      block: the length of its blocks, which do not see later ones; 0 where it sees the whole canvas.
    """

    mask_id: int
    shift: bool
    block: int = 0


@dataclasses.dataclass(frozen=True)
class Canvas(Masked):
    """How a model is used for block diffusion over canvases of random tokens (DiffusionGemma): no token is a mask, so
    `mask_id` is -1, and `block` is the length of a canvas.

    Attributes:
      image_id: the token that stands for a part of an image, or None.
      sampling: the fields of `specjax.diffusion.EntropyRenoise` that `generation_config.json` sets, as pairs.
    """

    image_id: int | None = None
    sampling: tuple[tuple[str, float], ...] = ()


ARCHITECTURES = {
    "LLaDAModelLM": "llada", "DreamModel": "Dream", "SDARForCausalLM": "sdar",
    "Fast_dLLM_QwenForCausalLM": "Fast_dLLM_Qwen",
}  # fmt: skip
# Of block-diffusion models: whose names they have, whether their logits are shifted, the field of the block length and, where
# a published config leaves it out, the mask id and that length.
_BLOCKS = {
    "sdar": ("Qwen3ForCausalLM", False, "block_size", 151669, 4),
    "Fast_dLLM_Qwen": ("Qwen2ForCausalLM", True, "bd_size", 151665, 32),
}
_LLADA = {
    "d_model": "hidden_size", "n_layers": "num_hidden_layers", "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads", "mlp_hidden_size": "intermediate_size", "embedding_size": "vocab_size",
    "max_sequence_length": "max_position_embeddings", "weight_tying": "tie_word_embeddings", "rope_theta": "rope_theta",
    "rms_norm_eps": "rms_norm_eps",
}  # fmt: skip
# What the loader relies on. A config that says otherwise describes another model.
_LLADA_FIXED = {
    "block_type": ("llama",), "activation_type": ("silu", "swiglu"), "layer_norm_type": ("rms",), "rope": (True,),
    "alibi": (False,), "include_bias": (False,), "include_qkv_bias": (False, None), "scale_logits": (False,),
    "attention_layer_norm": (False,),
}  # fmt: skip
_LLADA_MODULES = {
    "model.embed_tokens": "model.transformer.wte", "model.norm": "model.transformer.ln_f",
    "lm_head": "model.transformer.ff_out", "input_layernorm": "attn_norm", "post_attention_layernorm": "ff_norm",
    "self_attn.q_proj": "q_proj", "self_attn.k_proj": "k_proj", "self_attn.v_proj": "v_proj",
    "self_attn.o_proj": "attn_out", "mlp.gate_proj": "ff_proj", "mlp.up_proj": "up_proj", "mlp.down_proj": "ff_out",
}  # fmt: skip


def kind_of(config: dict[str, Any]) -> str | None:
    """`llada`, `Dream`, or None where `config.json` describes no masked-diffusion model that we know."""
    names = config.get("architectures") or []
    found = [kind for name, kind in ARCHITECTURES.items() if name in names]
    known = config.get("model_type") if config.get("model_type") in ARCHITECTURES.values() else None
    return found[0] if found else known


def from_hf(config: dict[str, Any]) -> tuple[LlamaConfig, Masked]:
    """Reads the `config.json` of a LLaDA, Dream, SDAR or Fast-dLLM v2 model.

    Raises:
      ModelError: on a missing mask id, or on what the loader does not support.
    """
    kind = kind_of(config)
    names, shift, block, mask_id = "Qwen2ForCausalLM", kind != "llada", 0, config.get("mask_token_id")
    if kind in _BLOCKS:
        names, shift, field, usual_mask, usual_block = _BLOCKS[kind]
        mask_id, block = config.get("mask_token_id", usual_mask), config.get(field, usual_block)
        if not is_size(block):
            raise ModelError(
                f"config.json of a block-diffusion model needs a {field} of at least 1, got {shown(block)}"
            )
    if not is_id(mask_id):
        raise ModelError(f"config.json of a diffusion model needs a mask_token_id, got {shown(mask_id)}")
    if kind == "llada":
        for name, allowed in _LLADA_FIXED.items():
            if name in config and config[name] not in allowed:
                raise ModelError(f"config.json: {name} {config[name]!r} is not supported; LLaDA has {allowed[0]!r}")
        renamed = {ours: config[theirs] for theirs, ours in _LLADA.items() if config.get(theirs) is not None}
        if "vocab_size" not in renamed and config.get("vocab_size") is not None:
            renamed["vocab_size"] = config["vocab_size"]
        shape = hf_config.from_hf(
            {"model_type": "llama", "quantization_config": config.get("quantization_config")} | renamed
        )
    else:
        shape = hf_config.from_hf(config | {"architectures": [names], "use_sliding_window": False})
    if mask_id >= shape.vocab_size:
        raise ModelError(f"config.json: mask_token_id {mask_id} is outside the vocabulary of {shape.vocab_size} tokens")
    return shape, Masked(mask_id, shift, block)


def to_hf(config: LlamaConfig, masked: Masked) -> dict[str, Any]:
    """The `config.json` of a model: Fast-dLLM v2's or Dream's where its logits are shifted, else SDAR's or LLaDA's.

    Raises:
      ModelError: when that architecture cannot express the config.
    """
    plain = hf_config.to_hf(config)
    if masked.block:
        kind, family = ("Fast_dLLM_Qwen", "qwen2") if masked.shift else ("sdar", "qwen3")
        if plain["model_type"] != family:
            raise ModelError(
                f"a block-diffusion model of shift {masked.shift} is written in {family}'s shape, which this has not"
            )
        name = next(name for name, known in ARCHITECTURES.items() if known == kind)
        fields = {"mask_token_id": masked.mask_id, _BLOCKS[kind][2]: masked.block}
        return plain | {"architectures": [name], "model_type": kind} | fields
    if masked.shift:
        if plain["model_type"] != "qwen2":
            raise ModelError(
                "a model with shifted logits is written as Dream, which has biases on q, k and v and nowhere else"
            )
        return plain | {"architectures": ["DreamModel"], "model_type": "Dream", "mask_token_id": masked.mask_id}
    if plain["model_type"] != "llama" or config.qkv_bias or config.mlp_bias or config.rope_scaling is not None:
        raise ModelError("a model without shifted logits is written as LLaDA, which has no biases and plain rope")
    if config.head_dim * config.num_attention_heads != config.hidden_size:
        raise ModelError("a LLaDA model's heads fill its width: head_dim * heads must be hidden_size")
    fixed = {name: allowed[0] for name, allowed in _LLADA_FIXED.items()}
    return fixed | {theirs: plain[ours] for theirs, ours in _LLADA.items()} | {
        "architectures": ["LLaDAModelLM"], "model_type": "llada", "vocab_size": config.vocab_size,
        "mask_token_id": masked.mask_id,
    }  # fmt: skip


def llada_name(name: str) -> str:
    """LLaDA's name of a tensor that has this name in Llama's layout.

    >>> llada_name("model.layers.3.mlp.down_proj.weight")
    'model.transformer.blocks.3.ff_out.weight'
    """
    module, _, kind = name.rpartition(".")
    layer = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", module)
    if layer:
        return f"model.transformer.blocks.{layer[1]}.{_LLADA_MODULES[layer[2]]}.{kind}"
    return f"{_LLADA_MODULES[module]}.{kind}"
