"""The config files and the tensors of gpt-oss (OpenAI 2025, arXiv:2508.10925), models of `specjax.models.llama`.

Published folders hold the experts' weights in MXFP4 (`specjax.models.mxfp4`), those that transformers or `save` writes plain
numbers; both are read.
"""

from collections.abc import Callable
from typing import Any

from specjax.models import hf_experts, hf_rope, mxfp4, weights
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
from specjax.models.gemma_text import layout_of as others_layout
from specjax.models.llama_config import LlamaConfig
from specjax.models.tensors import Tensor

ARCHITECTURE, MODEL_TYPE = "GptOssForCausalLM", "gpt_oss"
_ROPE = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}  # fmt: skip
USUAL: dict[str, Any] = {
    "vocab_size": 201088, "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 36, "num_attention_heads": 64,
    "num_key_value_heads": 8, "head_dim": 64, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False, "sliding_window": 128, "num_local_experts": 128, "num_experts_per_tok": 4,
    "swiglu_limit": 7.0, "swiglu_alpha": 1.702, "attention_bias": True, "rope_theta": 150000.0,
}  # fmt: skip
"""What transformers assumes where a file leaves a field out."""
FIXED: dict[str, tuple[Any, ...]] = {"hidden_act": ("silu",)}
"""What the loader relies on. A config that says otherwise describes another model."""
_SIZES = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim", "max_position_embeddings",
)  # fmt: skip
_EXPERTS = {"num_experts": "num_local_experts", "moe_intermediate_size": "intermediate_size"}
_SHARED = ("rms_norm_eps", "tie_word_embeddings")


def describes(config: dict[str, Any]) -> bool:
    """Whether `config.json` is that of a gpt-oss model."""
    named = config.get("architectures") or [config.get("model_type")]
    return bool({ARCHITECTURE, MODEL_TYPE} & {str(name) for name in ([named] if isinstance(named, str) else named)})


def from_hf(config: dict[str, Any]) -> LlamaConfig:
    """Reads a parsed `config.json`.

    Raises:
      ModelError: on missing or inconsistent fields, and on what the loader does not support.
    """
    method = an_object("quantization_config", config.get("quantization_config")).get("quant_method", "mxfp4")
    if method != "mxfp4":
        raise ModelError(f"config.json: quant_method {shown(method)} is not supported; {ARCHITECTURE} has 'mxfp4'")
    given = USUAL | config
    check_fixed(given, FIXED, ARCHITECTURE)

    def get(name: str) -> Any:
        return given.get(name)

    wrong = [name for name in _SIZES if not is_size(get(name))]
    if wrong:
        raise ModelError(f"config.json needs positive integers for: {', '.join(wrong)}")
    check_depth(get("num_hidden_layers"))
    heads, kv_heads = get("num_attention_heads"), get("num_key_value_heads")
    if heads % kv_heads:
        raise ModelError(f"config.json: {heads} attention heads do not split over {kv_heads} key-value heads")
    return LlamaConfig(
        **{name: get(name) for name in _SIZES},
        rms_norm_eps=positive("rms_norm_eps", get("rms_norm_eps")),
        tie_word_embeddings=flag("tie_word_embeddings", get("tie_word_embeddings")),
        **read(get),
    )


def read(get: Callable[[str], Any]) -> dict[str, Any]:
    """The fields of a `LlamaConfig` beyond the sizes, from those of a file by name."""
    layers, window, types = (get(name) for name in ("num_hidden_layers", "sliding_window", "layer_types"))
    types = [FULL if i % 2 else SLIDING for i in range(layers)] if types is None else types
    uses = [kind == SLIDING for kind in layer_kinds(types, layers)]
    if any(uses) and not is_size(window):
        raise ModelError(f"config.json: sliding_window must be a positive integer, not {shown(window)}")
    rope = {name: get(name) for name in ("rope_theta", "rope_scaling", "rope_parameters")}
    if not rope["rope_scaling"] and not rope["rope_parameters"]:
        rope["rope_parameters"] = _ROPE
    theta, scaling = hf_rope.from_hf(rope, get("max_position_embeddings"))
    experts = hf_experts.from_hf(
        lambda name: get(_EXPERTS.get(name, name)), scoring="chosen",
        swiglu_limit=positive("swiglu_limit", get("swiglu_limit")),
        swiglu_alpha=positive("swiglu_alpha", get("swiglu_alpha")),
    )  # fmt: skip
    biased = flag("attention_bias", get("attention_bias"))
    return {
        "rope_theta": theta, "rope_scaling": scaling, "sliding_window": window if any(uses) else None,
        "sliding_layers": () if all(uses) or not any(uses) else tuple(uses), "qkv_bias": biased, "o_bias": biased,
        "norm": "wide", "attention_sinks": True, "experts": experts,
    }  # fmt: skip


