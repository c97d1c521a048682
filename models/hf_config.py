"""Hugging Face `config.json` to `LlamaConfig` and back, in the layouts of transformers 4 and 5."""

from collections.abc import Callable
from typing import Any

from specjax.models import gemma_text, gpt_oss, hf_experts, hf_rope
from specjax.models.errors import ModelError
from specjax.models.experts import ExpertsConfig
from specjax.models.fields import (
    FULL,
    SLIDING,
    check_depth,
    flag,
    is_id,
    is_size,
    layer_kinds,
    positive,
    shown,
)
from specjax.models.llama_config import OTHER_PARTS, LlamaConfig

_MODEL_TYPES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}
_MERGED = {
    "MedusaLlamaModel": "llama",
    "MedusaModelLlama": "llama",
    "MedusaModelMistral": "mistral",
    "MiMoForCausalLM": "qwen2",
}
"""Models that were saved with the heads they were trained with, which a drafter reads."""
SUPPORTED = (
    *_MODEL_TYPES.values(), *(family.architecture for family in gemma_text.FAMILIES.values()), gpt_oss.ARCHITECTURE,
)  # fmt: skip

# What transformers assumes for a key that `config.json` leaves out. The sizes that have no entry are required.
_COMMON = {"hidden_act": "silu", "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "head_dim": None}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": _COMMON | {"max_position_embeddings": 2048, "num_key_value_heads": None},
    "mistral": _COMMON | {"max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096},
    "qwen2": _COMMON | {"max_position_embeddings": 32768, "num_key_value_heads": 32, "sliding_window": 4096},
    "qwen3": _COMMON
    | {"max_position_embeddings": 32768, "num_key_value_heads": 32, "sliding_window": 4096, "head_dim": 128},
    "qwen3_moe": _COMMON | {"max_position_embeddings": 32768, "num_key_value_heads": 4, "sliding_window": 4096},
}
_REQUIRED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
)
_OPTIONAL = ("num_key_value_heads", "head_dim")


def from_hf(config: dict[str, Any]) -> LlamaConfig:
    """Reads a parsed `config.json`.

    Raises:
      ModelError: on an unsupported architecture, rope type or activation, and on missing or inconsistent fields.
    """
    if gemma_text.family_of(config) is not None:
        return gemma_text.from_hf(config)
    if gpt_oss.describes(config):
        return gpt_oss.from_hf(config)
    family = _family(config)
    fields = _DEFAULTS[family] | config

    def get(name: str) -> Any:
        return fields.get(name)

    missing = [name for name in _REQUIRED if not is_size(get(name))]
    missing += [name for name in _OPTIONAL if not (get(name) is None or is_size(get(name)))]
    if missing:
        raise ModelError(f"config.json needs positive integers for: {', '.join(missing)}")
    check_depth(get("num_hidden_layers"))
    if get("hidden_act") != "silu":
        raise ModelError(f"config.json asks for hidden_act {get('hidden_act')!r}; only 'silu' is supported")
    if get("quantization_config") is not None:
        raise ModelError("config.json has a quantization_config; only float32, bfloat16 and float16 weights are read")

    heads, width = get("num_attention_heads"), get("hidden_size")
    kv_heads = heads if get("num_key_value_heads") is None else get("num_key_value_heads")
    if heads % kv_heads:
        raise ModelError(f"config.json: {heads} attention heads do not split over {kv_heads} key-value heads")
    head_dim = get("head_dim")
    if head_dim is None:
        if width % heads:
            raise ModelError(f"config.json: hidden_size {width} is not a multiple of {heads} heads; set head_dim")
        head_dim = width // heads
    theta, scaling = hf_rope.from_hf(config, get("max_position_embeddings"))
    window, layers = _windows(family, get, get("num_hidden_layers"))
    attention_bias = flag("attention_bias", get("attention_bias")) and family in ("llama", "qwen3", "qwen3_moe")
    experts, sparse = _experts(get, get("num_hidden_layers")) if family == "qwen3_moe" else (None, ())
    return LlamaConfig(
        vocab_size=get("vocab_size"),
        hidden_size=width,
        intermediate_size=get("intermediate_size"),
        num_hidden_layers=get("num_hidden_layers"),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=get("max_position_embeddings"),
        rms_norm_eps=positive("rms_norm_eps", get("rms_norm_eps")),
        rope_theta=theta,
        rope_scaling=scaling,
        tie_word_embeddings=flag("tie_word_embeddings", get("tie_word_embeddings")),
        sliding_window=window,
        sliding_layers=layers,
        qkv_bias=attention_bias or family == "qwen2",
        o_bias=attention_bias,
        mlp_bias=flag("mlp_bias", get("mlp_bias")) and family == "llama",
        qk_norm=family in ("qwen3", "qwen3_moe"),
        experts=experts,
        sparse_layers=sparse,
    )


