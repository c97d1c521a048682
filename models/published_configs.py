"""The program-relevant fields of the `config.json` of popular models, for planning without a network."""

from typing import Any

_LLAMA = {
    "model_type": "llama", "vocab_size": 128256, "num_key_value_heads": 8, "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "tie_word_embeddings": False,
    "rope_scaling": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}  # fmt: skip
_LLAMA_SMALL = _LLAMA | {"rope_scaling": _LLAMA["rope_scaling"] | {"factor": 32.0}, "tie_word_embeddings": True}
_QWEN = {
    "model_type": "qwen3", "vocab_size": 151936, "num_key_value_heads": 8, "head_dim": 128,
    "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "rope_scaling": None,
    "tie_word_embeddings": False, "use_sliding_window": False,
}  # fmt: skip
_QWEN_MOE = _QWEN | {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_key_value_heads": 4,
    "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 1536, "norm_topk_prob": True,
    "decoder_sparse_step": 1, "mlp_only_layers": [],
}  # fmt: skip
_QWEN2_MOE = {
    "architectures": ["Qwen2MoeForCausalLM"], "model_type": "qwen2_moe", "vocab_size": 151936, "num_key_value_heads": 16,
    "num_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632,
    "norm_topk_prob": False, "max_position_embeddings": 8192, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0,
    "tie_word_embeddings": False, "use_sliding_window": False,
}  # fmt: skip
_MIXTRAL = {
    "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "vocab_size": 32000, "num_key_value_heads": 8,
    "num_local_experts": 8, "num_experts_per_tok": 2, "max_position_embeddings": 32768, "rms_norm_eps": 1e-5,
    "rope_theta": 1000000.0, "sliding_window": None, "tie_word_embeddings": False,
}  # fmt: skip
_OLMOE = {
    "architectures": ["OlmoeForCausalLM"], "model_type": "olmoe", "vocab_size": 50304, "num_key_value_heads": 16,
    "num_experts": 64, "num_experts_per_tok": 8, "norm_topk_prob": False, "clip_qkv": None, "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "rope_scaling": None, "attention_bias": False, "tie_word_embeddings": False,
}  # fmt: skip
_GRANITE_MOE = {
    "architectures": ["GraniteMoeForCausalLM"], "model_type": "granitemoe", "vocab_size": 49155, "num_key_value_heads": 8,
    "num_local_experts": 40, "num_experts_per_tok": 8, "max_position_embeddings": 131072, "rms_norm_eps": 1e-6,
    "rope_theta": 5000000.0, "rope_scaling": None, "attention_bias": False, "tie_word_embeddings": True,
    "attention_multiplier": 0.015625, "embedding_multiplier": 12.0, "logits_scaling": 6.0, "residual_multiplier": 0.22,
}  # fmt: skip
_LFM2 = {
    "architectures": ["Lfm2ForCausalLM"], "model_type": "lfm2", "vocab_size": 65536, "num_key_value_heads": 8,
    "conv_L_cache": 3, "conv_bias": False, "block_auto_adjust_ff_dim": True, "block_multiple_of": 256,
    "block_ffn_dim_multiplier": 1.0, "max_position_embeddings": 128000, "norm_eps": 1e-5, "rope_theta": 1000000.0,
    "tie_embedding": True,
}  # fmt: skip
_LFM2_MOE = {
    "architectures": ["Lfm2MoeForCausalLM"], "model_type": "lfm2_moe", "vocab_size": 65536, "num_key_value_heads": 8,
    "conv_L_cache": 3, "conv_bias": False, "num_dense_layers": 2, "num_experts": 32, "num_experts_per_tok": 4,
    "moe_intermediate_size": 1792, "norm_topk_prob": True, "routed_scaling_factor": 1.0, "use_expert_bias": True,
    "layer_types": ["full_attention" if i in (2, 6, 10, 14, 18, 21) else "conv" for i in range(24)],
    "max_position_embeddings": 128000, "norm_eps": 1e-5, "rope_theta": 1000000.0, "tie_word_embeddings": True,
}  # fmt: skip
_DOTS1 = {
    "architectures": ["Dots1ForCausalLM"], "model_type": "dots1", "vocab_size": 152064, "num_key_value_heads": 32,
    "n_routed_experts": 128, "num_experts_per_tok": 6, "moe_intermediate_size": 1408, "n_shared_experts": 2,
    "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 2.5,
    "sliding_window": None, "max_position_embeddings": 32768, "rms_norm_eps": 1e-5, "rope_theta": 10000000.0,
    "rope_scaling": None, "attention_bias": False, "tie_word_embeddings": False,
}  # fmt: skip
_MINIMAX_M2 = {
    "architectures": ["MiniMaxM2ForCausalLM"], "model_type": "minimax_m2", "vocab_size": 200064, "num_key_value_heads": 8,
    "head_dim": 128, "rotary_dim": 64, "num_local_experts": 256, "num_experts_per_tok": 8, "scoring_func": "sigmoid",
    "use_qk_norm": True, "max_position_embeddings": 196608, "rms_norm_eps": 1e-6, "rope_theta": 5000000.0,
    "tie_word_embeddings": False, "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}  # fmt: skip
_MIMO_V2 = {
    "architectures": ["MiMoV2FlashForCausalLM"], "model_type": "mimo_v2_flash", "vocab_size": 152576, "num_key_value_heads": 4,
    "head_dim": 192, "v_head_dim": 128, "swa_num_attention_heads": 64, "swa_num_key_value_heads": 8, "swa_head_dim": 192,
    "swa_v_head_dim": 128, "hybrid_layer_pattern": [int(i > 0 and i % 6 != 5) for i in range(48)],
    "moe_layer_freq": [0] + [1] * 47, "sliding_window": 128, "sliding_window_size": 128, "attention_chunk_size": 128,
    "attention_value_scale": 0.707, "add_swa_attention_sink_bias": True, "add_full_attention_sink_bias": False,
    "n_routed_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 2048, "n_shared_experts": None, "n_group": 1,
    "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": None, "scoring_func": "sigmoid",
    "topk_method": "noaux_tc", "partial_rotary_factor": 0.334, "rope_theta": 5000000.0, "swa_rope_theta": 10000.0,
    "max_position_embeddings": 262144, "layernorm_epsilon": 1e-5, "attention_bias": False, "tie_word_embeddings": False,
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}  # fmt: skip
_MTP_FP8 = {
    "num_nextn_predict_layers": 1, "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}  # fmt: skip
_DEEPSEEK_YARN = {
    "type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1,
}  # fmt: skip
_DEEPSEEK_V2 = {
    "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "vocab_size": 102400, "kv_lora_rank": 512,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "first_k_dense_replace": 1, "moe_layer_freq": 1,
    "n_shared_experts": 2, "num_experts_per_tok": 6, "norm_topk_prob": False, "scoring_func": "softmax",
    "max_position_embeddings": 163840, "rms_norm_eps": 1e-6, "rope_theta": 10000, "attention_bias": False,
    "tie_word_embeddings": False, "rope_scaling": _DEEPSEEK_YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
}  # fmt: skip
_DEEPSEEK_V2_LITE = _DEEPSEEK_V2 | {
    "q_lora_rank": None, "num_key_value_heads": 16, "n_routed_experts": 64, "moe_intermediate_size": 1408,
    "routed_scaling_factor": 1.0, "topk_method": "greedy", "n_group": 1, "topk_group": 1,
}  # fmt: skip
_DEEPSEEK_V2_WHOLE = _DEEPSEEK_V2 | {
    "q_lora_rank": 1536, "num_key_value_heads": 128, "n_routed_experts": 160, "moe_intermediate_size": 1536,
    "routed_scaling_factor": 16.0, "topk_method": "group_limited_greedy", "n_group": 8, "topk_group": 3,
}  # fmt: skip
_DEEPSEEK_V3 = _DEEPSEEK_V2 | _MTP_FP8 | {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "vocab_size": 129280, "q_lora_rank": 1536,
    "num_key_value_heads": 128, "n_routed_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 2048,
    "n_shared_experts": 1, "first_k_dense_replace": 3, "n_group": 8, "topk_group": 4, "norm_topk_prob": True,
    "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "topk_method": "noaux_tc",
    "rope_scaling": _DEEPSEEK_YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
}  # fmt: skip
_KIMI_K2 = _DEEPSEEK_V3 | {
    "model_type": "kimi_k2", "vocab_size": 163840, "num_key_value_heads": 64, "n_routed_experts": 384, "n_group": 1,
    "topk_group": 1, "first_k_dense_replace": 1, "routed_scaling_factor": 2.827, "rope_theta": 50000.0,
    "max_position_embeddings": 131072, "num_nextn_predict_layers": 0,
    "rope_scaling": _DEEPSEEK_YARN | {"factor": 32.0, "beta_fast": 1.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0},
}  # fmt: skip
_GLM_4_LITE = {
    "architectures": ["Glm4MoeLiteForCausalLM"], "model_type": "glm4_moe_lite", "vocab_size": 154880, "q_lora_rank": 768,
    "kv_lora_rank": 512, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "v_head_dim": 256, "num_key_value_heads": 20,
    "n_routed_experts": 64, "num_experts_per_tok": 4, "moe_intermediate_size": 1536, "n_shared_experts": 1,
    "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.8,
    "topk_method": "noaux_tc", "max_position_embeddings": 202752, "rms_norm_eps": 1e-5, "rope_theta": 1000000,
    "rope_scaling": None, "attention_bias": False, "tie_word_embeddings": False, "num_nextn_predict_layers": 1,
}  # fmt: skip
_ERNIE = {
    "architectures": ["Ernie4_5ForCausalLM"], "model_type": "ernie4_5", "vocab_size": 103424, "num_key_value_heads": 2,
    "head_dim": 128, "use_bias": False, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
    "tie_word_embeddings": True,
}  # fmt: skip
_ERNIE_MOE = _ERNIE | {
    "architectures": ["Ernie4_5_MoeForCausalLM"], "model_type": "ernie4_5_moe", "num_key_value_heads": 4,
    "moe_num_experts": 64, "moe_k": 6, "moe_intermediate_size": 1536, "moe_num_shared_experts": 2, "moe_layer_start_index": 1,
    "moe_layer_end_index": 27, "moe_layer_interval": 1,
}  # fmt: skip
_PHIMOE = {
    "architectures": ["PhiMoEForCausalLM"], "model_type": "phimoe", "vocab_size": 32064, "num_key_value_heads": 8,
    "num_local_experts": 16, "num_experts_per_tok": 2, "router_jitter_noise": 0.01, "sliding_window": 131072,
    "attention_bias": True, "lm_head_bias": True, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0, "tie_word_embeddings": False,
}  # fmt: skip
_MISTRAL = {
    "architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3", "vocab_size": 131072, "head_dim": 128,
    "num_key_value_heads": 8, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 1e9,
    "sliding_window": None, "tie_word_embeddings": False,
}  # fmt: skip
_QWEN_VL = {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"], "model_type": "qwen2_5_vl", "vocab_size": 152064,
    "num_key_value_heads": 4, "max_position_embeddings": 128000, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}, "tie_word_embeddings": False,
}  # fmt: skip
_EXAONE = {
    "architectures": ["Exaone4ForCausalLM"], "model_type": "exaone4", "vocab_size": 102400, "num_key_value_heads": 8,
    "head_dim": 128, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 1e6, "sliding_window": 4096,
    "sliding_window_pattern": 4, "rope_scaling": _LLAMA["rope_scaling"] | {"factor": 16.0}, "tie_word_embeddings": False,
}  # fmt: skip
_HUNYUAN = {
    "architectures": ["HunYuanDenseV1ForCausalLM"], "model_type": "hunyuan_v1_dense", "vocab_size": 128167,
    "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 262144, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
    "rope_scaling": {"type": "dynamic", "alpha": 1000.0, "factor": 1.0}, "tie_word_embeddings": True,
}  # fmt: skip
_APERTUS = {
    "architectures": ["ApertusForCausalLM"], "model_type": "apertus", "vocab_size": 131072, "num_key_value_heads": 8,
    "max_position_embeddings": 65536, "rms_norm_eps": 1e-5, "rope_theta": 12000000.0, "hidden_act": "xielu",
    "rope_scaling": _LLAMA["rope_scaling"], "tie_word_embeddings": False,
}  # fmt: skip
_MINISTRAL = {
    "architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3",
    "text_config": {
        "model_type": "ministral3", "vocab_size": 131072, "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": 34, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
        "max_position_embeddings": 262144, "rms_norm_eps": 1e-5, "sliding_window": None, "tie_word_embeddings": False,
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16384,
            "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
        },
    },
}  # fmt: skip
_LLAMA_4 = {
    "architectures": ["Llama4ForConditionalGeneration"], "model_type": "llama4",
    "text_config": {
        "model_type": "llama4_text", "vocab_size": 202048, "hidden_size": 5120, "intermediate_size": 8192,
        "intermediate_size_mlp": 16384, "num_hidden_layers": 48, "num_attention_heads": 40, "num_key_value_heads": 8,
        "head_dim": 128, "num_local_experts": 16, "num_experts_per_tok": 1, "interleave_moe_layer_step": 1,
        "use_qk_norm": True, "no_rope_layers": [], "attention_chunk_size": 8192, "attn_temperature_tuning": True,
        "floor_scale": 8192, "attn_scale": 0.1, "max_position_embeddings": 10485760, "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0, "tie_word_embeddings": False,
        "rope_scaling": _LLAMA["rope_scaling"] | {"factor": 16.0, "high_freq_factor": 1.0},
    },
}  # fmt: skip
_INTERNLM = {
    "architectures": ["InternLM3ForCausalLM"], "model_type": "internlm3", "vocab_size": 128512, "num_key_value_heads": 2,
    "head_dim": 128, "max_position_embeddings": 32768, "rms_norm_eps": 1e-5, "rope_theta": 50000000.0,
    "rope_scaling": {"rope_type": "dynamic", "factor": 6.0}, "tie_word_embeddings": False,
}  # fmt: skip
_GLM = {
    "architectures": ["Glm4ForCausalLM"], "model_type": "glm4", "vocab_size": 151552, "num_key_value_heads": 2, "head_dim": 128,
    "max_position_embeddings": 32768, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "partial_rotary_factor": 0.5,
    "attention_bias": False, "tie_word_embeddings": False,
}  # fmt: skip
_COHERE = {
    "architectures": ["CohereForCausalLM"], "model_type": "cohere", "vocab_size": 256000, "num_key_value_heads": 64,
    "max_position_embeddings": 131072, "layer_norm_eps": 1e-5, "rope_theta": 8000000.0, "logit_scale": 0.0625,
    "use_qk_norm": False, "tie_word_embeddings": True,
}  # fmt: skip
_COHERE_2 = {
    "architectures": ["Cohere2ForCausalLM"], "model_type": "cohere2", "vocab_size": 256000, "num_key_value_heads": 8,
    "max_position_embeddings": 132096, "layer_norm_eps": 1e-5, "rope_theta": 50000.0, "logit_scale": 0.25,
    "sliding_window": 4096, "sliding_window_pattern": 4, "tie_word_embeddings": True,
}  # fmt: skip
_LLADA_MOE = {
    "architectures": ["LLaDAMoEModelLM"], "model_type": "lladamoe", "vocab_size": 157184, "hidden_size": 2048,
    "dense_intermediate_size": 8192, "expert_intermediate_size": 1024, "num_hidden_layers": 16, "num_attention_heads": 16,
    "num_key_value_heads": 16, "num_experts": 64, "num_experts_per_tok": 8, "moe_layer_freq": [1] * 16, "qk_layernorm": True,
    "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 50000.0, "rope_scaling": None,
    "tie_word_embeddings": False,
}  # fmt: skip
_LING_2 = {
    "architectures": ["BailingMoeV2ForCausalLM"], "model_type": "bailing_moe", "vocab_size": 157184, "hidden_size": 2048,
    "intermediate_size": 5120, "moe_intermediate_size": 512, "num_hidden_layers": 20, "num_attention_heads": 16,
    "num_key_value_heads": 4, "head_dim": 128, "num_experts": 256, "num_experts_per_tok": 8, "num_shared_experts": 1,
    "n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5, "first_k_dense_replace": 1, "partial_rotary_factor": 0.5,
    "use_qk_norm": True, "use_qkv_bias": False, "use_bias": False, "max_position_embeddings": 32768, "rms_norm_eps": 1e-6,
    "rope_theta": 600000.0, "rope_scaling": None, "tie_word_embeddings": False,
}  # fmt: skip
_LLADA2 = _LING_2 | {"architectures": ["LLaDA2MoeModelLM"], "model_type": "llada2_moe"}
_GEMMA = {
    "architectures": ["GemmaForCausalLM"], "model_type": "gemma", "vocab_size": 256000, "head_dim": 256, "hidden_act": "gelu",
    "max_position_embeddings": 8192, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
}  # fmt: skip
_GEMMA2 = {
    "architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "vocab_size": 256000, "num_key_value_heads": 16,
    "head_dim": 128, "query_pre_attn_scalar": 144, "sliding_window": 4096, "max_position_embeddings": 8192,
}  # fmt: skip
_GPT_OSS = {
    "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "vocab_size": 201088, "hidden_size": 2880,
    "intermediate_size": 2880, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "num_experts_per_tok": 4,
    "sliding_window": 128, "swiglu_limit": 7.0, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
    "rope_theta": 150000.0, "attention_bias": True, "tie_word_embeddings": False,
    "rope_scaling": {
        "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
        "original_max_position_embeddings": 4096,
    },
    "quantization_config": {"quant_method": "mxfp4"},
}  # fmt: skip
_GEMMA3 = {
    "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "vocab_size": 262208, "num_key_value_heads": 16,
    "head_dim": 128, "query_pre_attn_scalar": 168, "sliding_window": 1024, "max_position_embeddings": 131072,
    "rope_scaling": {"rope_type": "linear", "factor": 8.0},
}  # fmt: skip

