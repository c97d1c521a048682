"""The settings of masked diffusion, and the config files of LLaDA, Dream, SDAR, Fast-dLLM v2, Nemotron and A2D.

`specjax.models.llada_moe` and `llada2` have those of LLaDA's models with experts.

| model | names in `config.json` and weights | a token sees |
|---|---|---|
| LLaDA (arXiv:2502.09992), Llama-shaped | its own | the whole canvas |
| Dream (arXiv:2508.15487) | Qwen2's | the whole canvas |
| SDAR (arXiv:2510.06303; TraDo is one) | Qwen3's; with experts, Qwen3-MoE's | its block and earlier ones |
| Fast-dLLM v2 (arXiv:2509.26328) | Qwen2's | its block and earlier ones |
| WeDLM (arXiv:2512.22737) | Qwen2's or Qwen3's | known tokens before it; a mask all known ones and earlier masks |
| SDLM (arXiv:2509.24007) | Qwen2's | tokens before it; the last one and the masks after it each other |
| Nemotron-Labs-Diffusion (github.com/NVIDIA-NeMo) | its own, over Ministral 3 | its block, and a causal prefix |

Nemotron-Labs-Diffusion decodes autoregressively too: `Masked.causal_context`.

A2D (autoregressive to diffusion, github.com/ZHZisZZ/dllm) is Llama, Qwen2 or Qwen3 with attention in both directions
and no other change. If an A2D folder's `config.json` does not name the mask, its tokenizer does.
"""

import dataclasses
import re
from collections.abc import Callable
from typing import Any

from specjax.models import hf_config, llada2, llada_moe
from specjax.models.errors import ModelError
from specjax.models.families import ling
from specjax.models.families.ministral import MINISTRAL_3
from specjax.models.fields import check_fixed, is_id, is_size, shown
from specjax.models.model_config import ModelConfig


@dataclasses.dataclass(frozen=True)
class Masked:
    """Settings of a model for masked diffusion.

    Attributes:
      mask_id: the id of an open position.
      shift: whether its output at position i - 1 is for position i (Dream, which began as an autoregressive model).
      block: the length of its blocks, which do not see later ones; 0: it sees the whole canvas.
      sub_block: the length of a block's parts, which are finished from left to right; 0: the usual length for its kind.
      unmask: the line of the default unmask policy, from `generation_config.json`; "": the usual one.
      cache: the line of the default cache policy, likewise.
      align: where blocks are counted from: `text` or, as in A2D's sampler, `prompt_end`
        (`specjax.diffusion.BlockDiffusion`).
      reordered: whether it reads causally, with its masks after all known tokens (WeDLM and, with `shift`, SDLM;
        `specjax.diffusion.WindowDiffusion`); `block` is then the length of its window.
      delete_id: the id of the token that deletes its position (LLaDA2.2's DELETE); -1: there is none.
      split_id: the id of the token that puts a mask before the one there (SPLIT); -1: there is none.
      causal_context: whether the model is of both kinds. Known tokens are then read by causal passes, whose output at a
        position is for the next one; a pass over open positions sees all of their block, and its output at a position
        is for that position. Such a model decodes autoregressively unless diffusion is asked for (`Model.dual`).
    """

    mask_id: int
    shift: bool
    block: int = 0
    sub_block: int = dataclasses.field(default=0, kw_only=True)
    unmask: str = dataclasses.field(default="", kw_only=True)
    cache: str = dataclasses.field(default="", kw_only=True)
    align: str = dataclasses.field(default="text", kw_only=True)
    reordered: bool = dataclasses.field(default=False, kw_only=True)
    delete_id: int = dataclasses.field(default=-1, kw_only=True)
    split_id: int = dataclasses.field(default=-1, kw_only=True)
    causal_context: bool = dataclasses.field(default=False, kw_only=True)

    @property
    def warped(self) -> bool:
        """Whether its published sampler takes confidences after temperature and filters.

        The samplers of Dream, SDAR, TraDo, LLaDA 2, Fast-dLLM v2 and SDLM do; those of LLaDA, A2D, WeDLM and Nemotron
        take the model's own probabilities."""
        return self.shift or (self.block > 0 and self.align == "text" and not self.reordered)

    @property
    def usual_sub_block(self) -> int:
        """The default length of a block's parts: 8 for Fast-dLLM v2, if that divides a block."""
        parts = self.shift and self.block and self.block % 8 == 0 and not self.reordered
        return self.sub_block or (8 if parts else 0)