def _experts(get: Callable[[str], Any], layers: int) -> tuple[ExpertsConfig, tuple[bool, ...]]:
    """Qwen3-MoE's experts, and which layers have them (empty: all)."""
    step = 1 if get("decoder_sparse_step") is None else get("decoder_sparse_step")
    dense = get("mlp_only_layers") or []
    if not is_size(step) or not isinstance(dense, list) or not all(is_id(i) for i in dense):
        raise ModelError(
            f"config.json: decoder_sparse_step {shown(step)} must be a positive integer, and mlp_only_layers {shown(dense)} "
            "numbers of layers"
        )
    named = lambda name: get("num_local_experts") if name == "num_experts" and get(name) is None else get(name)
    experts = hf_experts.from_hf(named, norm_topk_prob=flag("norm_topk_prob", get("norm_topk_prob")))
    sparse = tuple(i not in dense and (i + 1) % step == 0 for i in range(layers))
    if not any(sparse):
        raise ModelError("config.json: mlp_only_layers and decoder_sparse_step leave no layer with experts")
    return experts, () if all(sparse) else sparse


def to_hf(config: LlamaConfig) -> dict[str, Any]:
    """The `config.json` of a config, under the architecture that can express it; transformers 4 and 5 read it.

    Raises:
      ModelError: when no family has this combination of biases, norms, windows and experts, or divides its logits.
    """
    c = config
    if c.post_norms:
        return gemma_text.to_hf(c)
    if c.attention_sinks:
        return gpt_oss.to_hf(c)
    parts = [f"{name}={getattr(c, name)}" for name, usual in OTHER_PARTS.items() if getattr(c, name) != usual]
    if parts:
        raise ModelError(f"no supported architecture without post_norms has {', '.join(parts)}")
    if c.rotary_dim != c.head_dim:
        raise ModelError(f"no supported architecture rotates {c.rotary_dim} of a head's {c.head_dim} channels")
    if c.logits_scaling != 1:
        raise ModelError(
            f"no supported architecture divides its logits (logits_scaling={c.logits_scaling:g}): save the model as it was "
            "before it was widened"
        )
    windows = [c.window(i) is not None for i in range(c.num_hidden_layers)]
    windowed = any(windows)
    biases = (c.qkv_bias, c.o_bias, c.mlp_bias)
    out: dict[str, Any] = {}
    if c.experts is not None:
        family = "qwen3_moe"
        out |= {"attention_bias": c.qkv_bias} | _experts_to_hf(c, c.experts)
    elif c.qk_norm and c.qkv_bias == c.o_bias and not c.mlp_bias:
        family = "qwen3"
        out["attention_bias"] = c.qkv_bias
    elif not c.qk_norm and biases == (True, False, False):
        family = "qwen2"
    elif not c.qk_norm and not any(biases) and windowed and all(windows):
        family = "mistral"
        out["sliding_window"] = c.sliding_window
    elif not c.qk_norm and c.qkv_bias == c.o_bias and not windowed:
        family = "llama"
        out |= {"attention_bias": c.qkv_bias, "mlp_bias": c.mlp_bias}
    else:
        raise ModelError(
            f"no supported architecture has qk_norm={c.qk_norm}, qkv_bias={c.qkv_bias}, o_bias={c.o_bias}, "
            f"mlp_bias={c.mlp_bias} with sliding windows on {sum(windows)} of {len(windows)} layers"
        )
    if family in ("qwen2", "qwen3", "qwen3_moe"):
        out |= {
            "use_sliding_window": windowed,
            "sliding_window": c.sliding_window if windowed else None,
            "max_window_layers": windows.index(True) if windowed else c.num_hidden_layers,
            "layer_types": [SLIDING if w else FULL for w in windows],
        }
    return {
        "architectures": [_MODEL_TYPES[family]],
        "model_type": family,
        "vocab_size": c.vocab_size,
        "hidden_size": c.hidden_size,
        "intermediate_size": c.intermediate_size,
        "num_hidden_layers": c.num_hidden_layers,
        "num_attention_heads": c.num_attention_heads,
        "num_key_value_heads": c.num_key_value_heads,
        "head_dim": c.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": c.max_position_embeddings,
        "rms_norm_eps": c.rms_norm_eps,
        "rope_theta": c.rope_theta,
        "rope_scaling": hf_rope.to_hf(c.rope_scaling),
        "tie_word_embeddings": c.tie_word_embeddings,
        **out,
    }