_GEMMA3N = {
    "model_type": "gemma3n_text", "vocab_size": 262400, "hidden_size": 2048, "num_attention_heads": 8,
    "num_key_value_heads": 2, "head_dim": 256, "hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": 262144,
    "altup_num_inputs": 4, "laurel_rank": 64, "sliding_window": 512, "max_position_embeddings": 32768, "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0, "rope_local_base_freq": 10000.0, "final_logit_softcapping": 30.0,
}  # fmt: skip


def _gemma3n(mlp: int, layers: int, shared: int) -> dict[str, Any]:
    sizes = {"intermediate_size": [mlp] * layers, "num_hidden_layers": layers, "num_kv_shared_layers": shared}
    sparse = {"activation_sparsity_pattern": [0.95] * 10 + [0.0] * (layers - 10)}
    whole = {"architectures": ["Gemma3nForConditionalGeneration"], "model_type": "gemma3n"}
    return whole | {"text_config": _GEMMA3N | sizes | sparse}


_PYTHIA = {
    "architectures": ["GPTNeoXForCausalLM"], "model_type": "gpt_neox", "vocab_size": 50432, "hidden_act": "gelu",
    "max_position_embeddings": 2048, "layer_norm_eps": 1e-5, "rotary_emb_base": 10000, "rotary_pct": 0.25,
    "use_parallel_residual": True, "tie_word_embeddings": False,
}  # fmt: skip

