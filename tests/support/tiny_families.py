"""Tiny models of every family, as the configs of transformers that they are made from. A line per family."""

from typing import Any

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
GLM = {
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
    "use_qk_norm": True,
    "attention_bias": True,
}
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
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama2": ("Llama", {"num_key_value_heads": 4, "tie_word_embeddings": False}),
    "llama3": ("Llama", {"num_key_value_heads": 2, "tie_word_embeddings": True, "rope_parameters": LLAMA3_ROPE}),
    "llama_biases": (
        "Llama",
        {
            "num_key_value_heads": 2,
            "attention_bias": True,
            "mlp_bias": True,
            "rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 1000.0},
        },
    ),
    "mistral": ("Mistral", {"num_key_value_heads": 2, "sliding_window": 8, "head_dim": 24}),
    "qwen2": (
        "Qwen2",
        {
            "num_key_value_heads": 2,
            "num_hidden_layers": 3,
            "use_sliding_window": True,
            "sliding_window": 6,
            "max_window_layers": 1,
            "tie_word_embeddings": True,
        },
    ),
    "qwen3": ("Qwen3", {"num_key_value_heads": 1, "head_dim": 32, "attention_bias": True}),
    "mixtral": (
        "Mixtral",
        {"num_key_value_heads": 2, "sliding_window": 8, "num_local_experts": 5, "num_experts_per_tok": 2},
    ),
    "glm4_moe": ("Glm4Moe", GLM),
    "olmo2": ("Olmo2", {"num_key_value_heads": 2, "attention_bias": True}),
    "olmo3": ("Olmo3", OLMO3),
    "smollm3": (
        "SmolLM3",
        {"num_key_value_heads": 2, "num_hidden_layers": 3, "no_rope_layers": [1, 0, 1], "pad_token_id": None},
    ),
    "granite": ("Granite", GRANITE | {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "granite4": ("GraniteMoeHybrid", GRANITE | GRANITE4),
    "phi3": ("Phi3", PHI3),
    "seed_oss": ("SeedOss", {"num_key_value_heads": 2, "head_dim": 24, "mlp_bias": True}),
    "gpt_neox": (
        "GPTNeoX",
        {
            "vocab_size": 131,
            "num_hidden_layers": 3,
            "rope_parameters": {"rope_theta": 500.0, "partial_rotary_factor": 0.5},
        },
    ),
    "phi": (
        "Phi",
        {
            "num_key_value_heads": 2,
            "qk_layernorm": True,
            "rope_parameters": {"rope_theta": 500.0, "partial_rotary_factor": 0.5},
        },
    ),
    "gpt2": ("GPT2", {"n_inner": 96, "scale_attn_by_inverse_layer_idx": True}),
    "starcoder2": ("Starcoder2", {"num_key_value_heads": 2, "sliding_window": 8}),
    "stablelm": ("StableLm", {"num_key_value_heads": 2, "use_qkv_bias": True}),
    "stablelm_parallel": (
        "StableLm",
        {"num_key_value_heads": 2, "qk_layernorm": True, "use_parallel_residual": True, "tie_word_embeddings": True},
    ),
    "opt": ("OPT", {"ffn_dim": 96, "init_std": 0.15, "pad_token_id": 0}),
    "nemotron": ("Nemotron", {"num_key_value_heads": 2, "head_dim": 24, "mlp_bias": True}),
    "modernbert-decoder": (
        "ModernBertDecoder",
        {
            "num_hidden_layers": 3,
            "local_attention": 15,
            "norm_bias": True,
            "mlp_bias": True,
            "classifier_bias": True,
            "pad_token_id": 0,
            "rope_parameters": GEMMA3_ROPES,
        },
    ),
    "gemma2": ("Gemma2", GEMMA | QUERIES | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}),
    "gemma3": (
        "Gemma3Text",
        GEMMA | QUERIES | {"layer_types": [SLIDING, FULL, SLIDING], "rope_parameters": GEMMA3_ROPES},
    ),
    "gemma4": ("Gemma4Text", GEMMA | GEMMA4 | {"attention_k_eq_v": True, "num_global_key_value_heads": 1}),
    "gemma4_moe": ("Gemma4Text", GEMMA | GEMMA4 | EXPERTS),
    "gemma4_small": ("Gemma4Text", GEMMA | GEMMA4 | INPUTS),
    "gpt_oss": ("GptOss", GPT_OSS),
}
"""By name the classes' name in transformers, and what its config says beside `SIZES`."""
LM = {"GPT2": "GPT2LMHeadModel"}
"""Classes of models that have another name than their config's."""
