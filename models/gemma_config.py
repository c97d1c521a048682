"""`config.json` and `generation_config.json` of DiffusionGemma, the text part: shapes, and how a canvas is sampled.

A layer attends either through a sliding window or to everything; the two kinds differ in head width, key-value heads and rope.
"""

import dataclasses
from typing import Any

from specjax.models.errors import ModelError
from specjax.models.fields import an_object, check_depth, is_id, is_positive, is_size, positive, shown
from specjax.models.masked import Canvas

ARCHITECTURE, MODEL_TYPE = "DiffusionGemmaForBlockDiffusion", "diffusion_gemma"
SLIDING, FULL = "sliding_attention", "full_attention"
_KINDS = (SLIDING, FULL)


@dataclasses.dataclass(frozen=True)
class Heads:
    """The attention of one kind of layer.

    Attributes:
      head_dim: width of a head.
      num_key_value_heads: how many share keys and values.
      rope_theta: base of the rotary embedding.
      rotated: how many of a head's `head_dim / 2` pairs are rotated, the fastest first; the others carry no position.
      rope_factor: divides positions.
    """

    head_dim: int
    num_key_value_heads: int
    rope_theta: float
    rotated: int
    rope_factor: float = 1.0


@dataclasses.dataclass(frozen=True)
class DiffusionGemmaConfig:
    """Names follow `text_config` in the Hugging Face `config.json`.

    Attributes:
      sliding_layers: which layers have a sliding window; the others attend to everything, and have no value projection.
      sliding: the attention of the former.
      full: that of the latter.
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
        """How far back a layer attends; None: to everything."""
        return self.sliding_window if self.sliding_layers[layer] else None

    def heads(self, layer: int) -> Heads:
        """The attention of a layer."""
        return self.sliding if self.sliding_layers[layer] else self.full


# `generation_config.json`'s names of what a sampler is set by, beside the bound in `sampler_config`
_SAMPLING = {
    "max_denoising_steps": "steps", "t_min": "t_min", "t_max": "t_max", "stability_threshold": "stability",
    "confidence_threshold": "confidence",
}  # fmt: skip
# what transformers assumes for fields that a file leaves out
_DEFAULTS: dict[str, Any] = {
    "vocab_size": 262144, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 30,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 131072,
    "sliding_window": 512, "global_head_dim": 512, "rms_norm_eps": 1e-6, "final_logit_softcapping": 30.0,
}  # fmt: skip
_SIZES = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim", "max_position_embeddings", "sliding_window", "num_experts", "top_k_experts", "moe_intermediate_size",
)  # fmt: skip
_ROPES = {
    SLIDING: {"rope_type": "default", "rope_theta": 1e4},
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
}
# What the loader relies on. A config that says otherwise describes another model.
_FIXED = {
    "hidden_activation": ("gelu_pytorch_tanh",), "attention_bias": (False,), "tie_word_embeddings": (True,),
    "use_bidirectional_attention": (None, "vision"),
}  # fmt: skip


def describes(config: dict[str, Any]) -> bool:
    """Whether `config.json` is that of a DiffusionGemma model."""
    return config.get("model_type") == MODEL_TYPE or ARCHITECTURE in (config.get("architectures") or [])


def from_hf(config: dict[str, Any], generation: dict[str, Any]) -> tuple[DiffusionGemmaConfig, Canvas]:
    """Reads the parsed `config.json` and `generation_config.json`.

    Raises:
      ModelError: on missing or inconsistent fields, and on what the loader does not support.
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
        raise ModelError(f"config.json: {get('top_k_experts')} experts a token, but there are {get('num_experts')}")
    types = _layer_types(get("layer_types"), get("num_hidden_layers"))
    heads = {kind: _heads(kind, get, types) for kind in _KINDS}
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
    """The `config.json` of a model, without a vision part, and what `generation_config.json` says of its sampler."""
    c = config
    ropes = {}
    for kind, heads in zip(_KINDS, (c.sliding, c.full), strict=True):
        whole = 2 * heads.rotated == heads.head_dim and heads.rope_factor == 1
        ropes[kind] = {"rope_type": "default" if whole else "proportional", "rope_theta": heads.rope_theta}
        if not whole:
            part = 2 * heads.rotated / heads.head_dim
            ropes[kind] |= {"partial_rotary_factor": part, "factor": heads.rope_factor}
    own = {"head_dim": c.full.head_dim, "num_key_value_heads": c.full.num_key_value_heads}
    given = ("num_key_value_heads", "head_dim")
    text = {name: getattr(c, name) for name in _SIZES if name not in given} | {
        "model_type": "diffusion_gemma_text", "num_key_value_heads": c.sliding.num_key_value_heads,
        "head_dim": c.sliding.head_dim, "rms_norm_eps": c.rms_norm_eps, "tie_word_embeddings": True,
        "final_logit_softcapping": c.final_logit_softcapping, "hidden_activation": "gelu_pytorch_tanh",
        "layer_types": [SLIDING if sliding else FULL for sliding in c.sliding_layers], "rope_parameters": ropes,
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


def _layer_types(types: Any, layers: int) -> list[str]:
    """The kind of every layer; by default every sixth one attends to everything, and the last one always does."""
    types = [SLIDING if (i + 1) % 6 else FULL for i in range(layers)] if types is None else list(types)
    unknown = sorted({str(kind) for kind in types} - set(_KINDS))
    if unknown or len(types) != layers:
        what = f"has unknown kinds: {', '.join(unknown)}" if unknown else f"names {len(types)} of {layers} layers"
        raise ModelError(f"config.json: layer_types {what}; use {FULL} or {SLIDING} for each layer")
    return [*types[:-1], FULL]


def _heads(kind: str, get: Any, types: list[str]) -> Heads:
    """The attention of one kind of layer, from `per_layer_config` or, in older files, `global_head_dim` and the like."""
    usual = {"head_dim": get("head_dim"), "num_key_value_heads": get("num_key_value_heads")}
    per_layer = get("per_layer_config")
    if per_layer is None:
        shared = get("num_global_key_value_heads") or usual["num_key_value_heads"]
        found = [usual if kind == SLIDING else {"head_dim": get("global_head_dim"), "num_key_value_heads": shared}]
    else:
        found = [usual | (per_layer.get(str(i)) or {}) for i, own in enumerate(types) if own == kind]
    own = found[0] if found else usual
    if any(other != own for other in found) or set(own) != set(usual):
        raise ModelError(
            f"config.json: per_layer_config must give all {kind} layers one head_dim and num_key_value_heads, and nothing else"
        )
    width, shared, heads = own["head_dim"], own["num_key_value_heads"], get("num_attention_heads")
    if not is_size(width) or width % 2:
        raise ModelError(f"config.json: head_dim of {kind} layers must be even, got {width!r}")
    if not is_size(shared) or heads % shared:
        raise ModelError(f"config.json: {heads} attention heads do not split over {shared!r} key-value heads")
    rope = (get("rope_parameters") or _ROPES).get(kind) or _ROPES[kind]
    part, form = rope.get("partial_rotary_factor", 1.0), rope.get("rope_type", "default")
    whole = is_positive(part) and part <= 1
    if not whole or form not in ("default", "proportional") or (form == "default" and part != 1):
        raise ModelError(
            f"config.json: rope of {kind} layers has type {form!r} with partial_rotary_factor {shown(part)}; supported are "
            "default over whole heads, and proportional"
        )
    factor = positive("rope factor", rope.get("factor", 1.0)) if form == "proportional" else 1.0
    return Heads(width, shared, positive("rope_theta", rope.get("rope_theta")), int(part * width // 2), factor)


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