_PHI = {
    "architectures": ["PhiForCausalLM"], "model_type": "phi", "vocab_size": 51200, "hidden_act": "gelu_new",
    "max_position_embeddings": 2048, "layer_norm_eps": 1e-5, "rope_theta": 10000.0, "partial_rotary_factor": 0.4,
    "qk_layernorm": False, "tie_word_embeddings": False,
}  # fmt: skip

_GPT2 = {
    "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "vocab_size": 50257, "activation_function": "gelu_new",
    "n_positions": 1024, "n_ctx": 1024, "layer_norm_epsilon": 1e-5,
}  # fmt: skip

_STARCODER2 = {
    "architectures": ["Starcoder2ForCausalLM"], "model_type": "starcoder2", "vocab_size": 49152, "num_key_value_heads": 4,
    "hidden_act": "gelu_pytorch_tanh", "max_position_embeddings": 16384, "norm_epsilon": 1e-5, "rope_theta": 1000000.0,
    "sliding_window": 4096, "use_bias": True,
}  # fmt: skip

_STABLELM = {
    "architectures": ["StableLmForCausalLM"], "model_type": "stablelm", "vocab_size": 100352, "num_key_value_heads": 8,
    "hidden_act": "silu", "max_position_embeddings": 4096, "layer_norm_eps": 1e-5, "rope_theta": 10000,
    "partial_rotary_factor": 0.25, "use_qkv_bias": False, "qk_layernorm": True, "use_parallel_residual": True,
    "tie_word_embeddings": False,
}  # fmt: skip

