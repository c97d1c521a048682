"""The text part of DiffusionGemma's `config.json` and `generation_config.json`: shapes, and how a canvas is sampled.

A layer attends either through a sliding window or to everything. The two kinds differ in head width, kv-heads and rope.
"""

import dataclasses
from typing import Any

from specjax.models.errors import ModelError
from specjax.models.experts import ExpertsConfig
from specjax.models.fields import (
    FULL,
    SLIDING,
    an_object,
    check_depth,
    is_id,
    is_positive,
    is_size,
    positive,
    shown,
)
from specjax.models.gemma_heads import KINDS, Heads, heads_of, layer_types, ropes_to_hf
from specjax.models.masked import Canvas

ARCHITECTURE, MODEL_TYPE = "DiffusionGemmaForBlockDiffusion", "diffusion_gemma"


@dataclasses.dataclass(frozen=True)
class DiffusionGemmaConfig:
    """The config of DiffusionGemma's text model. Names follow `text_config` in the Hugging Face `config.json`.

    Attributes:
      sliding_layers: which layers have a sliding window; the others attend to everything, and have no value projection.
      sliding: the attention of layers with a window.
      full: the attention of the others.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    sliding_layers: tuple[bool, ...]
    sliding_window: int
    sliding: Heads
    full: Heads
    num_experts: int
    top_k_experts: int
    moe_intermediate_size: int
    max_position_embeddings: int = 131072
    rms_norm_eps: float = 1e-6
    final_logit_softcapping: float = 30.0

    def window(self, layer: int) -> int | None:
        """The window of a layer; None: it attends to everything."""
        return self.sliding_window if self.sliding_layers[layer] else None

    @property
    def experts(self) -> ExpertsConfig:
        """The experts, which every layer has."""
        return ExpertsConfig(self.num_experts, self.top_k_experts, self.moe_intermediate_size)

    def first(self, layers: int) -> "DiffusionGemmaConfig":
        """The config of the first `layers` layers."""
        return dataclasses.replace(self, num_hidden_layers=layers, sliding_layers=self.sliding_layers[:layers])

    def heads(self, layer: int) -> Heads:
        """The attention of a layer."""
        return self.sliding if self.sliding_layers[layer] else self.full


# names in `generation_config.json` of the sampler's settings, besides the bound in `sampler_config`
_SAMPLING = {
    "max_denoising_steps": "steps", "t_min": "t_min", "t_max": "t_max", "stability_threshold": "stability",
    "confidence_threshold": "confidence",
}  # fmt: skip
# defaults of transformers for fields that a file omits
_DEFAULTS: dict[str, Any] = {
    "vocab_size": 262144, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 30,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 131072,
    "sliding_window": 512, "global_head_dim": 512, "rms_norm_eps": 1e-6, "final_logit_softcapping": 30.0,
}  # fmt: skip
_SIZES = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim", "max_position_embeddings", "sliding_window", "num_experts", "top_k_experts", "moe_intermediate_size",
)  # fmt: skip
# Values that the loader relies on. A config with other values describes another model.
_FIXED = {
    "hidden_activation": ("gelu_pytorch_tanh",), "attention_bias": (False,), "tie_word_embeddings": (True,),
    "use_bidirectional_attention": (None, "vision"),
}  # fmt: skip


def describes(config: dict[str, Any]) -> bool:
    """Whether `config.json` describes a DiffusionGemma model."""
    return config.get("model_type") == MODEL_TYPE or ARCHITECTURE in (config.get("architectures") or [])


def from_hf(config: dict[str, Any], generation: dict[str, Any]) -> tuple[DiffusionGemmaConfig, Canvas]:
    """Reads the parsed `config.json` and `generation_config.json`.

    Raises:
      ModelError: on missing or inconsistent fields, and on unsupported values.
    """
    text = an_object("text_config", config.get("text_config"))
    if config.get("quantization_config") is not None or text.get("quantization_config") is not None:
        raise ModelError("config.json has a quantization_config; only float32, bfloat16 and float16 weights are read")
    for name, allowed in _FIXED.items():
        for place, said in (("config.json", config), ("config.json: text_config", text)):
            if name in said and said[name] not in allowed:
                raise ModelError(f"{place}: {name} {said[name]!r} is not supported; DiffusionGemma has {allowed[0]!r}")
    fields = _DEFAULTS | {name: value for name, value in text.items() if value is not None}

    def get(name: str) -> Any:
        return fields.get(name)

    wrong = [name for name in _SIZES if not is_size(get(name))]
    if wrong:
        raise ModelError(f"config.json: text_config needs positive integers for: {', '.join(wrong)}")
    check_depth(get("num_hidden_layers"))
    if get("top_k_experts") > get("num_experts"):
        raise ModelError(f"config.json: {get('top_k_experts')} experts per token, but there are {get('num_experts')}")
    types = layer_types(get("layer_types"), get("num_hidden_layers"))
    heads = {kind: heads_of(kind, get, types) for kind in KINDS}
    length = config.get("canvas_length", 256)
    if not is_size(length):
        raise ModelError(f"config.json needs a canvas_length of at least 1, got {shown(length)}")
    image = config.get("image_token_id", 258880)
    if image is not None and not is_id(image):
        raise ModelError(f"config.json: image_token_id must be a token id, not {shown(image)}")
    shape = DiffusionGemmaConfig(
        **{name: get(name) for name in _SIZES if name not in ("num_key_value_heads", "head_dim")},
        sliding_layers=tuple(kind == SLIDING for kind in types),
        sliding=heads[SLIDING],
        full=heads[FULL],
        rms_norm_eps=positive("rms_norm_eps", get("rms_norm_eps")),
        final_logit_softcapping=positive("final_logit_softcapping", get("final_logit_softcapping")),
    )
    return shape, Canvas(-1, False, length, image, _sampling(generation))


def to_hf(config: DiffusionGemmaConfig, canvas: Canvas) -> tuple[dict[str, Any], dict[str, Any]]:
    """A model's `config.json` without a vision part, and the sampler's fields of `generation_config.json`."""
    c = config
    own = {"head_dim": c.full.head_dim, "num_key_value_heads": c.full.num_key_value_heads}
    given = ("num_key_value_heads", "head_dim")
    text = {name: getattr(c, name) for name in _SIZES if name not in given} | {
        "model_type": "diffusion_gemma_text", "num_key_value_heads": c.sliding.num_key_value_heads,
        "head_dim": c.sliding.head_dim, "rms_norm_eps": c.rms_norm_eps, "tie_word_embeddings": True,
        "final_logit_softcapping": c.final_logit_softcapping, "hidden_activation": "gelu_pytorch_tanh",
        "layer_types": [SLIDING if sliding else FULL for sliding in c.sliding_layers],
        "rope_parameters": ropes_to_hf(c.sliding, c.full),
        "per_layer_config": {str(i): own for i, sliding in enumerate(c.sliding_layers) if not sliding},
    }  # fmt: skip
    whole = {
        "architectures": [ARCHITECTURE], "model_type": MODEL_TYPE, "canvas_length": canvas.block,
        "image_token_id": canvas.image_id, "tie_word_embeddings": True, "text_config": text,
    }  # fmt: skip
    chosen = dict(canvas.sampling)
    sampler: dict[str, Any] = {theirs: chosen[ours] for theirs, ours in _SAMPLING.items() if ours in chosen}
    if "bound" in chosen:
        sampler["sampler_config"] = {"entropy_bound": chosen["bound"], "_cls_name": "EntropyBoundSamplerConfig"}
    return whole, sampler


def _sampling(generation: dict[str, Any]) -> tuple[tuple[str, float], ...]:
    found = {ours: generation[theirs] for theirs, ours in _SAMPLING.items() if generation.get(theirs) is not None}
    sampler = an_object("sampler_config", generation.get("sampler_config"))
    if sampler:
        kind = sampler.get("_cls_name", "EntropyBoundSamplerConfig")
        if kind != "EntropyBoundSamplerConfig" or "entropy_bound" not in sampler:
            raise ModelError(
                f"generation_config.json: sampler {kind!r} is not supported; use EntropyBoundSamplerConfig"
            )
        found["bound"] = sampler["entropy_bound"]
    wrong = [name for name, value in found.items() if value != 0 and not is_positive(value)]
    if wrong:
        name, value = wrong[0], shown(found[wrong[0]])
        raise ModelError(f"generation_config.json: the sampler's {name} must be a positive number, not {value}")
    return tuple(found.items())