def to_hf(config: LlamaConfig) -> dict[str, Any]:
    """The `config.json` of a model with plain numbers; transformers 4 and 5 read it.

    Raises:
      ModelError: naming what gpt-oss does not have.
    """
    c = config
    out = {name: getattr(c, name) for name in (*_SIZES, *_SHARED)} | {
        "architectures": [ARCHITECTURE], "model_type": MODEL_TYPE, "hidden_act": c.hidden_act,
        "rope_theta": c.rope_theta, "rope_scaling": hf_rope.to_hf(c.rope_scaling) or {"rope_type": "default"},
    } | write(c)  # fmt: skip
    again = from_hf(out)
    wrong = [f"{name}={value}" for name, value in vars(c).items() if getattr(again, name) != value]
    if wrong:
        raise ModelError(f"{ARCHITECTURE} cannot express {', '.join(wrong)}")
    return out


def write(config: LlamaConfig) -> dict[str, Any]:
    """What a file says beyond the sizes, from a `LlamaConfig`."""
    c = config
    out: dict[str, Any] = {
        "layer_types": [FULL if c.window(i) is None else SLIDING for i in range(c.num_hidden_layers)],
        "attention_bias": c.qkv_bias,
    }  # fmt: skip
    if c.sliding_window is not None:
        out["sliding_window"] = c.sliding_window
    if c.experts is not None and c.experts.swiglu_limit is not None:
        out |= {
            "num_local_experts": c.experts.num_experts, "num_experts_per_tok": c.experts.num_experts_per_tok,
            "swiglu_limit": c.experts.swiglu_limit, "swiglu_alpha": c.experts.swiglu_alpha,
        }  # fmt: skip
    return out


def hf_name(path: tuple[Any, ...]) -> tuple[str, bool]:
    """The Hugging Face name of a parameter; see `specjax.models.weights.Layout`."""
    keys = [getattr(key, "key", key) for key in path]
    match keys:
        case ["layers", layer, "attention", "sinks"]:
            return f"model.layers.{layer}.self_attn.sinks", False
        case ["layers", layer, "mlp", "router", kind]:
            return f"model.layers.{layer}.mlp.router.{'weight' if kind == 'kernel' else kind}", kind == "kernel"
        case ["layers", layer, "mlp", "experts", name, kind]:
            return f"model.layers.{layer}.mlp.experts.{name}_proj{'' if kind == 'kernel' else '_bias'}", False
    return weights.hf_name(path)


def layout_of(config: LlamaConfig) -> weights.Layout:
    """The names of the tensors of any model of `specjax.models.llama`."""
    return hf_name if config.attention_sinks else others_layout(config)


def text_tensors(tensors: dict[str, Tensor], config: LlamaConfig) -> dict[str, Tensor]:
    """The tensors of a folder, packed ones as plain ones under the names that those have.

    Raises:
      ModelError: see `specjax.models.mxfp4.unpacked`.
    """
    packed = [name.removesuffix("_blocks") for name in tensors if name.endswith("_blocks")]
    whole = {name: mxfp4.unpacked(tensors, name) for name in packed}
    halves = {f"{name}_{part}" for name in packed for part in ("blocks", "scales")}
    return {name: tensor for name, tensor in tensors.items() if name not in halves} | whole