_OPT = {
    "architectures": ["OPTForCausalLM"], "model_type": "opt", "vocab_size": 50272, "activation_function": "relu",
    "max_position_embeddings": 2048, "do_layer_norm_before": True,
}  # fmt: skip

_NEMOTRON = {
    "architectures": ["NemotronForCausalLM"], "model_type": "nemotron", "vocab_size": 256000, "num_key_value_heads": 8,
    "head_dim": 128, "hidden_act": "relu2", "max_position_embeddings": 4096, "norm_eps": 1e-5, "rope_theta": 10000.0,
    "partial_rotary_factor": 0.5, "attention_bias": False, "mlp_bias": False, "tie_word_embeddings": False,
}  # fmt: skip

_ETTIN = {
    "architectures": ["ModernBertDecoderForCausalLM"], "model_type": "modernbert-decoder", "vocab_size": 50368,
    "hidden_activation": "gelu", "max_position_embeddings": 7999, "norm_eps": 1e-5, "local_attention": 128,
    "global_attn_every_n_layers": 3, "global_rope_theta": 160000.0, "local_rope_theta": 160000.0,
}  # fmt: skip

_LINEAR = {
    "head_dim": 256, "linear_num_key_heads": 16, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4, "full_attention_interval": 4, "max_position_embeddings": 262144, "rms_norm_eps": 1e-6,
    "attention_bias": False, "tie_word_embeddings": False,
}  # fmt: skip
_QWEN_NEXT = _LINEAR | {
    "architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "vocab_size": 151936, "num_key_value_heads": 2,
    "linear_num_value_heads": 32, "num_experts": 512, "num_experts_per_tok": 10, "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
    "partial_rotary_factor": 0.25, "rope_theta": 10000000.0, "rope_scaling": None,
}  # fmt: skip
_QWEN3_5 = _LINEAR | {
    "architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5", "vocab_size": 248320,
    "num_key_value_heads": 4, "linear_num_value_heads": 48, "attn_output_gate": True,
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 10000000.0, "partial_rotary_factor": 0.25, "mrope_section": [11, 11, 10],
        "mrope_interleaved": True,
    },
}  # fmt: skip


