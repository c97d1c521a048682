"""The config files and tensor names of LLaDA2.0 (arXiv:2512.15745) and 2.1, whose folders are alike.

Queries, keys and values are one matrix. The first channels of a head are rotated. The first layers have no experts; the
others choose theirs by sigmoids, within groups. A token sees its own block and earlier ones.
"""

import dataclasses
from typing import Any

from specjax.models import hf_config, hf_experts
from specjax.models.attention import AttentionConfig
from specjax.models.errors import ModelError
from specjax.models.families import base
from specjax.models.fields import an_object, check_fixed, flag, is_id, is_positive, is_size, positive, shown
from specjax.models.layer import LayerConfig
from specjax.models.model_config import ModelConfig
from specjax.models.ropes import RopeConfig

MASK, BLOCK = 156895, 32
"""The mask's id and the block length of published models, whose `config.json` omits both."""

# Values that the loader relies on. A config with other values describes another model.
_FIXED = {
    "score_function": ("sigmoid",), "norm_topk_prob": (True,), "norm_head": (False,), "num_nextn_predict_layers": (0, None),
    "moe_router_enable_expert_bias": (True,), "use_sliding_window": (False, None),
}  # fmt: skip
_BY_BLOCKS = "expert_capacity"
"""Fields of LLaDA 2.2, whose tokens choose among the experts that their block has chosen."""
# Defaults of the published configuration class for fields that `config.json` omits.
_DEFAULTS = {
    "max_position_embeddings": 16384, "rms_norm_eps": 1e-5, "num_key_value_heads": None, "head_dim": None, "num_experts": 16,
    "num_experts_per_tok": 2, "num_shared_experts": 0, "n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 0, "partial_rotary_factor": 0.5, "use_qk_norm": True, "use_qkv_bias": False, "use_bias": True,
}  # fmt: skip
_MODULES = {
    "model.embed_tokens": "model.word_embeddings", "self_attn.o_proj": "attention.dense",
    "self_attn.q_norm": "attention.query_layernorm", "self_attn.k_norm": "attention.key_layernorm",
}  # fmt: skip
_JOINED = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")


def from_hf(config: dict[str, Any]) -> ModelConfig:
    """Reads the `config.json` of LLaDA 2.

    Raises:
      ModelError: on what the loader does not support, and on missing or inconsistent fields.
    """
    check_fixed(config, _FIXED, "LLaDA 2")
    if config.get(_BY_BLOCKS):
        raise ModelError(
            f"config.json: {_BY_BLOCKS} {shown(config[_BY_BLOCKS])} is of LLaDA 2.2, where a block of tokens chooses its "
            "experts together, which is not supported: load a LLaDA 2.0 or 2.1 model"
        )
    fields = _DEFAULTS | config
    rope = an_object("rope_parameters", fields.get("rope_parameters"))
    share = rope.get("partial_rotary_factor", fields["partial_rotary_factor"])
    if not (is_positive(share) and share <= 1):
        raise ModelError(f"config.json: partial_rotary_factor must be a share of a head, not {shown(share)}")
    groups: dict[str, Any] = {name: fields[name] for name in ("n_group", "topk_group")}
    missing = [name for name, value in groups.items() if not is_size(value)]
    missing += [name for name in ("num_shared_experts", "first_k_dense_replace") if not is_id(fields[name] or 0)]
    if missing:
        raise ModelError(f"config.json needs whole numbers for: {', '.join(missing)}")
    experts = hf_experts.from_hf(
        fields.get,
        scoring="sigmoid",
        norm_topk_prob=fields["num_experts_per_tok"] != 1,  # the weight of a single expert is its score
        routed_scaling_factor=positive("routed_scaling_factor", fields["routed_scaling_factor"]),
        num_shared_experts=int(fields["num_shared_experts"] or 0),
        **groups,
    )
    plain = {"architectures": ["LlamaForCausalLM"], "attention_bias": False, "mlp_bias": False}
    whole = {"partial_rotary_factor": 1, "rope_parameters": rope | {"partial_rotary_factor": 1}}
    llama = hf_config.from_hf(fields | plain | whole, besides={*_DEFAULTS, *_FIXED, "is_causal", "rotary_dim"})
    shape = llama.every(RopeConfig, share=float(share)).every(
        AttentionConfig,
        qk_norm=llama.norm if flag("use_qk_norm", fields["use_qk_norm"]) else None,
        qkv_bias=flag("use_qkv_bias", fields["use_qkv_bias"]),
        o_bias=flag("use_bias", fields["use_bias"]),
    )
    dense = fields["first_k_dense_replace"] or 0
    if dense >= shape.num_hidden_layers:
        raise ModelError(f"config.json: first_k_dense_replace {dense} leaves no layer with experts")
    channels = shape.near.rotary_dim
    if channels % 2 or not channels:
        raise ModelError(
            f"config.json: partial_rotary_factor {shown(share)} rotates {channels} channels, which must be an even number"
        )
    return base.sparse(shape, experts, [i >= dense for i in range(shape.num_hidden_layers)])