@dataclasses.dataclass(frozen=True)
class Canvas(Masked):
    """Settings of a model for block diffusion over canvases of random tokens (DiffusionGemma).

    No token is a mask, so `mask_id` is -1. `block` is the length of a canvas.

    Attributes:
      image_id: the placeholder token for a part of an image, or None.
      sampling: the fields of `specjax.diffusion.EntropyRenoise` that `generation_config.json` sets, as pairs.
    """

    image_id: int | None = None
    sampling: tuple[tuple[str, float], ...] = ()


@dataclasses.dataclass(frozen=True)
class Gaps(Masked):
    """Settings of an any-subset model (`specjax.models.xlnet`), which fills in gaps of a text.

    No position reads a mask. `mask_id` is the token that stands for an open position in a prompt and is never written;
    -1: there is none.
    """


ARCHITECTURES = {
    "LLaDAModelLM": "llada", "LLaDAMoEModelLM": "lladamoe", "LLaDA2MoeModelLM": "llada2_moe",
    "DreamModel": "Dream", "SDARForCausalLM": "sdar", "SDARMoeForCausalLM": "sdar_moe",
    "Fast_dLLM_QwenForCausalLM": "Fast_dLLM_Qwen", "A2DLlamaLMHeadModel": "a2d-llama",
    "A2DQwen2LMHeadModel": "a2d-qwen2", "A2DQwen3LMHeadModel": "a2d-qwen3",
    "WeDLMForCausalLM": "wedlm",
    "NemotronLabsDiffusionModel": "nemotron_labs_diffusion",
}  # fmt: skip
# For block-diffusion models: the family whose names they have (None: their own), whether their logits are shifted, and
# the field of the block length. Where a published config omits them, also the mask id and the block length.
_BLOCKS = {
    "sdar": ("Qwen3ForCausalLM", False, "block_size", 151669, 4),
    "sdar_moe": ("Qwen3MoeForCausalLM", False, "block_size", 151669, 4),
    "llada2_moe": (None, False, "block_size", llada2.MASK, llada2.BLOCK),
    "Fast_dLLM_Qwen": ("Qwen2ForCausalLM", True, "bd_size", 151665, 32),
    "nemotron_labs_diffusion": ("Ministral3ForCausalLM", False, "block_size", 100, 32),
}
_NEMOTRON = "nemotron_labs_diffusion"
OF_BOTH = ("self_diffusion_mask", "self_diffusion_block")
"""Our own fields of an autoregressive `config.json` whose model is of both kinds."""
_NEMOTRON_FIXED = {
    "dlm_paradigm": ("bidirectional", "block_diff", "sbd_block_diff"), "dlm_type": ("llada", None),
    "attention_bias": (False, None), "mlp_bias": (False, None),
}  # fmt: skip
"""How it was trained, which of its weights' uses that leaves, and biases that it lacks. `autoregressive` has no diffusion
mode, and `dream` shifts its logits."""
# The architecture whose names and fields each has. Folders trained with blocks (BD3-LM) look like those without. Our
# own field `block_size` in config.json tells them apart, and our `block_align` says if blocks are not counted from the
# prompt's end.
_A2D = {"a2d-llama": "LlamaForCausalLM", "a2d-qwen2": "Qwen2ForCausalLM", "a2d-qwen3": "Qwen3ForCausalLM"}
WEDLM_MASK, WEDLM_WINDOW = 151665, 16
"""The id of WeDLM's mask where `config.json` names none, and the length of its window."""
SDLM_MASK, SDLM_WINDOW = "text_mask_token_id", 4
"""The field of SDLM's mask, which tells its folders from Qwen2's, and the usual length of its window."""
LLADA_MASK, LLADA_EOT = 126336, 126348
"""The ids of the mask and of the end of a turn in the published LLaDA models."""
_LLADA = {
    "d_model": "hidden_size", "n_layers": "num_hidden_layers", "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads", "mlp_hidden_size": "intermediate_size", "embedding_size": "vocab_size",
    "max_sequence_length": "max_position_embeddings", "weight_tying": "tie_word_embeddings", "rope_theta": "rope_theta",
    "rms_norm_eps": "rms_norm_eps",
}  # fmt: skip
# Values that the loader relies on. A config with other values describes another model.
_LLADA_FIXED = {
    "block_type": ("llama",), "activation_type": ("silu", "swiglu"), "layer_norm_type": ("rms",), "rope": (True,),
    "alibi": (False,), "include_bias": (False,), "include_qkv_bias": (False, None), "scale_logits": (False,),
    "attention_layer_norm": (False,), "clip_qkv": (None,), "input_emb_norm": (False, None),
    "multi_query_attention": (False, None),
}  # fmt: skip
_SIGHT = ("is_causal", "use_bidirectional_attention")
"""Fields that state what holds for such models in any case."""
_LLADA_MODULES = {
    "model.embed_tokens": "model.transformer.wte", "model.norm": "model.transformer.ln_f",
    "lm_head": "model.transformer.ff_out", "input_layernorm": "attn_norm", "post_attention_layernorm": "ff_norm",
    "self_attn.q_proj": "q_proj", "self_attn.k_proj": "k_proj", "self_attn.v_proj": "v_proj",
    "self_attn.o_proj": "attn_out", "mlp.gate_proj": "ff_proj", "mlp.up_proj": "up_proj", "mlp.down_proj": "ff_out",
}  # fmt: skip