def _sized(family: dict[str, Any], width: int, mlp: int, layers: int, heads: int) -> dict[str, Any]:
    sizes = {"hidden_size": width, "intermediate_size": mlp, "num_hidden_layers": layers, "num_attention_heads": heads}
    return family | sizes


_MAMBA = {
    "architectures": ["MambaForCausalLM"], "model_type": "mamba", "vocab_size": 50280, "hidden_size": 2560,
    "intermediate_size": 5120, "num_hidden_layers": 64, "state_size": 16, "time_step_rank": 160, "conv_kernel": 4, "expand": 2,
    "use_bias": False, "use_conv_bias": True, "hidden_act": "silu", "layer_norm_epsilon": 1e-5,
}  # fmt: skip
_FALCON_MAMBA = _MAMBA | {
    "architectures": ["FalconMambaForCausalLM"], "model_type": "falcon_mamba", "vocab_size": 65024, "hidden_size": 4096,
    "intermediate_size": 8192, "time_step_rank": 256, "tie_word_embeddings": False,
}  # fmt: skip
_CODESTRAL_MAMBA = {
    "architectures": ["Mamba2ForCausalLM"], "model_type": "mamba2", "vocab_size": 32768, "hidden_size": 4096,
    "num_hidden_layers": 64, "state_size": 128, "num_heads": 128, "head_dim": 64, "n_groups": 8, "conv_kernel": 4, "expand": 2,
    "use_bias": False, "use_conv_bias": True, "layer_norm_epsilon": 1e-5, "tie_word_embeddings": False,
}  # fmt: skip
_JAMBA = {
    "architectures": ["JambaForCausalLM"], "model_type": "jamba", "vocab_size": 65536, "hidden_size": 4096,
    "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "num_experts": 16,
    "num_experts_per_tok": 2, "attn_layer_period": 8, "attn_layer_offset": 4, "expert_layer_period": 2,
    "expert_layer_offset": 1, "mamba_d_state": 16, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_dt_rank": 256,
    "max_position_embeddings": 262144, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
}  # fmt: skip
_BAMBA = {
    "architectures": ["BambaForCausalLM"], "model_type": "bamba", "vocab_size": 128256, "hidden_size": 4096,
    "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "attn_layer_indices": [9, 18, 27], "mamba_n_heads": 128, "mamba_d_head": 64, "mamba_d_state": 128, "mamba_n_groups": 1,
    "mamba_d_conv": 4, "mamba_expand": 2, "max_position_embeddings": 262144, "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}  # fmt: skip
_GRANITE_4 = {
    "architectures": ["GraniteMoeHybridForCausalLM"], "model_type": "granitemoehybrid", "vocab_size": 100352,
    "num_hidden_layers": 40, "layer_types": ["attention" if i % 10 == 5 else "mamba" for i in range(40)],
    "mamba_d_head": 64, "mamba_d_state": 128, "mamba_n_groups": 1, "mamba_d_conv": 4, "mamba_expand": 2,
    "position_embedding_type": "nope", "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
    "embedding_multiplier": 12, "residual_multiplier": 0.22,
}  # fmt: skip
_GRANITE_4_SMALL = _GRANITE_4 | {
    "hidden_size": 4096, "intermediate_size": 768, "shared_intermediate_size": 1536, "num_attention_heads": 32,
    "num_key_value_heads": 8, "num_local_experts": 72, "num_experts_per_tok": 10, "mamba_n_heads": 128,
    "attention_multiplier": 0.0078125, "logits_scaling": 16,
}  # fmt: skip
_GRANITE_4_TINY = _GRANITE_4 | {
    "hidden_size": 1536, "intermediate_size": 512, "shared_intermediate_size": 1024, "num_attention_heads": 12,
    "num_key_value_heads": 4, "num_local_experts": 64, "num_experts_per_tok": 6, "mamba_n_heads": 48,
    "attention_multiplier": 0.0078125, "logits_scaling": 6,
}  # fmt: skip
_NEMOTRON_H = {
    "architectures": ["NemotronHForCausalLM"], "model_type": "nemotron_h", "vocab_size": 131072, "head_dim": 128,
    "ssm_state_size": 128, "n_groups": 8, "conv_kernel": 4, "use_conv_bias": True, "use_bias": False, "mlp_bias": False,
    "mlp_hidden_act": "relu2", "layer_norm_epsilon": 1e-5, "tie_word_embeddings": False,
}  # fmt: skip
_NEMOTRON_NANO_2 = _NEMOTRON_H | {
    "hybrid_override_pattern": "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-", "num_hidden_layers": 56,
    "hidden_size": 4480, "intermediate_size": 15680, "num_attention_heads": 40, "num_key_value_heads": 8,
    "mamba_num_heads": 128, "mamba_head_dim": 80, "max_position_embeddings": 131072,
}  # fmt: skip
_NEMOTRON_NANO_3 = _NEMOTRON_H | {
    "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME", "num_hidden_layers": 52,
    "hidden_size": 2688, "intermediate_size": 1856, "num_attention_heads": 32, "num_key_value_heads": 2,
    "mamba_num_heads": 64, "mamba_head_dim": 64, "n_routed_experts": 128, "num_experts_per_tok": 6,
    "moe_intermediate_size": 1856, "moe_shared_expert_intermediate_size": 3712, "n_shared_experts": 1, "n_group": 1,
    "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 2.5, "max_position_embeddings": 262144,
}  # fmt: skip
_FALCON_H1 = {
    "architectures": ["FalconH1ForCausalLM"], "model_type": "falcon_h1", "vocab_size": 130049, "hidden_size": 3072,
    "intermediate_size": 12288, "num_hidden_layers": 44, "num_attention_heads": 12, "num_key_value_heads": 2, "head_dim": 128,
    "mamba_d_ssm": 3072, "mamba_n_heads": 24, "mamba_d_head": 128, "mamba_d_state": 256, "mamba_n_groups": 1,
    "mamba_d_conv": 4, "mamba_rms_norm": False, "max_position_embeddings": 262144, "rms_norm_eps": 1e-5,
    "rope_theta": 100000000000.0, "tie_word_embeddings": False,
}  # fmt: skip
_FLAN_T5 = {
    "architectures": ["T5ForConditionalGeneration"], "model_type": "t5", "vocab_size": 32128, "d_kv": 64,
    "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False, "is_encoder_decoder": True,
}  # fmt: skip
_BART = {
    "architectures": ["BartForConditionalGeneration"], "model_type": "bart", "vocab_size": 50264, "is_encoder_decoder": True,
}  # fmt: skip
_WHISPER = {
    "architectures": ["WhisperForConditionalGeneration"], "model_type": "whisper", "vocab_size": 51866, "num_mel_bins": 128,
    "d_model": 1280, "encoder_layers": 32, "decoder_layers": 32, "encoder_attention_heads": 20,
    "decoder_attention_heads": 20, "encoder_ffn_dim": 5120, "decoder_ffn_dim": 5120, "is_encoder_decoder": True,
}  # fmt: skip


CONFIGS: dict[str, dict[str, Any]] = {
    "meta-llama/Llama-3.1-8B": _sized(_LLAMA, 4096, 14336, 32, 32),
    "meta-llama/Llama-3.1-70B": _sized(_LLAMA, 8192, 28672, 80, 64),
    "meta-llama/Llama-3.2-1B": _sized(_LLAMA_SMALL | {"head_dim": 64}, 2048, 8192, 16, 32),
    "meta-llama/Llama-3.2-3B": _sized(_LLAMA_SMALL | {"head_dim": 128}, 3072, 8192, 28, 24),
    "Qwen/Qwen3-8B": _sized(_QWEN, 4096, 12288, 36, 32),
    "Qwen/Qwen3-32B": _sized(_QWEN, 5120, 25600, 64, 64),
    "Qwen/Qwen3-235B-A22B": _sized(_QWEN_MOE, 4096, 12288, 94, 64),
    "Qwen/Qwen3-Next-80B-A3B-Instruct": _sized(_QWEN_NEXT, 2048, 5120, 48, 16),
    "Qwen/Qwen3.5-27B": _sized(_QWEN3_5, 5120, 17408, 64, 24),
    "Qwen/Qwen1.5-MoE-A2.7B": _sized(_QWEN2_MOE, 2048, 5632, 24, 16),
    "mistralai/Mixtral-8x7B-v0.1": _sized(_MIXTRAL, 4096, 14336, 32, 32),
    "allenai/OLMoE-1B-7B-0924": _sized(_OLMOE, 2048, 1024, 16, 16),
    "ibm-granite/granite-3.1-3b-a800m-instruct": _sized(_GRANITE_MOE, 1536, 512, 32, 24),
    "rednote-hilab/dots.llm1.inst": _sized(_DOTS1, 4096, 10944, 62, 32),
    "MiniMaxAI/MiniMax-M2": _sized(_MINIMAX_M2, 3072, 1536, 62, 48),
    "XiaomiMiMo/MiMo-V2-Flash": _sized(_MIMO_V2, 4096, 16384, 48, 64),
    "deepseek-ai/DeepSeek-V2-Lite": _sized(_DEEPSEEK_V2_LITE, 2048, 10944, 27, 16),
    "deepseek-ai/DeepSeek-V2": _sized(_DEEPSEEK_V2_WHOLE, 5120, 12288, 60, 128),
    "deepseek-ai/DeepSeek-V3": _sized(_DEEPSEEK_V3, 7168, 18432, 61, 128),
    "deepseek-ai/DeepSeek-R1": _sized(_DEEPSEEK_V3, 7168, 18432, 61, 128),
    "moonshotai/Kimi-K2-Instruct": _sized(_KIMI_K2, 7168, 18432, 61, 64),
    "zai-org/GLM-4.7-Flash": _sized(_GLM_4_LITE, 2048, 10240, 47, 20),
    "baidu/ERNIE-4.5-0.3B-PT": _sized(_ERNIE, 1024, 3072, 18, 16),
    "baidu/ERNIE-4.5-21B-A3B-PT": _sized(_ERNIE_MOE, 2560, 12288, 28, 20),
    "microsoft/Phi-3.5-MoE-instruct": _sized(_PHIMOE, 4096, 6400, 32, 32),
    "Qwen/Qwen2.5-VL-7B-Instruct": _sized(_QWEN_VL, 3584, 18944, 28, 28),
    "mistralai/Mistral-Small-3.1-24B-Instruct-2503": _sized(_MISTRAL, 5120, 32768, 40, 32),
    "LGAI-EXAONE/EXAONE-4.0-32B": _sized(_EXAONE, 5120, 27392, 64, 40),
    "tencent/Hunyuan-7B-Instruct": _sized(_HUNYUAN, 4096, 14336, 32, 32),
    "swiss-ai/Apertus-8B-2509": _sized(_APERTUS, 4096, 21504, 32, 32),
    "mistralai/Ministral-3-8B-Instruct-2512": _MINISTRAL,
    "meta-llama/Llama-4-Scout-17B-16E-Instruct": _LLAMA_4,
    "internlm/internlm3-8b-instruct": _sized(_INTERNLM, 4096, 10240, 48, 32),
    "zai-org/GLM-4-9B-0414": _sized(_GLM, 4096, 13696, 40, 32),
    "CohereForAI/c4ai-command-r-v01": _sized(_COHERE, 8192, 22528, 40, 64),
    "CohereForAI/c4ai-command-r7b-12-2024": _sized(_COHERE_2, 4096, 14336, 32, 32),
    "google/gemma-7b": _sized(_GEMMA | {"num_key_value_heads": 16}, 3072, 24576, 28, 16),
    "google/gemma-2-27b-it": _sized(_GEMMA2, 4608, 36864, 46, 32),
    "google/gemma-3-27b-it": _sized(_GEMMA3, 5376, 21504, 62, 32),
    "google/gemma-3n-E2B-it": _gemma3n(8192, 30, 10),
    "google/gemma-3n-E4B-it": _gemma3n(16384, 35, 15),
    "openai/gpt-oss-20b": _GPT_OSS | {"num_hidden_layers": 24, "num_local_experts": 32},
    "openai/gpt-oss-120b": _GPT_OSS | {"num_hidden_layers": 36, "num_local_experts": 128},
    "EleutherAI/pythia-6.9b": _sized(_PYTHIA, 4096, 16384, 32, 32),
    "microsoft/phi-2": _sized(_PHI, 2560, 10240, 32, 32),
    "openai-community/gpt2-xl": _GPT2 | {"n_embd": 1600, "n_layer": 48, "n_head": 25},
    "bigcode/starcoder2-7b": _sized(_STARCODER2, 4608, 18432, 32, 36),
    "stabilityai/stablelm-2-12b": _sized(_STABLELM, 5120, 13824, 40, 32),
    "facebook/opt-6.7b": _OPT
    | {
        "hidden_size": 4096,
        "ffn_dim": 16384,
        "word_embed_proj_dim": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
    },
    "facebook/opt-350m": _OPT
    | {
        "hidden_size": 1024,
        "ffn_dim": 4096,
        "word_embed_proj_dim": 512,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "do_layer_norm_before": False,
    },
    "nvidia/Nemotron-Mini-4B-Instruct": _sized(_NEMOTRON, 3072, 9216, 32, 24),
    "jhu-clsp/ettin-decoder-1b": _sized(_ETTIN, 1792, 3840, 28, 28),
    "LiquidAI/LFM2-1.2B": _sized(_LFM2 | {"full_attn_idxs": [2, 5, 8, 10, 12, 14]}, 2048, 12288, 16, 32),
    "LiquidAI/LFM2-8B-A1B": _sized(_LFM2_MOE, 2048, 7168, 24, 32),
    "inclusionAI/LLaDA-MoE-7B-A1B-Instruct": _LLADA_MOE,
    "inclusionAI/LLaDA2.0-mini": _LLADA2,
    "inclusionAI/Ling-mini-2.0": _LING_2,
    "state-spaces/mamba-2.8b-hf": _MAMBA,
    "tiiuae/falcon-mamba-7b": _FALCON_MAMBA,
    "mistralai/Mamba-Codestral-7B-v0.1": _CODESTRAL_MAMBA,
    "ai21labs/Jamba-v0.1": _JAMBA,
    "ibm-ai-platform/Bamba-9B-v1": _BAMBA,
    "ibm-granite/granite-4.0-h-small": _GRANITE_4_SMALL,
    "ibm-granite/granite-4.0-h-tiny": _GRANITE_4_TINY,
    "nvidia/NVIDIA-Nemotron-Nano-9B-v2": _NEMOTRON_NANO_2,
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": _NEMOTRON_NANO_3,
    "tiiuae/Falcon-H1-7B-Instruct": _FALCON_H1,
    "google/flan-t5-xl": _FLAN_T5 | {"d_model": 2048, "d_ff": 5120, "num_layers": 24, "num_heads": 32},
    "facebook/bart-large-cnn": _BART,
    "openai/whisper-large-v3": _WHISPER,
}
"""Configs by hub name. Instruction-tuned versions have the same."""
