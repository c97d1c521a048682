"""Fields of `config.json` for families, as transformers makes them and as older files have them."""

from typing import Any

from support import tiny_families

ELSEWHERE = ("llama2", "llama3", "llama_", "mistral", "gemma", "gpt_oss")
"""What the names of those begin with that have files of their own."""
FAMILIES = tuple(
    name for name in tiny_families.FAMILIES if not name.startswith(ELSEWHERE) and name not in ("qwen2", "qwen3")
)
"""Families whose folders are tested together."""

SIZES = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 8, "num_attention_heads": 8,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
LONG = {"type": "longrope", "short_factor": [1.0, 1.5, 2.0, 3.0], "long_factor": [2.0, 3.0, 5.0, 9.0]}


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
GROWS = {"rope_type": "default", "llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 512}
ALPHA = {"type": "dynamic", "alpha": 1000.0, "factor": 1.0, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0}
MSCALE = YARN | {"mscale": 0.7, "mscale_all_dim": 0.5}
MORE: dict[str, dict[str, Any]] = {
    "kimi_linear": {
        "linear_attn_config": {
            "head_dim": 16,
            "num_heads": 4,
            "short_conv_kernel_size": 3,
            "kda_layers": [1, 2, 3, 5, 6, 7],
            "full_attn_layers": [4, 8],
        },
        "first_k_dense_replace": 2,
        "num_expert_group": 4,
        "topk_group": 2,
        "moe_renormalize": False,
        "q_lora_rank": 24,
    },
    "qwen3_next": {
        "full_attention_interval": 2,
        "linear_num_value_heads": 16,
        "linear_conv_kernel_dim": 3,
        "mlp_only_layers": [1],
        "norm_topk_prob": False,
        "attention_bias": True,
        "rope_scaling": YARN,
    },
    "qwen3_5_text": {"layer_types": ["full_attention"] * 8, "partial_rotary_factor": 0.5},
    "deepseek_v2": {
        "topk_method": "group_limited_greedy",
        "n_group": 8,
        "topk_group": 3,
        "first_k_dense_replace": 3,
        "q_lora_rank": None,
        "rope_scaling": MSCALE,
    },
    "deepseek_v3": {
        "n_group": 4,
        "topk_group": 2,
        "first_k_dense_replace": 0,
        "q_lora_rank": None,
        "kv_lora_rank": 9,
        "attention_bias": True,
        "norm_topk_prob": False,
        "rope_scaling": MSCALE,
    },
    "glm4_moe_lite": {"mlp_layer_types": ["dense"] * 3 + ["sparse"] * 5, "qk_nope_head_dim": 7, "rope_scaling": YARN},
    "phimoe": {
        "sliding_window": 9,
        "attention_bias": True,
        "lm_head_bias": True,
        "rope_scaling": LONG
        | {"short_mscale": 1.1, "long_mscale": 1.3, "original_max_position_embeddings": 4096, "rope_theta": 1e4},
    },
    "ernie4_5_moe": {
        "moe_layer_start_index": 3,
        "moe_layer_end_index": 6,
        "moe_layer_interval": 2,
        "moe_num_shared_experts": 0,
        "moe_norm_min": 0.1,
        "use_bias": True,
    },
    "ernie4_5": {"use_bias": True, "head_dim": 16, "tie_word_embeddings": False, "rope_scaling": YARN},
    "mimo_v2_flash": {
        "num_key_value_heads": 2,
        "v_head_dim": 96,
        "layer_types": ["sliding_attention", "full_attention"] * 4,
        "mlp_layer_types": ["sparse"] * 7 + ["dense"],
        "sliding_window_size": 9,
        "attention_value_scale": None,
        "routed_scaling_factor": None,
        "norm_topk_prob": False,
        "n_group": 4,
        "topk_group": 2,
        "attention_bias": True,
        "tie_word_embeddings": True,
        "rope_parameters": {
            "full_attention": YARN | {"rope_theta": 3e5, "partial_rotary_factor": 0.5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
        },
    },
    "minimax_m2": {"rotary_dim": 64, "rope_scaling": YARN, "num_local_experts": 12, "tie_word_embeddings": True},
    "dots1": {"max_window_layers": 3, "sliding_window": 9, "norm_topk_prob": True, "attention_bias": True},
    "granitemoe": {
        "attention_multiplier": 0.1,
        "embedding_multiplier": 3,
        "attention_bias": True,
        "num_local_experts": 4,
    },
    "olmoe": {"clip_qkv": 8.0, "norm_topk_prob": True, "attention_bias": True, "rope_scaling": YARN},
    "qwen2_moe": {
        "use_sliding_window": True,
        "sliding_window": 5,
        "max_window_layers": 5,
        "decoder_sparse_step": 2,
        "norm_topk_prob": True,
        "qkv_bias": False,
    },
    "llama4_text": {
        "no_rope_layers": [],  # as published files have it
        "no_rope_layer_interval": 3,
        "interleave_moe_layer_step": 2,
        "attention_chunk_size": 9,
        "use_qk_norm": False,
        "attention_bias": True,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 16.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 1.0,
            "original_max_position_embeddings": 512,
        },
    },
    "mixtral": {"sliding_window": 5, "rope_theta": 1e5, "num_local_experts": 4},
    "glm4_moe": {
        "partial_rotary_factor": 0.25,
        "n_group": 4,
        "topk_group": 2,
        "first_k_dense_replace": 0,
        "head_dim": 16,
    },
    "internlm3": {
        "rope_scaling": {"rope_type": "dynamic", "factor": 6.0},
        "qkv_bias": True,
        "bias": True,
        "head_dim": 16,
    },
    "ministral3": {"rope_scaling": YARN | {"llama_4_scaling_beta": 0.2}, "sliding_window": 9, "num_key_value_heads": 2},
    "olmo2": {"rope_theta": 5e5, "rope_scaling": YARN, "attention_bias": True, "num_key_value_heads": 2},
    "olmo3": {"rope_theta": 2e5, "rope_scaling": YARN, "sliding_window": 9},
    "smollm3": {"no_rope_layer_interval": 3, "use_sliding_window": True, "sliding_window": 7, "mlp_bias": True},
    "granite": {
        "attention_multiplier": 0.1,
        "residual_multiplier": 0.2,
        "embedding_multiplier": 3,
        "logits_scaling": 4,
    },
    "apertus": {
        "num_key_value_heads": 2,
        "attention_bias": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 300.0},
    },
    "arcee": {
        "num_key_value_heads": 2,
        "head_dim": 16,
        "mlp_bias": True,
        "rope_scaling": YARN,
        "tie_word_embeddings": True,
    },
    "cohere": {
        "logit_scale": 0.25,
        "use_qk_norm": True,
        "num_key_value_heads": 2,
        "layer_norm_eps": 1e-3,
        "rope_theta": 1e4,
    },
    "cohere2": {
        "logit_scale": 0.25,
        "sliding_window": 9,
        "sliding_window_pattern": 3,
        "position_embedding_type": "rope_gptj",
    },
    "exaone4": {"sliding_window": 9, "sliding_window_pattern": 3, "head_dim": 16, "rope_scaling": YARN},
    "glm": {"partial_rotary_factor": 0.25, "head_dim": 16, "rope_theta": 1e5},
    "glm4": {"attention_bias": False, "head_dim": 16, "rope_scaling": YARN},
    "hunyuan_v1_dense": {"rope_scaling": ALPHA, "head_dim": 16, "attention_bias": True, "num_experts": 1},
    "gpt_neox": {
        "use_parallel_residual": False,
        "rotary_pct": 0.5,
        "rotary_emb_base": 5e4,
        "rope_scaling": {"rope_type": "linear", "factor": 2.0},
        "hidden_act": "relu",
        "attention_bias": False,
        "layer_norm_eps": 1e-3,
    },
    "gpt2": {
        "activation_function": "relu",
        "n_inner": 100,
        "layer_norm_epsilon": 1e-3,
        "scale_attn_weights": False,
        "scale_attn_by_inverse_layer_idx": True,
        "tie_word_embeddings": False,
    },
    "starcoder2": {
        "num_key_value_heads": 4,
        "sliding_window": 9,
        "use_bias": False,
        "norm_epsilon": 1e-3,
        "hidden_act": "relu",
        "rope_theta": 3e4,
    },
    "stablelm": {
        "num_key_value_heads": 4,
        "partial_rotary_factor": 0.5,
        "use_qkv_bias": True,
        "qk_layernorm": True,
        "use_parallel_residual": True,
        "layer_norm_eps": 1e-3,
    },
    "nemotron": {
        "num_key_value_heads": 2,
        "head_dim": 16,
        "partial_rotary_factor": 0.25,
        "attention_bias": True,
        "mlp_bias": True,
        "norm_eps": 1e-3,
        "hidden_act": "gelu",
    },
    "modernbert-decoder": {
        "local_attention": 18,
        "global_attn_every_n_layers": 2,
        "global_rope_theta": 5e4,
        "local_rope_theta": 3e3,
        "rope_scaling": {"rope_type": "linear", "factor": 2.0},
        "norm_bias": True,
        "attention_bias": True,
        "mlp_bias": True,
        "decoder_bias": False,
        "classifier_bias": True,
        "classifier_activation": "relu",
        "hidden_activation": "silu",
        "norm_eps": 1e-3,
        "tie_word_embeddings": False,
    },
    "opt": {
        "ffn_dim": 100,
        "activation_function": "gelu",
        "enable_bias": False,
        "tie_word_embeddings": False,
        "max_position_embeddings": 64,
        "do_layer_norm_before": False,
        "word_embed_proj_dim": 48,
    },
    "phi": {
        "partial_rotary_factor": 0.25,
        "qk_layernorm": True,
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-3,
        "num_key_value_heads": 2,
        "rope_theta": 3e4,
    },
    "seed_oss": {"attention_bias": False, "attention_out_bias": True, "rope_scaling": YARN},
    "phi3": {
        "rope_scaling": LONG,
        "max_position_embeddings": 8192,
        "rope_theta": 1e5,
        "sliding_window": 9,
    },
}
"""As files of transformers 4 say it."""


NEEDED: dict[str, dict[str, Any]] = {
    "bailing_moe": {"num_experts": 16},
    "phimoe": {"num_local_experts": 8},
    "ernie4_5_moe": {"moe_num_experts": 8},
    "deepseek_v2": {"num_experts_per_tok": 3, "num_key_value_heads": 8},
    "deepseek_v3": {"num_key_value_heads": 8},
    "kimi_linear": {"num_key_value_heads": 8},
    "glm4_moe_lite": {"num_key_value_heads": 8},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "num_key_value_heads": 8},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": {"num_experts": 4, "num_key_value_heads": 8},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "granitemoehybrid": {"layer_types": ["attention"] * 8, "num_local_experts": 0},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "exaone4": {"num_key_value_heads": 4},
    "mimo_v2_flash": {"num_key_value_heads": 4},
    "stablelm": {"num_key_value_heads": 8},
    "gemma4_text": {"hidden_size_per_layer_input": 0},
    "gemma3n_text": {"num_kv_shared_layers": 2},
}
"""What a file of theirs must say."""