def kind_of(config: dict[str, Any]) -> str | None:
    """The kind of a masked-diffusion model (`llada`, `Dream`, ...); None if `config.json` describes none that we
    know."""
    names = config.get("architectures") or []
    if SDLM_MASK in config:
        return "sdlm"
    found = [kind for name, kind in ARCHITECTURES.items() if name in names]
    known = config.get("model_type") if config.get("model_type") in ARCHITECTURES.values() else None
    return found[0] if found else known


def from_hf(config: dict[str, Any], own_mask: Callable[[], int | None] = lambda: None) -> tuple[ModelConfig, Masked]:
    """Reads the `config.json` of a LLaDA, LLaDA-MoE, LLaDA 2, Dream, SDAR, Fast-dLLM v2, A2D, WeDLM, SDLM or Nemotron
    model.

    Args:
      config: parsed.
      own_mask: returns the id of the tokenizer's mask token, or None; called if an A2D model's config names none.

    Raises:
      ModelError: on a missing mask id, or on unsupported values.
    """
    kind = kind_of(config)
    if kind == _NEMOTRON:
        check_fixed(config, _NEMOTRON_FIXED, "Nemotron-Labs-Diffusion")
    masked = _masked(kind, config, own_mask)
    if kind == "llada":
        shape = _llada_shape(config)
    elif kind == "lladamoe":
        shape = llada_moe.from_hf(config)
    elif kind == "llada2_moe":
        shape = llada2.from_hf(config, masked.block)
    elif kind in _A2D:  # here, layers with a window see as far as the others
        both_ways = {"architectures": [_A2D[kind]], "use_sliding_window": False, "layer_types": None}
        shape = hf_config.from_hf(config | both_ways, _SIGHT)
    else:
        plain = "Qwen3ForCausalLM" if kind == "wedlm" and config.get("qk_norm") else "Qwen2ForCausalLM"
        names = _BLOCKS[kind][0] if kind in _BLOCKS else plain
        shape = hf_config.from_hf(config | {"architectures": [names], "use_sliding_window": False}, _SIGHT)
    for name in ("mask", "delete", "split"):
        if (own := getattr(masked, f"{name}_id")) >= shape.vocab_size:
            raise ModelError(
                f"config.json: {name}_token_id {own} is outside the vocabulary of {shape.vocab_size} tokens"
            )
    return shape, masked


