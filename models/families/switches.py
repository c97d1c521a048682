"""Fields of `config.json` in which published models differ, and the values allowed for models read without them.

A family reads its own fields. Any other field listed here may be left over, or belong to another model under a known
name. Its value must not change the arithmetic that was read; otherwise texts would be wrong without an error.
"""

import math
from collections.abc import Callable, Collection
from typing import Any

from specjax.models.errors import ModelError
from specjax.models.fields import FULL, SLIDING, shown
from specjax.models.model_config import ModelConfig

Said = Callable[[ModelConfig], Any]
"""A function from a config to the value that a file would have for it."""

_OFF: tuple[tuple[tuple[Any, ...], str], ...] = (
    ((False, None), """
        attn_output_gate use_head_wise_attn_gate gating use_bidirectional_attention use_bidirectional_attn is_encoder prefix_lm
        alibi rope_interleave attn_temperature_tuning scale_attn_by_inverse_layer_idx scale_logits scale_embedding mup_enabled
        parallel_attn use_parallel_residual apply_residual_connection_post_layernorm norm_head input_emb_norm
        attention_sink_bias add_swa_attention_sink_bias add_full_attention_sink_bias moe_apply_router_weight_on_input
        attention_k_eq_v enable_moe_block use_double_wide_mlp use_cla
    """),
    ((True, None), "is_causal causal do_layer_norm_before scale_attn_weights is_neox_style"),
    ((0, None), """
        clip_qkv logits_soft_cap output_logit_soft_cap router_logit_softcapping moe_router_logit_softcapping mlp_gate_softcap
        mlp_up_softcap gate_soft_cap swiglu_limit attention_chunk_size index_topk num_kv_shared_layers
        hidden_size_per_layer_input kv_lora_rank q_lora_rank n_shared_experts num_shared_experts
        shared_expert_intermediate_size first_k_dense_replace scale_depth dim_model_base qk_l2_clip_threshold laurel_rank
        expert_capacity
    """),
    ((1, None), """
        attention_value_scale attention_in_multiplier attention_out_multiplier key_multiplier lm_head_multiplier logit_scale
        scale_emb embedding_scale logits_mup_width_multiplier rotary_pct router_scaling_factor route_scale
        moe_routed_scaling_factor decoder_sparse_step moe_layer_freq moe_layer_interval interleave_moe_layer_step
        altup_num_inputs total_ut_steps loop_num_passes n_recurrent_loops hc_mult
    """),
    ((None, [], {}), """
        mlp_only_layers block_configs per_layer_config num_attention_heads_per_layer layer_rope_theta
        activation_sparsity_pattern
    """),
    (("rms", "rmsnorm", "RMSNorm", None), "norm_type layer_norm_type normalization_function"),
    (("rope", "rotary", None), "position_embedding_type"),
)  # fmt: skip
"""Values that change nothing, and the fields that may have them."""

_QK_NORM: Said = lambda c: any(
    (c.attention_sizes.qk_norm, c.attention_sizes.qk_wide_norm, c.attention_sizes.qk_head_norm)
)
_SAID: dict[str, Said] = {
    **dict.fromkeys(("use_qk_norm", "qk_norm", "qk_layernorm"), _QK_NORM),
    "attn_logit_softcapping": lambda c: c.attention_sizes.soft_cap,
    "final_logit_softcapping": lambda c: c.head.soft_cap,
    "attention_multiplier": lambda c: c.attention_sizes.scores_scale,
    "query_pre_attn_scalar": lambda c: (
        c.attention_sizes.head_dim if c.attention_sizes.scale is None else c.attention_sizes.scale**-2
    ),
    "embedding_multiplier": lambda c: c.embedding.scale,
    "residual_multiplier": lambda c: c.layers[0].residual_multiplier,
    "logits_scaling": lambda c: c.head.logits_scaling,
    "partial_rotary_factor": lambda c: 0.0 if c.attention_sizes.rope is None else c.attention_sizes.rope.share,
    "rotary_dim": lambda c: c.attention_sizes.rotary_dim,
    "hidden_activation": lambda c: c.dense.hidden_act,
    "routed_scaling_factor": lambda c: c.experts.routed_scaling_factor if c.experts else 1.0,
    "no_rope_layers": lambda c: [int(one.rope is not None) for one in c.attentions],
    "layer_types": lambda c: [FULL if c.window(i) is None else SLIDING for i in range(c.num_hidden_layers)],
    **dict.fromkeys(
        ("num_experts", "num_local_experts", "n_routed_experts"), lambda c: c.experts.num_experts if c.experts else 0
    ),
}
"""The value that a file would have for a model in each of these fields, unless it is null."""

NAMES = frozenset(_SAID) | {name for _, names in _OFF for name in names.split()}
"""All fields that are checked."""
_ALLOWED = {name: values for values, names in _OFF for name in names.split()}


def check(given: dict[str, Any], config: ModelConfig, read: Collection[str], family: str) -> None:
    """Raises ModelError if a field contradicts the model as it was read.

    Args:
      given: the fields of the file.
      config: the model as it was read.
      read: the fields that were read.
      family: the architecture.
    """
    for name in sorted(given.keys() & NAMES - set(read)):
        value = given[name]
        usual = _ALLOWED[name][0] if name in _ALLOWED else _SAID[name](config)
        alike = value in _ALLOWED[name] if name in _ALLOWED else value is None or _alike(value, usual)
        if not alike:
            raise ModelError(
                f"config.json: {name} {shown(value)} is not supported; {family} has {shown(usual)}: the file describes more "
                "than that architecture computes, so it belongs to another model"
            )


def _alike(value: Any, usual: Any) -> bool:
    """Whether two values of a field mean the same."""
    if isinstance(usual, float | int) and isinstance(value, float | int):
        return math.isclose(value, usual, rel_tol=1e-5)
    if isinstance(usual, list) and isinstance(value, list):
        return [FULL if kind == "attention" else kind for kind in value] == usual
    return value == usual