def _experts_to_hf(config: LlamaConfig, experts: ExpertsConfig) -> dict[str, Any]:
    c = config
    plain = ExpertsConfig(
        experts.num_experts, experts.num_experts_per_tok, experts.moe_intermediate_size,
        norm_topk_prob=experts.norm_topk_prob,
    )  # fmt: skip
    if experts != plain or not c.qk_norm or c.qkv_bias != c.o_bias or c.mlp_bias:
        raise ModelError(
            f"a model with experts is written as {_MODEL_TYPES['qwen3_moe']}, which has norms on q and k, biases on all of "
            "q, k, v and o or none, and a softmax router without groups or shared experts"
        )
    return {
        "num_experts": experts.num_experts,
        "num_experts_per_tok": experts.num_experts_per_tok,
        "moe_intermediate_size": experts.moe_intermediate_size,
        "norm_topk_prob": experts.norm_topk_prob,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [i for i in range(c.num_hidden_layers) if not c.sparse(i)],
    }


def _family(config: dict[str, Any]) -> str:
    model_type = str(config.get("model_type") or "")
    names = config.get("architectures") or [_MODEL_TYPES.get(model_type, model_type)]
    names = [names] if isinstance(names, str) else names
    names = [_MODEL_TYPES.get(_MERGED.get(name, ""), name) for name in names]
    for family, architecture in _MODEL_TYPES.items():
        if architecture in names:
            return family
    found = ", ".join(str(name) for name in names if name) or "none named"
    raise ModelError(f"unsupported architecture: {found}; supported are {', '.join(SUPPORTED)}")


def _windows(family: str, get: Callable[[str], Any], layers: int) -> tuple[int | None, tuple[bool, ...]]:
    """The window, and which layers use it (empty: all)."""
    if family == "llama":
        return None, ()
    window = get("sliding_window")
    if family == "mistral":
        uses = [True] * layers
    else:
        window = window if flag("use_sliding_window", get("use_sliding_window")) else None
        types = get("layer_types")
        if types is None:
            start = get("max_window_layers")
            start = 28 if start is None else start
            if start != 0 and not is_size(start):
                raise ModelError(f"config.json: max_window_layers must be a number of layers, not {shown(start)}")
            types = [SLIDING if window and i >= start else FULL for i in range(layers)]
        uses = [kind == SLIDING for kind in layer_kinds(types, layers)]
    if window is None:
        if family != "mistral" and any(uses):
            raise ModelError("config.json: layer_types has sliding_attention, but the sliding window is off")
        return None, ()
    if not is_size(window):
        raise ModelError(f"config.json: sliding_window must be a positive integer or null, not {shown(window)}")
    if not any(uses):
        return None, ()
    return window, () if all(uses) else tuple(uses)