def _masked(kind: str | None, config: dict[str, Any], own_mask: Callable[[], int | None]) -> Masked:
    usual = llada_moe.MASK if kind == "lladamoe" else None
    mask_id, block, field, shift = config.get("mask_token_id", usual), 0, "block_size", kind == "Dream"
    if kind in _BLOCKS:
        _, shift, field, usual_mask, usual_block = _BLOCKS[kind]
        mask_id = config.get("mask_token_id", usual_mask)
        block = usual_block if config.get(field) is None else config[field]
    elif kind in _A2D:
        block = config.get(field) or 0
        mask_id = own_mask() if mask_id is None else mask_id
    elif kind == "wedlm":
        mask_id, block = WEDLM_MASK if mask_id is None else mask_id, WEDLM_WINDOW
    elif kind == "sdlm":
        mask_id, shift = config[SDLM_MASK], True
        block = SDLM_WINDOW if config.get(field) is None else config[field]
        check_fixed(config, {"causal_attn": (False, None)}, "SDLM")
    if not (is_size(block) or (block == 0 and kind not in _BLOCKS)):
        raise ModelError(f"config.json of a block-diffusion model needs a {field} of at least 1, got {shown(block)}")
    if not is_id(mask_id):
        besides = ", or a tokenizer with a mask_token beside it" if kind in _A2D else ""
        raise ModelError(f"config.json of a diffusion model needs a mask_token_id{besides}, got {shown(mask_id)}")
    align = config.get("block_align", "prompt_end") if kind in _A2D and block else "text"
    align = "prompt_end" if kind == _NEMOTRON else align
    if align not in ("text", "prompt_end"):
        raise ModelError(f"config.json: block_align must be text or prompt_end, got {shown(align)}")
    part = config.get("small_block_size") or 0 if kind == "Fast_dLLM_Qwen" else 0
    if part and not (is_size(part) and block % part == 0):
        raise ModelError(f"config.json: small_block_size {shown(part)} must divide {field} {block}")
    delete, split = llada2.edit_ids(config, mask_id) if kind == "llada2_moe" else (-1, -1)
    return Masked(
        mask_id, shift, block, sub_block=part, align=align, reordered=kind in ("wedlm", "sdlm"), delete_id=delete,
        split_id=split, causal_context=kind == _NEMOTRON,
    )  # fmt: skip


def _llada_shape(config: dict[str, Any]) -> ModelConfig:
    check_fixed(config, _LLADA_FIXED, "LLaDA")
    renamed = {ours: config[theirs] for theirs, ours in _LLADA.items() if config.get(theirs) is not None}
    if "vocab_size" not in renamed and config.get("vocab_size") is not None:
        renamed["vocab_size"] = config["vocab_size"]
    return hf_config.from_hf(
        {"model_type": "llama", "quantization_config": config.get("quantization_config")} | renamed
    )


def published_threshold(config: Any, masked: Masked) -> float:
    """The confidence at which a block-diffusion model's published sampler commits a token.

    It is SDAR's or LLaDA 2's value; 0 if the sampler uses Fast-dLLM's 0.9, or has none.

    Args:
      config: the model's.
      masked: its settings for diffusion.
    """
    if not masked.block or masked.shift or masked.align != "text" or masked.reordered:
        return 0.0
    return 0.95 if isinstance(config, ModelConfig) and llada2.is_one(config) else 0.85


def to_hf(config: ModelConfig, masked: Masked) -> dict[str, Any]:
    """The `config.json` of a model, in the first layout that can express it.

    A model of both kinds is written as Nemotron-Labs-Diffusion if it has Ministral 3's layers, otherwise as its own
    family with the fields of `dual_of`. With shifted logits, the layouts are Fast-dLLM v2's (with blocks) and Dream's.
    Otherwise they are LLaDA 2's (if sigmoids choose experts), SDAR's (with blocks), LLaDA-MoE's
    (with experts), LLaDA's and A2D's.

    Raises:
      ModelError: if none can.
    """
    mask = {"mask_token_id": masked.mask_id}
    if masked.causal_context:
        return _of_both(config, masked)
    if llada2.is_one(config):
        if masked.shift or not masked.block:
            raise ModelError(
                "a model whose experts are chosen by sigmoids is written as LLaDA 2, with blocks and no shift"
            )
        own = {_BLOCKS["llada2_moe"][2]: masked.block} | llada2.edits_to_hf(masked.delete_id, masked.split_id)
        return llada2.to_hf(config, masked.block) | _named("llada2_moe") | mask | own
    if masked.delete_id >= 0:
        raise ModelError("tokens that delete and split are written as LLaDA 2, whose experts are chosen by sigmoids")
    plain = hf_config.to_hf(dataclasses.replace(config, family=""))
    if masked.reordered and masked.shift:
        if plain["model_type"] != "qwen2":
            raise ModelError(
                "a model whose window sees itself in both directions is written as SDLM, which has Qwen2's layers"
            )
        return plain | {SDLM_MASK: masked.mask_id, "block_size": masked.block, "causal_attn": False}
    if masked.reordered:
        if plain["model_type"] not in ("qwen2", "qwen3"):
            raise ModelError(
                "a model with a sliding window of masks is written as WeDLM, which has layers of Qwen2 or Qwen3"
            )
        normed = plain["model_type"] == "qwen3"
        return plain | _named("wedlm") | mask | {"qk_norm": normed, "attention_bias": not normed}
    if masked.shift:
        kind = "Fast_dLLM_Qwen" if masked.block else "Dream"
        if plain["model_type"] != "qwen2":
            raise ModelError(
                f"a model with shifted logits is written as {kind}, which has biases on q, k and v and nowhere else"
            )
        blocks = {_BLOCKS[kind][2]: masked.block} if masked.block else {}
        parts = {"small_block_size": masked.sub_block} if masked.sub_block else {}
        return plain | _named(kind) | mask | blocks | parts
    counted = {} if masked.align == "prompt_end" else {"block_align": masked.align}
    if masked.block and counted and plain["model_type"] in ("qwen3", "qwen3_moe"):
        kind = plain["model_type"].replace("qwen3", "sdar")
        return plain | _named(kind) | mask | {_BLOCKS[kind][2]: masked.block}
    if not masked.block and plain["model_type"] == "qwen3_moe":
        return llada_moe.to_hf(config, plain) | _named("lladamoe") | mask
    if not masked.block and _is_llada(config, plain):
        fixed = {name: allowed[0] for name, allowed in _LLADA_FIXED.items()}
        renamed = {theirs: plain[ours] for theirs, ours in _LLADA.items()}
        return fixed | renamed | _named("llada") | {"vocab_size": config.vocab_size} | mask
    kind = f"a2d-{plain['model_type']}"
    if kind not in _A2D or config.near.window is not None:
        raise ModelError(
            "a model without shifted logits is written as A2D, which has layers of Llama, Qwen2 or Qwen3 without a window"
        )
    return plain | _named(kind) | mask | ({"block_size": masked.block} | counted if masked.block else {})


