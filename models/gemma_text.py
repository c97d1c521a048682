"""The config files and the tensors of Gemma 2 (arXiv:2408.00118), 3 (arXiv:2503.19786) and 4, as far as they read text.

They are models of `specjax.models.llama`. Folders of models that also read images or sound hold the text model under a
prefix; the rest of such a folder is left out.
"""

import dataclasses
import functools
import re
from collections.abc import Callable
from typing import Any

from specjax.models import gemma_heads, hf_experts, hf_rope, weights
from specjax.models.errors import ModelError
from specjax.models.families import base
from specjax.models.families.base import Family, Fields
from specjax.models.fields import FULL, SLIDING, an_object, flag, is_id, is_size, layer_kinds, positive, shown
from specjax.models.llama_config import FullAttention, LlamaConfig, RopeScaling
from specjax.models.norms import NormKind
from specjax.models.tensors import Tensor

_USUAL: dict[str, Any] = {
    "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 131072, "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True, "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}  # fmt: skip
# What the loader relies on. A config that says otherwise describes another model.
_FIXED = {"hidden_activation": ("gelu_pytorch_tanh",), "use_bidirectional_attention": (False, None)}


def _scale(get: Fields) -> dict[str, Any]:
    return {"attention_scale": positive("query_pre_attn_scalar", get("query_pre_attn_scalar")) ** -0.5}


def _scale_to_hf(config: LlamaConfig) -> dict[str, Any]:
    return {"query_pre_attn_scalar": round((config.attention_scale or config.head_dim**-0.5) ** -2)}


def _read_2(get: Fields, types: list[str]) -> dict[str, Any]:
    """One rope for all layers."""
    return _scale(get)


def _read_3(get: Fields, types: list[str]) -> dict[str, Any]:
    """`rope_scaling` is of layers without a window; in `rope_parameters` each kind has its own."""
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
    return {"rope_theta": near[0], "rope_scaling": near[1], "full": full} | _scale(get)


def _write_3(config: LlamaConfig) -> dict[str, Any]:
    """In the layouts of transformers 4 and 5."""
    full = config.full or FullAttention()
    ropes = {SLIDING: (config.rope_theta, config.rope_scaling), FULL: (full.rope_theta, full.rope_scaling)}
    plain = {"rope_type": "default"}
    return _scale_to_hf(config) | {
        "rope_parameters": {k: {"rope_theta": theta} | (hf_rope.to_hf(s) or plain) for k, (theta, s) in ropes.items()},
        "rope_local_base_freq": config.rope_theta, "rope_theta": full.rope_theta,
        "rope_scaling": hf_rope.to_hf(full.rope_scaling),
    }  # fmt: skip


def _read_4(get: Fields, types: list[str]) -> dict[str, Any]:
    """Two widths of heads, values from keys, experts, inputs per layer, shared keys and values."""
    shared, sparse = (flag(name, get(name)) for name in ("attention_k_eq_v", "enable_moe_block"))
    asked = lambda name: None if name == "num_global_key_value_heads" and not shared else get(name)
    near, far = (gemma_heads.heads_of(kind, asked, types) for kind in (SLIDING, FULL))
    return {
        "head_dim": near.head_dim, "num_key_value_heads": near.num_key_value_heads, "rope_theta": near.rope_theta,
        "rope_scaling": _scaling(near), "attention_scale": 1.0, "value_norm": True, "layer_scalar": True,
        "experts": hf_experts.from_hf(get, "top_k_experts", beside_mlp=True) if sparse else None,
        "full": FullAttention(
            None if far.head_dim == near.head_dim else far.head_dim,
            None if far.num_key_value_heads == near.num_key_value_heads else far.num_key_value_heads,
            far.rope_theta, _scaling(far), shared,
        ),
        **_inputs(get), **_sharing(get, types),
    }  # fmt: skip


def _inputs(get: Fields) -> dict[str, Any]:
    width, tokens = get("hidden_size_per_layer_input") or 0, get("vocab_size_per_layer_input")
    if not is_id(width) or (width and not is_size(tokens)):
        raise ModelError(
            f"config.json: hidden_size_per_layer_input {shown(width)} and vocab_size_per_layer_input {shown(tokens)} must be "
            "sizes"
        )
    return {"hidden_size_per_layer_input": width, "vocab_size_per_layer_input": tokens if width else 0}


def _sharing(get: Fields, types: list[str]) -> dict[str, Any]:
    count = get("num_kv_shared_layers") or 0
    if not is_id(count) or count >= len(types) or set(types) != set(types[: len(types) - count]):
        raise ModelError(
            f"config.json: num_kv_shared_layers {shown(count)} of {len(types)} must leave a layer of each kind that has keys"
        )
    wide = flag("use_double_wide_mlp", get("use_double_wide_mlp")) and count > 0
    return {"num_kv_shared_layers": count, "use_double_wide_mlp": wide}


def _write_4(config: LlamaConfig) -> dict[str, Any]:
    """`per_layer_config` is how transformers 5 says what `global_head_dim` and `num_global_key_value_heads` say."""
    c, far = config, dataclasses.replace(config, sliding_window=None).at(0)
    own = {"head_dim": far.head_dim, "num_key_value_heads": far.num_key_value_heads}
    out = {
        "rope_parameters": gemma_heads.ropes_to_hf(_heads(dataclasses.replace(c, full=None)), _heads(far)),
        "per_layer_config": {str(i): own for i in range(c.num_hidden_layers) if c.window(i) is None},
        "global_head_dim": far.head_dim, "num_global_key_value_heads": far.num_key_value_heads,
        "attention_k_eq_v": far.value_is_key, "num_kv_shared_layers": c.num_kv_shared_layers,
        "use_double_wide_mlp": c.use_double_wide_mlp, "hidden_size_per_layer_input": c.hidden_size_per_layer_input,
        "vocab_size_per_layer_input": c.vocab_size_per_layer_input or c.vocab_size,
        "enable_moe_block": c.experts is not None,
    }  # fmt: skip
    if c.experts is not None:
        out |= {
            "num_experts": c.experts.num_experts, "top_k_experts": c.experts.num_experts_per_tok,
            "moe_intermediate_size": c.experts.moe_intermediate_size,
        }  # fmt: skip
    return out


def _scaling(heads: gemma_heads.Heads) -> RopeScaling | None:
    if 2 * heads.rotated == heads.head_dim and heads.rope_factor == 1:
        return None
    return RopeScaling("proportional", heads.rope_factor, rotated=heads.rotated)


def _heads(config: LlamaConfig) -> gemma_heads.Heads:
    """The attention of a config whose layers are all alike."""
    c, scaling = config, config.rope_scaling or RopeScaling("proportional", 1.0, rotated=config.head_dim // 2)
    return gemma_heads.Heads(c.head_dim, c.num_key_value_heads, c.rope_theta, scaling.rotated, scaling.factor)


def _read(
    get: Fields, own: Callable[[Fields, list[str]], dict[str, Any]], pattern: int, norm: NormKind, qk_norm: bool = True,
    ends_full: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """What all generations have.

    Args:
      get: a field of `text_config` by name.
      own: what each has in its own way, from fields and the kinds of layers.
      pattern: every so many layers attend to everything, where `layer_types` is left out.
      norm: see `LlamaConfig`.
      qk_norm: likewise.
      ends_full: whether the last layer attends to everything, whatever `layer_types` says.
    """
    types, window = _windows(get, pattern, ends_full)
    uses = [kind == SLIDING for kind in types]
    return base.attention_bias(get) | {
        "sliding_window": window, "sliding_layers": () if all(uses) or window is None else tuple(uses),
        "qk_norm": qk_norm, "norm": norm, "post_norms": True, "hidden_act": "gelu_pytorch_tanh",
        "embedding_scale": get("hidden_size") ** 0.5,
        "attn_logit_softcapping": _cap("attn_logit_softcapping", get),
        "final_logit_softcapping": _cap("final_logit_softcapping", get),
    } | own(get, types)  # fmt: skip


def _cap(name: str, get: Fields) -> float | None:
    return None if get(name) is None else positive(name, get(name))


def _windows(get: Fields, pattern: int, ends_full: bool) -> tuple[list[str], int | None]:
    """The kind of every layer, and how long a window is; None where no layer has one."""
    types, every, layers = get("layer_types"), get("sliding_window_pattern"), get("num_hidden_layers")
    every = pattern if every is None else every
    if not is_size(every):
        raise ModelError(f"config.json: sliding_window_pattern must be a number of layers, not {shown(every)}")
    types = [SLIDING if (i + 1) % every else FULL for i in range(layers)] if types is None else types
    types = gemma_heads.layer_types(types, layers) if ends_full else layer_kinds(types, layers)
    if SLIDING not in types:
        return types, None
    if not is_size(get("sliding_window")):
        raise ModelError(f"config.json: sliding_window must be a positive integer, not {shown(get('sliding_window'))}")
    return types, get("sliding_window")


def _write(config: LlamaConfig, own: Callable[[LlamaConfig], dict[str, Any]]) -> dict[str, Any]:
    c = config
    window = {} if c.sliding_window is None else {"sliding_window": c.sliding_window}
    return window | {
        "attention_bias": c.qkv_bias, "hidden_activation": "gelu_pytorch_tanh", "layer_types": base.layer_types(c),
        "attn_logit_softcapping": c.attn_logit_softcapping, "final_logit_softcapping": c.final_logit_softcapping,
    } | own(c)  # fmt: skip


_NORMS = {
    "attention_norm": "input_layernorm", "attention_post_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm", "mlp_post_norm": "post_feedforward_layernorm",
}  # fmt: skip
_LAYER_INPUT = {"gate": "per_layer_input_gate", "proj": "per_layer_projection", "norm": "post_per_layer_input_norm"}
_LAYER_INPUTS = {
    "embed": "embed_tokens_per_layer", "proj": "per_layer_model_projection", "norm": "per_layer_projection_norm",
}  # fmt: skip


def hf_name(path: tuple[Any, ...]) -> tuple[str, bool]:
    """The Hugging Face name of a parameter; see `specjax.models.weights.Layout`."""
    keys = [getattr(key, "key", key) for key in path]
    match keys:
        case ["layers", layer, norm, _] if norm in _NORMS:
            return f"model.layers.{layer}.{_NORMS[norm]}.weight", False
        case ["layers", layer, "layer_input", name, kind]:
            return f"model.layers.{layer}.{_LAYER_INPUT[name]}.weight", kind == "kernel"
        case ["layer_inputs", name, kind]:
            return f"model.{_LAYER_INPUTS[name]}.weight", kind == "kernel"
        case ["layers", layer, "scalar"]:
            return f"model.layers.{layer}.layer_scalar", False
        case ["layers", layer, "beside", "router", "scale" | "per_expert_scale" as name]:
            return f"model.layers.{layer}.router.{name}", False
        case ["layers", layer, "beside", "router", "proj", _]:
            return f"model.layers.{layer}.router.proj.weight", True
        case ["layers", layer, "beside", "experts", name, _]:
            return f"model.layers.{layer}.experts.{name}_proj", True
        case ["layers", layer, "beside", norm, _]:
            return f"model.layers.{layer}.{norm}.weight", False
    return weights.hf_name(path)


_PREFIXES = {
    "model.language_model.": "model.",
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
}
_OF_KEYS = re.compile(r"^model\.layers\.(\d+)\.self_attn\.[kv]_(proj|norm)\.")
_NOT_TEXT = ("vision_tower.", "multi_modal_projector.", "embed_vision.", "audio_tower.", "embed_audio.")


def text_tensors(tensors: dict[str, Tensor], config: LlamaConfig) -> dict[str, Tensor]:
    """The tensors of the text model of a folder, under the names that it has on its own.

    Those of layers that share keys and values are left out, which files may hold and nobody reads.
    """
    found = {}
    for name, tensor in tensors.items():
        if name.removeprefix("model.").startswith(_NOT_TEXT):
            continue
        prefix = next((prefix for prefix in _PREFIXES if name.startswith(prefix)), "")
        name = _PREFIXES.get(prefix, "") + name.removeprefix(prefix)
        shared = _OF_KEYS.match(name)
        if not shared or int(shared[1]) < config.num_hidden_layers - config.num_kv_shared_layers:
            found[name] = tensor
    return found


_SHARED: dict[str, Any] = {"layout": hf_name, "text": text_tensors}
FAMILIES = {
    "gemma2": Family(
        "Gemma2ForCausalLM",
        _USUAL | {
            "vocab_size": 256000, "max_position_embeddings": 8192, "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
        functools.partial(_read, own=_read_2, pattern=2, norm="offset", qk_norm=False),
        functools.partial(_write, own=_scale_to_hf), _FIXED, **_SHARED,
    ),
    "gemma3_text": Family(
        "Gemma3ForCausalLM", _USUAL | {"vocab_size": 262208}, functools.partial(_read, own=_read_3, pattern=6, norm="offset"),
        functools.partial(_write, own=_write_3), _FIXED | {"attn_logit_softcapping": (None,)},
        ("Gemma3ForConditionalGeneration", "gemma3"), **_SHARED,
    ),
    "gemma4_text": Family(
        "Gemma4ForCausalLM",
        _USUAL | {
            "vocab_size": 262144, "num_hidden_layers": 30, "sliding_window": 512, "global_head_dim": 512,
            "hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": 262144, "num_kv_shared_layers": 0,
        },
        functools.partial(_read, own=_read_4, pattern=6, norm="wide", ends_full=True),
        functools.partial(_write, own=_write_4),
        {
            "hidden_activation": ("gelu_pytorch_tanh",), "use_bidirectional_attention": (None, "vision"),
            "attn_logit_softcapping": (None,),
        },
        ("Gemma4ForConditionalGeneration", "gemma4"), **_SHARED,
        note="values from keys (`attention_k_eq_v`), experts beside the MLP (`enable_moe_block`), layers that read the keys of "
        "others (`num_kv_shared_layers`), inputs per layer",
    ),
}  # fmt: skip
"""By `model_type`."""