def is_one(config: ModelConfig) -> bool:
    """Whether it describes such a model."""
    return config.experts is not None and config.experts.scoring == "sigmoid"


def to_hf(config: ModelConfig) -> dict[str, Any]:
    """The `config.json` of LLaDA 2.

    Raises:
      ModelError: if LLaDA 2 cannot express the model.
    """
    c, experts = config, config.experts
    sparse = base.sparse_layers(c)
    dense = sparse.count(False)
    first = any(sparse) and all(sparse[dense:])
    normed = experts is not None and experts.norm_topk_prob == (experts.num_experts_per_tok != 1)
    if experts is None or not (first and normed) or c.dense.bias or c.near.window is not None:
        raise ModelError(
            "a model whose experts are chosen by sigmoids is written as LLaDA 2, which has no sliding window, no biases in its "
            "MLPs, dense layers only before the others, and experts' weights that are divided by their sum"
        )
    bare = c.every(RopeConfig, share=1.0).every(AttentionConfig, qk_norm=None, qkv_bias=False, o_bias=False)
    plain = hf_config.to_hf(bare.mapped(LayerConfig, lambda layer: dataclasses.replace(layer, feed=c.dense)))
    own = {
        "use_qk_norm": c.near.qk_norm is not None, "use_qkv_bias": c.near.qkv_bias, "use_bias": c.near.o_bias,
        "first_k_dense_replace": dense, "partial_rotary_factor": c.rope.share,
    }  # fmt: skip
    names = (
        "num_experts",
        "num_experts_per_tok",
        "moe_intermediate_size",
        "routed_scaling_factor",
        "n_group",
        "topk_group",
    )
    own |= {name: getattr(experts, name) for name in (*names, "num_shared_experts")}
    fixed = {name: allowed[0] for name, allowed in _FIXED.items()}
    return {name: x for name, x in plain.items() if name not in ("attention_bias", "mlp_bias")} | fixed | own


def tensor_name(name: str) -> str:
    """LLaDA 2's name of a tensor that has this name in Llama's layout; see `specjax.models.weights.Names`.

    >>> tensor_name("model.layers.3.self_attn.k_proj.weight")
    'model.layers.3.attention.query_key_value.weight#1'
    """
    module, _, kind = name.rpartition(".")
    if module.endswith(".mlp.gate") and kind == "bias":
        return f"{module}.expert_bias"
    for i, joined in enumerate(_JOINED):
        if module.endswith(joined):
            return f"{module.removesuffix(joined)}attention.query_key_value.{kind}#{i}"
    for ours, theirs in _MODULES.items():
        if module.endswith(ours):
            return f"{module.removesuffix(ours)}{theirs}.{kind}"
    return name
