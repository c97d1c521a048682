"""The config files and the tensors of Gemma 2 (arXiv:2408.00118) and Gemma 3 (arXiv:2503.19786), as far as they read text.

They are models of `specjax.models.llama`. Folders of models that also read images or sound hold the text model under a
prefix; the rest of such a folder is left out.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

from specjax.models import hf_rope, weights
from specjax.models.errors import ModelError
from specjax.models.fields import (
    FULL,
    SLIDING,
    an_object,
    check_depth,
    check_fixed,
    flag,
    is_size,
    layer_kinds,
    positive,
    shown,
)
from specjax.models.llama_config import FullAttention, LlamaConfig, RopeScaling
from specjax.models.norms import NormKind
from specjax.models.tensors import Tensor

Fields = Callable[[str], Any]
"""A field of `text_config` by name; what transformers assumes where the file leaves it out."""

_SIZES = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim", "max_position_embeddings",
)  # fmt: skip
_USUAL: dict[str, Any] = {
    "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 131072, "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True, "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}  # fmt: skip
# What the loader relies on. A config that says otherwise describes another model.
_FIXED = {"hidden_activation": ("gelu_pytorch_tanh",), "use_bidirectional_attention": (False, None)}


@dataclasses.dataclass(frozen=True)
class Family:
    """How a generation of Gemma differs from the others.

    Attributes:
      architecture: of the text model.
      whole: that of the model around it, if there is one.
      usual: what transformers assumes for fields that a file leaves out.
      fixed: fields with the values that the loader can serve; see `check_fixed`.
      pattern: every so many layers attend to everything, where `layer_types` is left out.
      norm: see `LlamaConfig`.
      qk_norm: likewise.
    """

    architecture: str
    whole: str | None
    usual: dict[str, Any]
    fixed: dict[str, tuple[Any, ...]]
    pattern: int
    norm: NormKind
    qk_norm: bool


FAMILIES = {
    "gemma2": Family(
        "Gemma2ForCausalLM", None,
        _USUAL | {
            "vocab_size": 256000, "max_position_embeddings": 8192, "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
        _FIXED, 2, "offset", False,
    ),
    "gemma3_text": Family(
        "Gemma3ForCausalLM", "Gemma3ForConditionalGeneration", _USUAL | {"vocab_size": 262208},
        _FIXED | {"attn_logit_softcapping": (None,)}, 6, "offset", True,
    ),
}  # fmt: skip
"""By `model_type`."""


def family_of(config: dict[str, Any]) -> str | None:
    """The `model_type` of the Gemma that a `config.json` describes, or None."""
    named = config.get("architectures") or [config.get("model_type")]
    named = {str(name) for name in ([named] if isinstance(named, str) else named)}
    for kind, family in FAMILIES.items():
        if named & {family.architecture, family.whole, kind, kind.removesuffix("_text")}:
            return kind
    return None


def from_hf(config: dict[str, Any]) -> LlamaConfig:
    """Reads the parsed `config.json` of one of `FAMILIES`, of the text model or of the whole one.

    Raises:
      ModelError: on missing or inconsistent fields, and on what the loader does not support.
    """
    kind = family_of(config)
    assert kind is not None, "asked of another family's config"
    family = FAMILIES[kind]
    text = {**config, **an_object("text_config", config.get("text_config"))}
    if config.get("quantization_config") is not None or text.get("quantization_config") is not None:
        raise ModelError("config.json has a quantization_config; only float32, bfloat16 and float16 weights are read")
    fields = family.usual | text

    def get(name: str) -> Any:
        return fields.get(name)

    check_fixed(fields, family.fixed, family.architecture)
    wrong = [name for name in _SIZES if not is_size(get(name))]
    if wrong:
        raise ModelError(f"config.json needs positive integers for: {', '.join(wrong)}")
    layers, heads, kv_heads = (get(n) for n in ("num_hidden_layers", "num_attention_heads", "num_key_value_heads"))
    check_depth(layers)
    if heads % kv_heads:
        raise ModelError(f"config.json: {heads} attention heads do not split over {kv_heads} key-value heads")
    uses, window = _windows(get, layers, family.pattern)
    biased = flag("attention_bias", get("attention_bias"))
    return LlamaConfig(
        **{name: get(name) for name in _SIZES},
        rms_norm_eps=positive("rms_norm_eps", get("rms_norm_eps")),
        tie_word_embeddings=flag("tie_word_embeddings", get("tie_word_embeddings")),
        sliding_window=window,
        sliding_layers=() if all(uses) or window is None else tuple(uses),
        qkv_bias=biased,
        o_bias=biased,
        qk_norm=family.qk_norm,
        norm=family.norm,
        post_norms=True,
        hidden_act="gelu_pytorch_tanh",
        embedding_scale=get("hidden_size") ** 0.5,
        attention_scale=positive("query_pre_attn_scalar", get("query_pre_attn_scalar")) ** -0.5,
        attn_logit_softcapping=_cap("attn_logit_softcapping", get),
        final_logit_softcapping=_cap("final_logit_softcapping", get),
        **(_one_rope(get) if kind == "gemma2" else _two_ropes(get)),
    )


def _cap(name: str, get: Fields) -> float | None:
    return None if get(name) is None else positive(name, get(name))


def _windows(get: Fields, layers: int, pattern: int) -> tuple[list[bool], int | None]:
    """Which layers use a window, and how long it is; None where none does."""
    types, every = (
        get("layer_types"),
        pattern if get("sliding_window_pattern") is None else get("sliding_window_pattern"),
    )
    if not is_size(every):
        raise ModelError(f"config.json: sliding_window_pattern must be a number of layers, not {shown(every)}")
    types = [SLIDING if (i + 1) % every else FULL for i in range(layers)] if types is None else types
    uses = [kind == SLIDING for kind in layer_kinds(types, layers)]
    if not any(uses):
        return uses, None
    if not is_size(get("sliding_window")):
        raise ModelError(f"config.json: sliding_window must be a positive integer, not {shown(get('sliding_window'))}")
    return uses, get("sliding_window")


def _one_rope(get: Fields) -> dict[str, Any]:
    """The ropes of Gemma 2."""
    given = {name: get(name) for name in ("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor")}
    theta, scaling = hf_rope.from_hf(given, get("max_position_embeddings"))
    return {"rope_theta": theta, "rope_scaling": scaling}


def _two_ropes(get: Fields) -> dict[str, Any]:
    """The ropes of Gemma 3: `rope_scaling` is of layers without a window; in `rope_parameters` each kind has its own."""
    given = an_object("rope_parameters", get("rope_parameters"))
    if set(given) - {SLIDING, FULL}:
        raise ModelError(f"config.json: rope_parameters has {', '.join(given)}; use {FULL} and {SLIDING}")
    own = {kind: an_object(f"rope_parameters: {kind}", given.get(kind)) for kind in (SLIDING, FULL)}
    own[FULL] = own[FULL] | an_object("rope_scaling", get("rope_scaling"))

    def rope(kind: str, old: str, usual: float) -> tuple[float, RopeScaling | None]:
        theta = own[kind].get("rope_theta", usual if get(old) is None else get(old))
        return hf_rope.from_hf({"rope_parameters": own[kind] | {"rope_theta": theta}}, get("max_position_embeddings"))

    near, far = rope(SLIDING, "rope_local_base_freq", 1e4), rope(FULL, "rope_theta", 1e6)
    full = FullAttention(rope_theta=far[0], rope_scaling=far[1])
    return {"rope_theta": near[0], "rope_scaling": near[1], "full": full}


def to_hf(config: LlamaConfig) -> dict[str, Any]:
    """The `config.json` of a text model; transformers 4 and 5 read it.

    Raises:
      ModelError: naming what no Gemma has.
    """
    c = config
    kind = next((name for name, f in FAMILIES.items() if (f.norm, f.qk_norm) == (c.norm, c.qk_norm)), "gemma2")
    out: dict[str, Any] = {name: getattr(c, name) for name in _SIZES} | {
        "architectures": [FAMILIES[kind].architecture], "model_type": kind, "rms_norm_eps": c.rms_norm_eps,
        "tie_word_embeddings": c.tie_word_embeddings, "attention_bias": c.qkv_bias,
        "hidden_activation": "gelu_pytorch_tanh", "hidden_act": "gelu_pytorch_tanh",
        "layer_types": [FULL if c.window(i) is None else SLIDING for i in range(c.num_hidden_layers)],
        "attn_logit_softcapping": c.attn_logit_softcapping, "final_logit_softcapping": c.final_logit_softcapping,
        "query_pre_attn_scalar": round((c.attention_scale or c.head_dim**-0.5) ** -2),
    }  # fmt: skip
    if c.sliding_window is not None:
        out["sliding_window"] = c.sliding_window
    full = c.full or FullAttention()
    if kind == "gemma2":
        out |= {"rope_theta": c.rope_theta, "rope_scaling": hf_rope.to_hf(c.rope_scaling)}
    else:
        ropes = {SLIDING: (c.rope_theta, c.rope_scaling), FULL: (full.rope_theta, full.rope_scaling)}
        out["rope_parameters"] = {layer: _rope_to_hf(*rope) for layer, rope in ropes.items()}
        out |= {"rope_local_base_freq": c.rope_theta, "rope_theta": full.rope_theta}
        out["rope_scaling"] = hf_rope.to_hf(full.rope_scaling)
    again = from_hf(out)
    wrong = [
        f"{f.name}={getattr(c, f.name)}" for f in dataclasses.fields(c) if getattr(again, f.name) != getattr(c, f.name)
    ]
    if wrong:
        raise ModelError(f"{FAMILIES[kind].architecture} cannot express {', '.join(wrong)}")
    return out


def _rope_to_hf(theta: float | None, scaling: RopeScaling | None) -> dict[str, Any]:
    return {"rope_theta": theta} | (hf_rope.to_hf(scaling) or {"rope_type": "default"})


_NORMS = {
    "attention_norm": "input_layernorm", "attention_post_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm", "mlp_post_norm": "post_feedforward_layernorm",
}  # fmt: skip


def hf_name(path: tuple[Any, ...]) -> tuple[str, bool]:
    """The Hugging Face name of a parameter; see `specjax.models.weights.Layout`."""
    keys = [getattr(key, "key", key) for key in path]
    match keys:
        case ["layers", layer, norm, _] if norm in _NORMS:
            return f"model.layers.{layer}.{_NORMS[norm]}.weight", False
    return weights.hf_name(path)


def layout_of(config: LlamaConfig) -> weights.Layout:
    """The names of the tensors of any model of `specjax.models.llama`."""
    return hf_name if config.post_norms else weights.hf_name


_PREFIXES = {
    "model.language_model.": "model.",
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
}
_NOT_TEXT = ("vision_tower.", "multi_modal_projector.", "embed_vision.", "audio_tower.", "embed_audio.")


def text_tensors(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of the text model of a folder, under the names that it has on its own."""
    found = {}
    for name, tensor in tensors.items():
        if name.removeprefix("model.").startswith(_NOT_TEXT):
            continue
        prefix = next((prefix for prefix in _PREFIXES if name.startswith(prefix)), "")
        found[_PREFIXES.get(prefix, "") + name.removeprefix(prefix)] = tensor
    return found
