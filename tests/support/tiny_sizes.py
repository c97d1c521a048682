"""Fields of tiny configs, as transformers calls them; `tiny_families` makes families of them."""

SIZES = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "initializer_range": 0.15,  # large enough for logits that differ
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,  # small, so that the scaling matters in a short text
}
SLIDING, FULL = "sliding_attention", "full_attention"
GEMMA = {
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "sliding_window": 7,
    "pad_token_id": None,  # else its embedding is 0
    "attn_implementation": "eager",  # the others leave soft caps out
}
QUERIES = {"query_pre_attn_scalar": 11}  # not the head's width
GEMMA3_ROPES = {
    SLIDING: {"rope_type": "default", "rope_theta": 100.0},
    FULL: {"rope_type": "linear", "rope_theta": 1000.0, "factor": 3.0},
}
GEMMA4 = {
    "layer_types": [FULL, SLIDING, FULL],
    "global_head_dim": 32,
    "hidden_size_per_layer_input": 0,
    "final_logit_softcapping": 3.0,
    "rope_parameters": {
        SLIDING: {"rope_type": "default", "rope_theta": 100.0},
        FULL: {"rope_type": "proportional", "rope_theta": 1000.0, "partial_rotary_factor": 0.25},
    },
}
GEMMA3N = {
    "layer_types": [SLIDING, FULL, SLIDING],
    "num_kv_shared_layers": 1,
    "intermediate_size": [96, 80, 64],
    "activation_sparsity_pattern": [0.5, 0.9, 0.0],
    "altup_num_inputs": 3,
    "laurel_rank": 5,
    "hidden_size_per_layer_input": 6,
    "vocab_size_per_layer_input": 120,  # fewer than there are tokens, as in published files
    "final_logit_softcapping": 3.0,
    "rope_parameters": GEMMA3_ROPES,
}
MINIMAX_01 = {
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "num_local_experts": 5,
    "layer_types": ["linear_attention", FULL, "linear_attention"],
    "full_attn_alpha_factor": 1.2,
    "linear_attn_alpha_factor": 0.8,
    "linear_attn_beta_factor": 1.3,
    "mlp_alpha_factor": 0.9,
    "mlp_beta_factor": 1.1,
}
LFM2 = {"num_hidden_layers": 3, "num_key_value_heads": 2, "pad_token_id": None, "layer_types": ["conv", FULL, "conv"]}
LFM2_MOE = {
    "num_dense_layers": 1,
    "moe_intermediate_size": 20,
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "routed_scaling_factor": 1.3,
}
GPT_OSS = {
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": 7,
    "swiglu_limit": 1.0,  # small, so that it matters
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 500.0,
        "factor": 4.0,
        "beta_fast": 8.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 16,
    },
    "attn_implementation": "eager",  # the others leave sinks out
}
EXPERTS = {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 16}
INPUTS = {
    "num_hidden_layers": 5,
    "layer_types": [FULL, SLIDING, FULL, SLIDING, FULL],
    "num_kv_shared_layers": 2,
    "use_double_wide_mlp": True,
    "hidden_size_per_layer_input": 6,
    "vocab_size_per_layer_input": 128,
}
_DEEPSEEK = {
    "num_key_value_heads": 2,
    "head_dim": 12,
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 20,
    "n_shared_experts": 2,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
}
"""Of families whose routers are DeepSeek-V3's."""
YARN = {
    "rope_type": "yarn", "rope_theta": 100.0, "factor": 8.0, "original_max_position_embeddings": 16, "beta_fast": 4.0,
    "beta_slow": 0.5,
}  # fmt: skip
LATENT = _DEEPSEEK | {
    "num_key_value_heads": 4, "head_dim": 4, "kv_lora_rank": 10, "q_lora_rank": 14, "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 4, "v_head_dim": 20, "attention_bias": True,
}  # fmt: skip
DEEPSEEK_V3 = LATENT | {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}}
DEEPSEEK_V2 = LATENT | {
    "norm_topk_prob": None, "topk_method": "group_limited_greedy",
    "rope_parameters": YARN | {"mscale": 0.707, "mscale_all_dim": 0.5},
}  # fmt: skip
GLM = _DEEPSEEK | {"use_qk_norm": True, "attention_bias": True}
OLMO3 = {
    "num_key_value_heads": 2,
    "num_hidden_layers": 3,
    "layer_types": [SLIDING, FULL, SLIDING],
    "sliding_window": 7,
    "rope_parameters": {
        SLIDING: {"rope_type": "default", "rope_theta": 100.0},
        FULL: {
            "rope_type": "yarn",
            "rope_theta": 1000.0,
            "factor": 8.0,
            "original_max_position_embeddings": 32,
            "beta_fast": 4.0,
            "beta_slow": 0.5,
        },
    },
}
GRANITE = {
    "num_key_value_heads": 2,
    "embedding_multiplier": 3.0,
    "logits_scaling": 2.5,
    "residual_multiplier": 0.4,
    "attention_multiplier": 0.11,
}
GRANITE4 = {
    "layer_types": [FULL] * 2,
    "num_local_experts": 0,
    "num_experts_per_tok": 0,
    "shared_intermediate_size": 80,
    "mamba_n_heads": 4,
    "mamba_d_head": 32,
}
PHI3 = {
    "num_key_value_heads": 2,
    "sliding_window": 8,
    "pad_token_id": None,
    "partial_rotary_factor": 0.75,
    "original_max_position_embeddings": 1,  # so that transformers has the long factors for every text
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 100.0,
        "short_factor": [1.0] * 6,
        "long_factor": [1.1, 1.3, 1.9, 2.5, 4.0, 5.5],
        "attention_factor": 1.2,
    },
}
QWEN2_MOE = {
    "num_key_value_heads": 2,
    "num_hidden_layers": 3,
    "head_dim": 24,
    "mlp_only_layers": [0],
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 20,
    "shared_expert_intermediate_size": 28,
    "use_sliding_window": True,
    "sliding_window": 6,
}
OLMOE = {
    "num_key_value_heads": 2,
    "intermediate_size": 20,
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "attention_bias": True,
    "clip_qkv": 0.9,  # of normed queries and keys many are beyond
    "pad_token_id": None,
}
DOTS1 = _DEEPSEEK | {"norm_topk_prob": True, "sliding_window": 6, "max_window_layers": 2}
MINIMAX_M2 = {
    "num_key_value_heads": 2,
    "head_dim": 12,
    "rotary_dim": 6,
    "intermediate_size": 20,
    "num_local_experts": 6,
    "num_experts_per_tok": 3,
}
ERNIE_MOE = {
    "num_key_value_heads": 2,
    "head_dim": 12,
    "num_hidden_layers": 4,
    "moe_num_experts": 6,
    "moe_k": 3,
    "moe_intermediate_size": 20,
    "moe_num_shared_experts": 2,
    "moe_layer_interval": 2,
    "moe_norm_min": 0.5,  # large, so that it matters
    "use_bias": True,
    "tie_word_embeddings": False,
    "pad_token_id": None,
}
PHIMOE = {
    "num_key_value_heads": 2,
    "intermediate_size": 20,
    "num_local_experts": 6,
    "router_jitter_noise": 0.2,  # large, so that several experts are near
    "sliding_window": 8,
    "attention_bias": True,
    "lm_head_bias": True,
    "original_max_position_embeddings": 256,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 100.0,
        "short_factor": [1.1, 1.3, 1.9, 2.5, 4.0, 5.5, 7.0, 9.0],
        "long_factor": [2.0] * 8,
        "short_mscale": 1.2,
        "long_mscale": 1.4,
        "original_max_position_embeddings": 256,  # transformers takes the short factors for texts of any length
    },
}
LLAMA4 = {
    "num_key_value_heads": 2,
    "head_dim": 24,
    "num_hidden_layers": 4,
    "no_rope_layers": [1, 0, 1, 1],
    "attention_chunk_size": 5,
    "floor_scale": 3,  # small, so that queries grow within a short text
    "attn_scale": 0.6,
    "moe_layers": [1, 2],
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "intermediate_size": 20,
    "intermediate_size_mlp": 56,
    "rope_parameters": LLAMA3_ROPE | {"high_freq_factor": 1.0},  # no frequency is between, as in Scout
}
MIMO_V2 = {
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 20,
    "v_head_dim": 12,
    "num_hidden_layers": 3,
    "layer_types": [FULL, SLIDING, SLIDING],
    "sliding_window": 6,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 20,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
    "attention_value_scale": 0.6,
    "attention_bias": True,
    "attn_implementation": "eager",  # the others leave sinks out
    "rope_parameters": {
        FULL: {"rope_type": "default", "rope_theta": 1000.0, "partial_rotary_factor": 0.5},
        SLIDING: {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.334},
    },
}
MAMBA2 = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 12, "mamba_d_conv": 3}
"""Sizes of Mamba-2 in Bamba and families that follow it."""
GRANITE4_H = {
    "num_hidden_layers": 3,
    "layer_types": ["mamba", "attention", "mamba"],
    "num_local_experts": 5,
    "num_experts_per_tok": 3,
    "intermediate_size": 20,
    "shared_intermediate_size": 40,
    "position_embedding_type": "nope",
    "mamba_proj_bias": True,
}
FALCON_H1 = {
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "mamba_d_ssm": 128,
    "mamba_rms_norm": True,
    "mamba_proj_bias": True,
    "projectors_bias": True,
    "attention_bias": True,
    "mlp_bias": True,
    "lm_head_multiplier": 0.7,
    "embedding_multiplier": 1.7,
    "mlp_multipliers": [0.8, 1.4],
    "key_multiplier": 0.6,
    "attention_in_multiplier": 1.3,
    "attention_out_multiplier": 0.8,
    "ssm_in_multiplier": 1.2,
    "ssm_out_multiplier": 0.9,
    "ssm_multipliers": [0.9, 1.1, 0.7, 1.3, 0.8],
    "pad_token_id": None,
}
NEMOTRON_H = {
    "hybrid_override_pattern": "ME*M-",
    "num_key_value_heads": 2,
    "head_dim": 24,
    "mamba_num_heads": 8,
    "mamba_head_dim": 12,
    "n_groups": 2,
    "ssm_state_size": 10,
    "use_bias": True,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 20,
    "moe_shared_expert_intermediate_size": 28,
    "moe_latent_size": 32,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
    "time_step_min": 1e-30,  # to which transformers clamps steps, but not those of a token alone
    "pad_token_id": None,
}
JAMBA = {
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "attn_layer_period": 3,
    "attn_layer_offset": 1,
    "expert_layer_period": 2,
    "expert_layer_offset": 1,
    "num_experts": 5,
    "num_experts_per_tok": 3,
    "mamba_d_state": 6,
    "mamba_dt_rank": 5,
    "mamba_proj_bias": True,
    "pad_token_id": None,
}
QWEN3_NEXT = {
    "num_key_value_heads": 2,
    "head_dim": 24,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "linear_attention", FULL, "linear_attention"],
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 16,
    "attention_bias": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.25},
}
KIMI_LINEAR = {
    "num_hidden_layers": 4,
    "num_key_value_heads": 4,
    "layer_types": ["linear_attention", FULL, "linear_attention", "linear_attention"],
    "linear_num_heads": 4,
    "linear_head_dim": 12,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6,
    "v_head_dim": 14,
    "num_experts": 8,
    "num_experts_per_token": 3,
    "moe_intermediate_size": 20,
    "num_shared_experts": 2,
    "num_expert_group": 4,
    "topk_group": 2,
    "pad_token_id": None,
}
SHARING = {
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 20,
    "shared_expert_intermediate_size": 28,
}
SEES = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 32, "patch_size": 14}
QWEN_SEES = SEES | {"depth": 1, "num_heads": 2, "out_hidden_size": 64}