def _named(kind: str) -> dict[str, Any]:
    return {"architectures": [name for name, known in ARCHITECTURES.items() if known == kind], "model_type": kind}


def dual_of(config: dict[str, Any]) -> Masked | None:
    """How an autoregressive model's `config.json` says that it is of both kinds: our own two fields; None: it is not.

    Raises:
      ModelError: on a mask or a block that it cannot have.
    """
    mask, block = (config.get(field) for field in OF_BOTH)
    if mask is None and block is None:
        return None
    if not (is_id(mask) and mask < config.get("vocab_size", 0) and is_size(block)):
        raise ModelError(
            f"config.json: {OF_BOTH[0]} and {OF_BOTH[1]} must be a token of the model and the length of a block, not "
            f"{shown(mask)} and {shown(block)}"
        )
    return Masked(mask, False, block, align="prompt_end", causal_context=True)


def _of_both(config: ModelConfig, masked: Masked) -> dict[str, Any]:
    """The fields of a model of both kinds: Nemotron-Labs-Diffusion's, or its family's with ours."""
    plain = hf_config.to_hf(config)
    if plain["model_type"] != MINISTRAL_3.model_type:
        return plain | dict(zip(OF_BOTH, (masked.mask_id, masked.block), strict=True))
    fixed = {name: allowed[0] for name, allowed in _NEMOTRON_FIXED.items()}
    own = {"mask_token_id": masked.mask_id, _BLOCKS[_NEMOTRON][2]: masked.block}
    return plain | _named(_NEMOTRON) | fixed | own


def _is_llada(config: ModelConfig, plain: dict[str, Any]) -> bool:
    """Whether LLaDA can express the model: no biases, plain rope, and heads that fill the width."""
    own = config.near
    bare = plain["model_type"] == "llama" and not (own.qkv_bias or config.dense.bias)
    return bare and config.rope.scaling is None and own.head_dim * own.num_attention_heads == config.hidden_size


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


def nemotron_name(name: str) -> str:
    """Nemotron-Labs-Diffusion's name of a tensor that has this name in Llama's layout.

    >>> nemotron_name("model.layers.3.mlp.down_proj.weight")
    'encoder.layers.3.mlp.down_proj.weight'
    """
    if name.startswith("lm_head."):
        return "diffusion_head." + name.removeprefix("lm_head.")
    return "encoder." + name.removeprefix("model.")


NAMES = {"llada": llada_name, "llada2_moe": ling.tensor_name, _NEMOTRON: nemotron_name}
"""The naming of tensors, by kind, where it is not Llama's."""
