"""The config files and tensors of the text models of Gemma 2 (arXiv:2408.00118), 3 (arXiv:2503.19786), 3n and 4.

They are models of `specjax.models.llama`. Folders of models that also read images or sound hold the text model under a
prefix; their other tensors are left out.
"""

import dataclasses
import functools
import re
from collections.abc import Callable
from typing import Any

from specjax.models import gemma_heads, hf_experts, hf_rope, weights
from specjax.models.attention import AttentionConfig
from specjax.models.errors import ModelError
from specjax.models.families import base
from specjax.models.families.base import Family, Fields
from specjax.models.fields import FULL, SLIDING, an_object, flag, is_id, is_size, layer_kinds, positive, shown
from specjax.models.layer import LayerConfig
from specjax.models.layer_inputs import LayerInputsConfig
from specjax.models.mlp import MLPConfig
from specjax.models.model_config import EmbeddingConfig, HeadConfig, ModelConfig
from specjax.models.norms import NormConfig, NormKind
from specjax.models.ropes import RopeConfig, RopeScaling
from specjax.models.tensors import Tensor

_USUAL: dict[str, Any] = {
    "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 131072, "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True, "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}  # fmt: skip
# Values that the loader relies on. A config with other values describes another model.
_FIXED = {"hidden_activation": ("gelu_pytorch_tanh",), "use_bidirectional_attention": (False, None)}


def _scaled(get: Fields, config: ModelConfig) -> ModelConfig:
    scale = positive("query_pre_attn_scalar", get("query_pre_attn_scalar")) ** -0.5
    return config.every(AttentionConfig, scale=scale)


def _scale_to_hf(config: ModelConfig) -> dict[str, Any]:
    return {"query_pre_attn_scalar": round(config.near.scores_scale**-2)}


def _read_2(get: Fields, config: ModelConfig, types: list[str]) -> ModelConfig:
    """One rope for all layers."""
    return _scaled(get, config)


def _read_3(get: Fields, config: ModelConfig, types: list[str]) -> ModelConfig:
    return _scaled(get, _with_ropes(get, config, types))


def _with_ropes(get: Fields, config: ModelConfig, types: list[str]) -> ModelConfig:
    """`rope_scaling` applies to layers without a window; in `rope_parameters` each kind of layer has its own."""
    given = an_object("rope_parameters", get("rope_parameters"))
    if set(given) - {SLIDING, FULL}:
        raise ModelError(f"config.json: rope_parameters has {', '.join(given)}; use {FULL} and {SLIDING}")
    own = {kind: an_object(f"rope_parameters: {kind}", given.get(kind)) for kind in (SLIDING, FULL)}
    own[FULL] = own[FULL] | an_object("rope_scaling", get("rope_scaling"))

    def rope(kind: str, old: str, usual: float) -> RopeConfig:
        theta = own[kind].get("rope_theta", usual if get(old) is None else get(old))
        fields = {"rope_parameters": own[kind] | {"rope_theta": theta}}
        return RopeConfig(*hf_rope.from_hf(fields, get("max_position_embeddings")))

    ropes = {SLIDING: rope(SLIDING, "rope_local_base_freq", 1e4), FULL: rope(FULL, "rope_theta", 1e6)}
    return base.mixers(config, lambda i: {"rope": ropes[types[i]]})


def _write_3(config: ModelConfig) -> dict[str, Any]:
    return _scale_to_hf(config) | _ropes_to_hf(config)


def _ropes_to_hf(config: ModelConfig) -> dict[str, Any]:
    """In the layouts of transformers 4 and 5."""
    ropes = base.ropes_by_kind(config)
    return {
        "rope_parameters": base.rope_parameters(ropes), "rope_local_base_freq": ropes[SLIDING].theta,
        "rope_theta": ropes[FULL].theta, "rope_scaling": hf_rope.to_hf(ropes[FULL].scaling),
    }  # fmt: skip


def _read_3n(get: Fields, config: ModelConfig, types: list[str]) -> ModelConfig:
    """Reads several residual streams, branches of low rank, cut-off gates, inputs per layer, and shared keys and values."""
    get("query_pre_attn_scalar")  # files have it, and scores are not scaled
    streams, rank, _ = sizes = [get(name) for name in _SIZES_3N]
    if not all(map(is_size, sizes)):
        said = ", ".join(f"{name} {shown(size)}" for name, size in zip(_SIZES_3N, sizes, strict=True))
        raise ModelError(f"config.json: {said} must be sizes")
    layers = config.num_hidden_layers
    widths = get("intermediate_size")
    widths = widths if isinstance(widths, list) else [widths] * layers
    if len(widths) != layers or not all(map(is_size, widths)):
        raise ModelError(f"config.json: intermediate_size must have a size for each layer, not {shown(widths)}")
    shares, usual = get("activation_sparsity_pattern"), 10 if layers > 10 else 0
    shares = [0.95] * usual + [0.0] * (layers - usual) if shares is None else shares
    is_share = lambda share: isinstance(share, int | float) and 0 <= share < 1
    if not isinstance(shares, list) or len(shares) != layers or not all(map(is_share, shares)):
        raise ModelError(
            f"config.json: activation_sparsity_pattern must have a share below 1 for each layer, not {shown(shares)}"
        )
    mlp = lambda i: dataclasses.replace(config.dense, intermediate_size=widths[i], sparsity=float(shares[i]))
    own = _with_ropes(get, config, types).every(AttentionConfig, scale=1.0, value_norm=config.norm)
    own = own.each(lambda i, layer: dataclasses.replace(layer, feed=mlp(i), streams=streams, laurel=rank))
    return _sharing(get, _inputs(get, own.every(EmbeddingConfig, streams=streams)), types)


def _write_3n(config: ModelConfig) -> dict[str, Any]:
    mlps = [_mlp(layer) or config.dense for layer in config.layers]
    return _ropes_to_hf(config) | _inputs_to_hf(config) | {
        "altup_num_inputs": config.embedding.streams, "laurel_rank": config.layers[0].laurel,
        "intermediate_size": [mlp.intermediate_size for mlp in mlps],
        "activation_sparsity_pattern": [mlp.sparsity for mlp in mlps],
    }  # fmt: skip


_SIZES_3N = ("altup_num_inputs", "laurel_rank", "hidden_size_per_layer_input")


def _read_4(get: Fields, config: ModelConfig, types: list[str]) -> ModelConfig:
    """Reads two head widths, values from keys, experts, inputs per layer, and shared keys and values."""
    shared, sparse = (flag(name, get(name)) for name in ("attention_k_eq_v", "enable_moe_block"))
    asked = lambda name: None if name == "num_global_key_value_heads" and not shared else get(name)
    heads = {kind: gemma_heads.heads_of(kind, asked, types) for kind in (SLIDING, FULL)}
    mixers = {
        kind: {
            "head_dim": own.head_dim, "num_key_value_heads": own.num_key_value_heads,
            "rope": RopeConfig(own.rope_theta, _scaling(own)), "scale": 1.0, "value_norm": config.norm,
            "value_is_key": shared and kind == FULL,
        }
        for kind, own in heads.items()
    }  # fmt: skip
    experts = hf_experts.from_hf(get, "top_k_experts") if sparse else None
    own = base.mixers(config, lambda i: mixers[types[i]]).every(LayerConfig, scalar=True, beside=experts)
    return _sharing(get, _inputs(get, own), types)


def _inputs(get: Fields, config: ModelConfig) -> ModelConfig:
    width, tokens = get("hidden_size_per_layer_input") or 0, get("vocab_size_per_layer_input")
    if not is_id(width) or (width and not is_size(tokens)):
        raise ModelError(
            f"config.json: hidden_size_per_layer_input {shown(width)} and vocab_size_per_layer_input {shown(tokens)} must be "
            "sizes"
        )
    table = LayerInputsConfig(width, tokens) if width else None
    return config.every(EmbeddingConfig, layer_inputs=table).every(LayerConfig, input_size=width)


def _sharing(get: Fields, config: ModelConfig, types: list[str]) -> ModelConfig:
    """The last layers read the keys and values of the last layer of their kind that has its own. Their MLPs may be
    wider."""
    count = get("num_kv_shared_layers") or 0
    if not is_id(count) or count >= len(types) or set(types) != set(types[: len(types) - count]):
        raise ModelError(
            f"config.json: num_kv_shared_layers {shown(count)} of {len(types)} must leave a layer of each kind that has keys"
        )
    wide, owning = 2 if flag("use_double_wide_mlp", get("use_double_wide_mlp")) else 1, len(types) - count
    last = {kind: i for i, kind in enumerate(types[:owning])}

    def change(i: int, layer: LayerConfig) -> LayerConfig:
        if i < owning:
            return layer
        mixer = dataclasses.replace(config.attention(i), source=last[types[i]])
        mlp = _mlp(layer) or config.dense
        feed = dataclasses.replace(mlp, intermediate_size=wide * mlp.intermediate_size)
        return dataclasses.replace(layer, mixer=mixer, feed=feed)

    return config.each(change)


def _write_4(config: ModelConfig) -> dict[str, Any]:
    """Writes `per_layer_config`, transformers 5's form of `global_head_dim` and `num_global_key_value_heads`."""
    c, near = config, config.near
    far = next((one for one in c.attentions if one.window is None), near)
    own = {"head_dim": far.head_dim, "num_key_value_heads": far.num_key_value_heads}
    sharing = [layer for i, layer in enumerate(c.layers) if c.source(i) != i]
    experts = c.layers[0].beside
    out = _inputs_to_hf(c) | {
        "rope_parameters": gemma_heads.ropes_to_hf(_heads(near), _heads(far)),
        "per_layer_config": {str(i): own for i in range(c.num_hidden_layers) if c.window(i) is None},
        "global_head_dim": far.head_dim, "num_global_key_value_heads": far.num_key_value_heads,
        "attention_k_eq_v": far.value_is_key, "enable_moe_block": experts is not None,
        "use_double_wide_mlp": any(layer.feed != c.dense for layer in sharing),
    }  # fmt: skip
    if experts is not None:
        out |= {
            "num_experts": experts.num_experts, "top_k_experts": experts.num_experts_per_tok,
            "moe_intermediate_size": experts.moe_intermediate_size,
        }  # fmt: skip
    return out


def _inputs_to_hf(config: ModelConfig) -> dict[str, Any]:
    """Inputs per layer, and the number of layers that read the keys and values of others."""
    table = config.embedding.layer_inputs or LayerInputsConfig(0, config.vocab_size)
    return {
        "hidden_size_per_layer_input": table.width, "vocab_size_per_layer_input": table.vocab_size,
        "num_kv_shared_layers": sum(config.source(i) != i for i in range(config.num_hidden_layers)),
    }  # fmt: skip


def _scaling(heads: gemma_heads.Heads) -> RopeScaling | None:
    if 2 * heads.rotated == heads.head_dim and heads.rope_factor == 1:
        return None
    return RopeScaling("proportional", heads.rope_factor, rotated=heads.rotated)


def _heads(own: AttentionConfig) -> gemma_heads.Heads:
    rope = own.rope or RopeConfig()
    scaling = rope.scaling or RopeScaling("proportional", 1.0, rotated=own.head_dim // 2)
    return gemma_heads.Heads(own.head_dim, own.num_key_value_heads, rope.theta, scaling.rotated, scaling.factor)


def _read(
    get: Fields, plain: ModelConfig, own: Callable[[Fields, ModelConfig, list[str]], ModelConfig], pattern: int, norm: NormKind,
    qk_norm: bool = True, ends_full: bool = False,
) -> ModelConfig:  # fmt: skip
    """Reads what all generations have in common.

    Args:
      get: returns a field of `text_config` by name.
      plain: the Llama of its sizes.
      own: adds a generation's own parts, from the fields, the model so far and the kinds of layers.
      pattern: one in so many layers attends to everything, where `layer_types` is left out.
      norm: the kind of its norms.
      qk_norm: whether queries and keys are normed per head.
      ends_full: whether the last layer attends to everything, whatever `layer_types` says.
    """
    types, window = _windows(get, pattern, ends_full)
    config = base.windows(plain, types, window).every(NormConfig, kind=norm).every(LayerConfig, post_norms=True)
    config = config.every(MLPConfig, hidden_act="gelu_pytorch_tanh").every(
        AttentionConfig, **base.attention_bias(get), qk_norm=config.norm if qk_norm else None,
        soft_cap=_cap("attn_logit_softcapping", get),
    )  # fmt: skip
    config = config.every(EmbeddingConfig, scale=get("hidden_size") ** 0.5)
    return own(get, config.every(HeadConfig, soft_cap=_cap("final_logit_softcapping", get)), types)


def _mlp(layer: LayerConfig) -> MLPConfig | None:
    return None if layer.feed is None else layer.feed.dense


def _cap(name: str, get: Fields) -> float | None:
    return None if get(name) is None else positive(name, get(name))


def _windows(get: Fields, pattern: int, ends_full: bool) -> tuple[list[str], int | None]:
    """The kind of every layer, and the length of the window; None where no layer has one."""
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


def _write(config: ModelConfig, own: Callable[[ModelConfig], dict[str, Any]]) -> dict[str, Any]:
    c, near = config, config.near
    window = {} if near.window is None else {"sliding_window": near.window}
    return window | {
        "attention_bias": near.qkv_bias, "hidden_activation": "gelu_pytorch_tanh", "layer_types": base.layer_types(c),
        "attn_logit_softcapping": near.soft_cap, "final_logit_softcapping": c.head.soft_cap,
    } | own(c)  # fmt: skip


_NORMS = {
    "attention_norm": "input_layernorm", "attention_post_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm", "mlp_post_norm": "post_feedforward_layernorm",
}  # fmt: skip
_LAYER_INPUT = {"gate": "per_layer_input_gate", "proj": "per_layer_projection", "norm": "post_per_layer_input_norm"}
_LAYER_INPUTS = {
    "embed": "embed_tokens_per_layer", "proj": "per_layer_model_projection", "norm": "per_layer_projection_norm",
}  # fmt: skip
_STREAMS = {"enter": "altup_projections", "leave": "altup_unembed_projections"}
_ALTUP = {
    "norm": "router_norm", "router": "modality_router", "predict": "prediction_coefs", "correct": "correction_coefs",
}  # fmt: skip
_LAUREL = {"left": "linear_left", "right": "linear_right", "norm": "post_laurel_norm"}


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
        case ["streams", name, i, _]:
            return f"model.{_STREAMS[name]}.{i}.weight", True
        case ["layers", layer, "altup", "scale"]:
            return f"model.layers.{layer}.altup.correct_output_scale", False
        case ["layers", layer, "altup", name, kind]:
            return f"model.layers.{layer}.altup.{_ALTUP[name]}.weight", kind == "kernel"
        case ["layers", layer, "laurel", name, kind]:
            return f"model.layers.{layer}.laurel.{_LAUREL[name]}.weight", kind == "kernel"
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


_OF_KEYS = re.compile(r"^model\.layers\.(\d+)\.self_attn\.[kv]_(proj|norm)\.")


def text_tensors(tensors: dict[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """The tensors of a folder's text model, under the names of a text-only model.

    Keys and values of layers that read another layer's are left out: files may hold them, but nothing reads them.
    """
    owners = {i for i in range(config.num_hidden_layers) if config.source(i) == i}
    unread = lambda name: (own := _OF_KEYS.match(name)) is not None and int(own[1]) not in owners
    return {name: x for name, x in base.text_part(tensors, config).items() if not unread(name)}


_SHARED: dict[str, Any] = {"layout": hf_name, "text": text_tensors}
GEMMA2 = Family(
    "gemma2", "Gemma2ForCausalLM",
    _USUAL | {
        "vocab_size": 256000, "max_position_embeddings": 8192, "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    functools.partial(_read, own=_read_2, pattern=2, norm="offset", qk_norm=False),
    functools.partial(_write, own=_scale_to_hf), _FIXED, **_SHARED,
)  # fmt: skip
GEMMA3 = Family(
    "gemma3_text", "Gemma3ForCausalLM", _USUAL | {"vocab_size": 262208},
    functools.partial(_read, own=_read_3, pattern=6, norm="offset"),
    functools.partial(_write, own=_write_3), _FIXED | {"attn_logit_softcapping": (None,)},
    ("Gemma3ForConditionalGeneration", "gemma3"), None, **_SHARED,
)  # fmt: skip
GEMMA3N = Family(
    "gemma3n_text", "Gemma3nForCausalLM",
    _USUAL | {
        "vocab_size": 262400, "hidden_size": 2048, "intermediate_size": 16384, "num_hidden_layers": 35,
        "num_key_value_heads": 2, "max_position_embeddings": 32768, "sliding_window": 512, "final_logit_softcapping": 30.0,
        "hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": 262144, "num_kv_shared_layers": 15,
        "altup_num_inputs": 4, "laurel_rank": 64,
    },
    functools.partial(_read, own=_read_3n, pattern=5, norm="wide"),
    functools.partial(_write, own=_write_3n),
    _FIXED | {
        "attn_logit_softcapping": (None,), "use_double_wide_mlp": (False, None), "altup_active_idx": (0, None),
        "altup_correct_scale": (True, None),
    },
    ("Gemma3nForConditionalGeneration", "gemma3n"), None, by_layer=("intermediate_size",), **_SHARED,
    note="layers that read the keys of others (`num_kv_shared_layers`), which gates are cut off "
    "(`activation_sparsity_pattern`), MLPs of several widths (`intermediate_size`), biases of attention",
)  # fmt: skip
GEMMA4 = Family(
    "gemma4_text", "Gemma4ForCausalLM",
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
    ("Gemma4ForConditionalGeneration", "gemma4"), None, **_SHARED,
    note="values from keys (`attention_k_eq_v`), experts beside the MLP (`enable_moe_block`), layers that read the keys of "
    "others (`num_kv_shared_layers`), inputs per layer",
)  # fmt: skip
