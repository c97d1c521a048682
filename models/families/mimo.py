"""MiMo-V2-Flash (Xiaomi 2026, arXiv:2601.02780): values narrower than keys, windows with sinks and kv-heads of their own.

Files have the fields of the published folder, those of transformers 5, or both; `save` writes both. A file may hold further
layers (multi-token prediction), which a drafter uses.
"""

from typing import Any

from specjax.models import hf_experts, hf_rope, weights
from specjax.models.attention import AttentionConfig
from specjax.models.errors import ModelError
from specjax.models.families import base
from specjax.models.families.base import SILU, Family, Fields
from specjax.models.families.glm import tensor_name
from specjax.models.fields import FULL, SLIDING, an_object, flag, is_id, is_size, positive, shown
from specjax.models.model_config import ModelConfig
from specjax.models.ropes import RopeConfig

_THETAS = {FULL: ("rope_theta", 5000000.0), SLIDING: ("swa_rope_theta", 10000.0)}
_SHARE = 0.334
_SIZES = ("num_attention_heads", "num_key_value_heads", "head_dim", "v_head_dim")
_KINDS, _FEEDS = (FULL, SLIDING), ("dense", "sparse")


def _read(get: Fields, plain: ModelConfig) -> ModelConfig:
    layers = plain.num_hidden_layers
    usual = [int(i > 0 and (i + 1) % 6 != 0) for i in range(layers)]
    types = _each(get, "hybrid_layer_pattern", "layer_types", _KINDS, usual)
    feeds = _each(get, "moe_layer_freq", "mlp_layer_types", _FEEDS, [int(i > 0) for i in range(layers)])
    get("attention_chunk_size")  # the published file has it beside the window; it means nothing
    scale = get("attention_value_scale")
    own = plain.every(
        AttentionConfig, qkv_bias=flag("attention_bias", get("attention_bias")),
        value_scale=1.0 if scale is None else positive("attention_value_scale", scale),
    )  # fmt: skip
    own = base.windows(own, types, _window(get))
    kinds = {kind: _kind(get, kind) for kind in dict.fromkeys(types)}
    normed = flag("norm_topk_prob", get("norm_topk_prob"))
    experts = hf_experts.by_groups(hf_experts.routed(get), norm_topk_prob=normed)
    return base.sparse(base.mixers(own, lambda i: kinds[types[i]]), experts, [feed == "sparse" for feed in feeds])


def _each(get: Fields, ones: str, names: str, kinds: tuple[str, str], usual: list[int]) -> list[str]:
    """The kind of each layer, by numbers in the field `ones` or by names in the field `names`.

    Raises:
      ModelError: on wrong values, and where both are given and differ.
    """
    given, named = get(ones), get(names)
    if given is not None and (not isinstance(given, list) or len(given) != len(usual) or {*given} - {0, 1}):
        raise ModelError(f"config.json: {ones} must have 0 or 1 for each layer, not {shown(given)}")
    found = [kinds[one] for one in (usual if given is None else given)]
    if named is None:
        return found
    if not isinstance(named, list) or len(named) != len(usual) or {*map(str, named)} - {*kinds}:
        raise ModelError(f"config.json: {names} must have {' or '.join(kinds)} for each layer, not {shown(named)}")
    if given is not None and named != found:
        raise ModelError(f"config.json: {ones} and {names} describe different layers; leave one of them out")
    return named


def _window(get: Fields) -> Any:
    """How many tokens a query sees, itself included, which `sliding_window_size` leaves out."""
    before = get("sliding_window_size")
    if before is None:
        return get("sliding_window")
    if not is_id(before):
        raise ModelError(f"config.json: sliding_window_size must be a number of tokens, not {shown(before)}")
    return before + 1


def _kind(get: Fields, kind: str) -> dict[str, Any]:
    """Heads, rope and sinks of the layers with a window, or of those without."""
    sizes = {name: get(name) for name in _SIZES}
    if kind == SLIDING:
        sizes["num_key_value_heads"] *= 2
        own = {name: get(f"swa_{name}") for name in _SIZES}
        sizes |= {name: size for name, size in own.items() if size is not None}
    heads, kv_heads = sizes["num_attention_heads"], sizes["num_key_value_heads"]
    if not all(map(is_size, sizes.values())) or heads % kv_heads:
        raise ModelError(
            f"config.json: {kind} layers need a head_dim, a v_head_dim, and attention heads that split over their key-value "
            f"heads, not {', '.join(map(shown, sizes.values()))} ({', '.join(_SIZES)})"
        )
    name, usual = ("add_swa_attention_sink_bias", True) if kind == SLIDING else ("add_full_attention_sink_bias", False)
    sinks = usual if get(name) is None else flag(name, get(name))
    return sizes | {"rope": _rope(get, kind), "sinks": sinks}


def _rope(get: Fields, kind: str) -> RopeConfig:
    given = an_object("rope_parameters", get("rope_parameters"))
    if given.keys() - {*_KINDS}:
        raise ModelError(f"config.json: rope_parameters must have a rope for {' and '.join(_KINDS)} layers")
    name, usual = _THETAS[kind]
    theta, share = get(name), get("partial_rotary_factor")
    rope: dict[str, Any] = {"rope_theta": usual if theta is None else theta}
    rope |= {"partial_rotary_factor": _SHARE if share is None else share}
    rope |= an_object("rope_scaling", get("rope_scaling")) | an_object(f"rope_parameters: {kind}", given.get(kind))
    fields = {"rope_parameters": rope}
    return RopeConfig(*hf_rope.from_hf(fields, get("max_position_embeddings")), hf_rope.share(fields))


def _write(config: ModelConfig) -> dict[str, Any]:
    near, ropes, experts = config.near, base.ropes_by_kind(config), config.experts
    far = next((one for one in config.attentions if one.window is None), near)
    types, sparse = base.layer_types(config), base.sparse_layers(config)
    sizes = lambda one: dict(
        zip(_SIZES, (one.num_attention_heads, one.num_key_value_heads, one.head_dim, one.value_dim), strict=True)
    )
    out = sizes(far) | {f"swa_{name}": size for name, size in sizes(near).items()}
    out |= {name: ropes[kind].theta for kind, (name, _) in _THETAS.items()}
    out |= {
        "hybrid_layer_pattern": [int(kind == SLIDING) for kind in types], "layer_types": types,
        "moe_layer_freq": [int(one) for one in sparse], "mlp_layer_types": [_FEEDS[one] for one in sparse],
        "rope_parameters": {
            kind: base.said(rope) | {"partial_rotary_factor": rope.share} for kind, rope in ropes.items()
        },
        "partial_rotary_factor": ropes[FULL].share, "attention_value_scale": near.value_scale,
        "attention_bias": near.qkv_bias, "add_swa_attention_sink_bias": near.sinks, "add_full_attention_sink_bias": far.sinks,
        "layernorm_epsilon": config.norm.eps,
    }  # fmt: skip
    if near.window is not None:
        out |= {"sliding_window": near.window, "sliding_window_size": near.window - 1}
    return out if experts is None else out | hf_experts.routed_to_hf(experts)


def hf_name(path: tuple[Any, ...]) -> tuple[str, bool]:
    """The Hugging Face name of a parameter; see `specjax.models.weights.Layout`."""
    match [getattr(key, "key", key) for key in path]:
        case ["layers", layer, "attention", "sinks"]:
            return f"model.layers.{layer}.self_attn.attention_sink_bias", False
    return weights.hf_name(path)


MIMO_V2 = Family(
    "mimo_v2_flash", "MiMoV2FlashForCausalLM",
    {
        "vocab_size": 152576, "hidden_size": 4096, "intermediate_size": 16384, "num_hidden_layers": 48,
        "num_attention_heads": 64, "num_key_value_heads": 4, "head_dim": 192, "v_head_dim": 128,
        "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "sliding_window": 129, "attention_value_scale": 0.707,
        "n_routed_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 2048, "n_group": 1, "topk_group": 1,
        "norm_topk_prob": True,
    },
    _read, _write, SILU | {"scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",)}, rope=None, names=tensor_name,
    layout=hf_name, fields={"rms_norm_eps": ("rms_norm_eps", "layernorm_epsilon")},
    note="which layers have a window (`hybrid_layer_pattern`, `layer_types`) and experts (`moe_layer_freq`, "
    "`mlp_layer_types`), the heads of those with a window (`swa_num_key_value_heads` and its like), a factor of values "
    "(`attention_value_scale`), sinks (`add_swa_attention_sink_bias`), biases of q, k and v (`attention_bias`)",
)  # fmt: skip
