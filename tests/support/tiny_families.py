"""Tiny models of every family, as the configs of transformers that they are made from. A line per family."""

import dataclasses
import random
from typing import Any

from support.tiny_sizes import (
    DEEPSEEK_V2,
    DEEPSEEK_V3,
    DOTS1,
    ERNIE_MOE,
    EXPERTS,
    FALCON_H1,
    FULL,
    GEMMA,
    GEMMA3_ROPES,
    GEMMA3N,
    GEMMA4,
    GLM,
    GPT_OSS,
    GRANITE,
    GRANITE4,
    GRANITE4_H,
    INPUTS,
    JAMBA,
    KIMI_LINEAR,
    LATENT,
    LFM2,
    LFM2_MOE,
    LLAMA3_ROPE,
    LLAMA4,
    MAMBA2,
    MIMO_V2,
    MINIMAX_01,
    MINIMAX_M2,
    NEMOTRON_H,
    OLMO3,
    OLMOE,
    PHI3,
    PHIMOE,
    QUERIES,
    QWEN2_MOE,
    QWEN3_NEXT,
    QWEN_SEES,
    SEES,
    SHARING,
    SIZES,
    SLIDING,
)

WHOLE: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral3": (
        "Mistral3",
        {
            "text_config": SIZES
            | {"model_type": "mistral", "num_key_value_heads": 2, "head_dim": 24, "sliding_window": 7},
            "vision_config": SEES
            | {"model_type": "pixtral", "num_attention_heads": 2, "head_dim": 16, "image_size": 28},
            "tie_word_embeddings": True,  # of which the text's part says the opposite
        },
    ),
    "llama4": (
        "Llama4",
        {
            "text_config": SIZES | LLAMA4,
            "vision_config": SEES
            | {
                "num_attention_heads": 2,
                "image_size": 28,
                "intermediate_size": 128,
                "vision_output_dim": 32,
                "projector_input_dim": 32,
                "projector_output_dim": 32,
            },
        },
    ),
    "qwen2_5_vl": (
        "Qwen2_5_VL",
        {
            "text_config": SIZES
            | {
                "num_key_value_heads": 2,
                "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]},
                "rope_theta": 500.0,
            },
            "vision_config": QWEN_SEES | {"fullatt_block_indexes": [0]},
        },
    ),
    "qwen3_vl": (
        "Qwen3VL",
        {
            "text_config": SIZES
            | {
                "num_key_value_heads": 2,
                "head_dim": 24,
                "rope_parameters": {"rope_type": "default", "mrope_section": [4, 4, 4], "rope_theta": 500.0},
            },
            "vision_config": QWEN_SEES | {"num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
            "tie_word_embeddings": True,
        },
    ),
    "qwen3_5": (
        "Qwen3_5",
        {
            "text_config": SIZES
            | QWEN3_NEXT
            | {
                "rope_parameters": QWEN3_NEXT["rope_parameters"]
                | {"mrope_section": [1, 1, 1], "mrope_interleaved": True}
            },
            "vision_config": QWEN_SEES | {"num_position_embeddings": 16},
        },
    ),
}
"""Models that also read images, with all that their configs say; the text's part is of one of the families."""
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
    "llama4_text": ("Llama4Text", LLAMA4),
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
    "qwen2_moe": ("Qwen2Moe", QWEN2_MOE),
    "qwen3": ("Qwen3", {"num_key_value_heads": 1, "head_dim": 32, "attention_bias": True}),
    "mixtral": (
        "Mixtral",
        {"num_key_value_heads": 2, "sliding_window": 8, "num_local_experts": 5, "num_experts_per_tok": 2},
    ),
    "glm4_moe": ("Glm4Moe", GLM),
    "deepseek_v2": ("DeepseekV2", DEEPSEEK_V2),
    "deepseek_v2_lite": (
        "DeepseekV2",
        LATENT | {"q_lora_rank": None, "topk_method": "greedy", "norm_topk_prob": None},
    ),
    "deepseek_v3": ("DeepseekV3", DEEPSEEK_V3),
    "glm4_moe_lite": ("Glm4MoeLite", LATENT | {"mlp_layer_types": ["dense", "sparse", "sparse"]}),
    "dots1": ("Dots1", DOTS1),
    "minimax_m2": ("MiniMaxM2", MINIMAX_M2),
    "mimo_v2_flash": ("MiMoV2Flash", MIMO_V2),
    "ernie4_5": ("Ernie4_5", {"num_key_value_heads": 2, "head_dim": 24, "use_bias": True, "pad_token_id": None}),
    "ernie4_5_moe": ("Ernie4_5_Moe", ERNIE_MOE),
    "olmoe": ("Olmoe", OLMOE),
    "olmo2": ("Olmo2", {"num_key_value_heads": 2, "attention_bias": True}),
    "olmo3": ("Olmo3", OLMO3),
    "smollm3": (
        "SmolLM3",
        {"num_key_value_heads": 2, "num_hidden_layers": 3, "no_rope_layers": [1, 0, 1], "pad_token_id": None},
    ),
    "granite": ("Granite", GRANITE | {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "granitemoe": (
        "GraniteMoe",
        GRANITE | {"intermediate_size": 20, "num_local_experts": 5, "num_experts_per_tok": 3, "attention_bias": True},
    ),
    "granite4": ("GraniteMoeHybrid", GRANITE | GRANITE4),
    "granite4_h": ("GraniteMoeHybrid", GRANITE | MAMBA2 | GRANITE4_H),
    "mamba": ("Mamba", {"state_size": 6, "time_step_rank": 5, "use_bias": True, "residual_in_fp32": False}),
    "falcon_mamba": ("FalconMamba", {"state_size": 6, "time_step_rank": 5, "tie_word_embeddings": False}),
    "mamba2": ("Mamba2", {"num_heads": 8, "head_dim": 16, "n_groups": 2, "state_size": 12, "use_bias": True}),
    "jamba": ("Jamba", JAMBA),
    "bamba": (
        "Bamba",
        MAMBA2 | {"num_hidden_layers": 3, "num_key_value_heads": 2, "attn_layer_indices": [1], "pad_token_id": None},
    ),
    "falcon_h1": ("FalconH1", MAMBA2 | FALCON_H1),
    "nemotron_h": ("NemotronH", NEMOTRON_H),
    "phi3": ("Phi3", PHI3),
    "phimoe": ("Phimoe", PHIMOE),
    "seed_oss": ("SeedOss", {"num_key_value_heads": 2, "head_dim": 24, "mlp_bias": True}),
    "apertus": (
        "Apertus",
        {
            "num_key_value_heads": 2,
            "attention_bias": True,
            "pad_token_id": None,
            "rope_parameters": LLAMA3_ROPE,
        },
    ),
    "arcee": ("Arcee", {"num_key_value_heads": 2, "head_dim": 12, "attention_bias": True, "mlp_bias": True}),
    "cohere": (
        "Cohere",
        {
            "num_key_value_heads": 2,
            "attention_bias": True,
            "logit_scale": 0.5,
            "use_qk_norm": True,
            "pad_token_id": None,
        },
    ),
    "cohere2": (
        "Cohere2",
        {
            "num_hidden_layers": 3,
            "num_key_value_heads": 2,
            "sliding_window": 7,
            "layer_types": [SLIDING, FULL, SLIDING],
            "logit_scale": 0.5,
            "tie_word_embeddings": False,
            "pad_token_id": None,
        },
    ),
    "exaone4": (
        "Exaone4",
        {
            "num_hidden_layers": 3,
            "num_key_value_heads": 2,
            "head_dim": 24,
            "sliding_window": 7,
            "layer_types": [SLIDING, FULL, SLIDING],
            "rope_parameters": LLAMA3_ROPE,
            "tie_word_embeddings": True,
        },
    ),
    "glm": (
        "Glm",
        {
            "num_key_value_heads": 2,
            "head_dim": 24,
            "partial_rotary_factor": 0.25,
            "attention_bias": False,
            "tie_word_embeddings": True,
            "pad_token_id": None,
        },
    ),
    "glm4": ("Glm4", {"num_key_value_heads": 2, "head_dim": 20, "pad_token_id": None}),
    "hunyuan_v1_dense": (
        "HunYuanDenseV1",
        {
            "num_key_value_heads": 2,
            "head_dim": 24,
            "attention_bias": True,
            "pad_token_id": None,
            "rope_parameters": {"rope_type": "dynamic", "alpha": 50.0, "factor": 1.0, "rope_theta": 100.0},
        },
    ),
    "internlm3": (
        "InternLM3",
        {
            "num_key_value_heads": 2,
            "head_dim": 24,
            "qkv_bias": True,
            "bias": True,
            "pad_token_id": None,
            "rope_parameters": {"rope_type": "dynamic", "factor": 6.0, "rope_theta": 500.0},
        },
    ),
    "ministral3": (
        "Ministral3",
        {
            "num_key_value_heads": 2,
            "head_dim": 24,
            "sliding_window": 8,
            "pad_token_id": None,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 500.0,
                "factor": 8.0,
                "original_max_position_embeddings": 5,  # small, so that queries grow within a short text
                "mscale": 0.7,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.6,
            },
        },
    ),
    "gemma": ("Gemma", {"num_key_value_heads": 1, "head_dim": 24, "attention_bias": True, "pad_token_id": None}),
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
    "opt_350m": (
        "OPT",
        {"ffn_dim": 96, "init_std": 0.15, "pad_token_id": 0, "do_layer_norm_before": False, "word_embed_proj_dim": 24},
    ),
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
    "qwen3_next": ("Qwen3Next", QWEN3_NEXT | SHARING | {"mlp_only_layers": [1], "norm_topk_prob": False}),
    "qwen3_5_text": ("Qwen3_5Text", QWEN3_NEXT | {"tie_word_embeddings": True}),
    "qwen3_5_moe_text": ("Qwen3_5MoeText", QWEN3_NEXT | SHARING),
    "kimi_linear": ("KimiLinear", KIMI_LINEAR),
    "gemma2": ("Gemma2", GEMMA | QUERIES | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}),
    "gemma3": (
        "Gemma3Text",
        GEMMA | QUERIES | {"layer_types": [SLIDING, FULL, SLIDING], "rope_parameters": GEMMA3_ROPES},
    ),
    "gemma3n_text": ("Gemma3nText", GEMMA | GEMMA3N),
    "gemma4": ("Gemma4Text", GEMMA | GEMMA4 | {"attention_k_eq_v": True, "num_global_key_value_heads": 1}),
    "gemma4_moe": ("Gemma4Text", GEMMA | GEMMA4 | EXPERTS),
    "gemma4_small": ("Gemma4Text", GEMMA | GEMMA4 | INPUTS),
    "gpt_oss": ("GptOss", GPT_OSS),
    "minimax": ("MiniMax", MINIMAX_01),
    "lfm2": ("Lfm2", LFM2 | {"conv_bias": True, "conv_L_cache": 4, "block_multiple_of": 24}),
    "lfm2_moe": ("Lfm2Moe", LFM2 | LFM2_MOE),
}
"""By name the classes' name in transformers, and what its config says beside `SIZES`."""
COMPUTED = ("slope_rate", "query_decay", "key_decay", "diagonal_decay")
"""Tensors that transformers writes and that follow from sizes; they are neither read nor written."""
HYBRIDS = ("lfm2", "lfm2_moe", "minimax")
"""Families whose layers keep a running state."""
ALIKE = (
    "llama2", "llama_biases", "mistral", "qwen2", "granitemoe", "granite4", "olmo3", "seed_oss", "dots1", "ernie4_5", "gemma3",
    "gemma4", "smollm3", "exaone4", "opt_350m", "glm4_moe", "minimax_m2", "qwen3_5_text", "qwen3_5_moe_text",
    "deepseek_v2_lite", "glm4_moe_lite",
)  # fmt: skip
"""Families of parts that others have too: their logits and folders are compared in the slow set."""

_ODD: dict[str, tuple[Any, ...]] = {
    "head_dim": (12, 20, 28),
    "v_head_dim": (6, 16, 36),
    "kv_lora_rank": (6, 18, 32),
    "qk_nope_head_dim": (6, 8),
    "q_lora_rank": (7, 24),
    "attention_value_scale": (0.3, 1.0),
    "num_key_value_heads": (1, 2, 4),
    "rms_norm_eps": (1e-6, 1e-2),
    "sliding_window": (3, 5),
    "attention_chunk_size": (3, 4),
    "eos_token_id": ([2, 7], 5),
    "altup_num_inputs": (1, 2, 4),
    "laurel_rank": (3, 16),
    "activation_sparsity_pattern": ([0.8, 0.0, 0.95], [0.0, 0.6, 0.4]),
} | dict.fromkeys(
    (
        "tie_word_embeddings", "attention_bias", "attention_out_bias", "mlp_bias", "qkv_bias", "use_bias", "use_qk_norm",
        "norm_topk_prob", "lm_head_bias", "attn_temperature_tuning",
    ),
    (False, True),
)  # fmt: skip
"""Fields that many families have, and values that are not the usual ones."""
OLDER = (
    "gpt_neox",
    "phi",
    "gpt2",
    "starcoder2",
    "stablelm",
    "stablelm_parallel",
    "opt",
    "opt_350m",
    "nemotron",
    "modernbert-decoder",
)
"""Families with layer norms, whose files choose among many forms."""
_ACTS = ("gelu", "gelu_new", "relu", "silu", "gelu_pytorch_tanh", "relu2", "gelu_fast")
_TURNED = {"rope_type": "default", "rope_theta": 300.0}
_ODD_OLDER: dict[str, tuple[Any, ...]] = {
    "num_attention_heads": (4, 8),
    "rope_parameters": (_TURNED | {"partial_rotary_factor": 0.5}, _TURNED | {"rope_type": "linear", "factor": 2.0}),
    "local_attention": (8, 11, 40),
    "word_embed_proj_dim": (24, 64, 80),
    "classifier_activation": ("gelu", "relu"),
    **dict.fromkeys(("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps"), (1e-5, 1e-3, 0.1)),
    **dict.fromkeys(("hidden_act", "activation_function", "hidden_activation"), _ACTS),
    **dict.fromkeys(
        (
            "use_parallel_residual", "qk_layernorm", "scale_attn_weights", "scale_attn_by_inverse_layer_idx", "use_qkv_bias",
            "enable_bias", "norm_bias", "decoder_bias", "classifier_bias", "do_layer_norm_before", "_remove_final_layer_norm",
        ),
        (False, True),
    ),
}  # fmt: skip


_NOT_DRAWN = {"mamba2": {"head_dim"}, "nemotron_h": {"attention_bias", "mlp_bias"}}
"""Fields of another meaning, or of which transformers ignores some values."""


def odd(name: str, seed: int) -> dict[str, Any]:
    """Fields of a family's config drawn by seed: those that it has, and that its line does not leave out by None."""
    import transformers

    kind, options = FAMILIES[name]
    config = getattr(transformers, f"{kind}Config")
    usual = {field.name: field.default for field in dataclasses.fields(config)} | options
    values_of = _ODD | (_ODD_OLDER if name in OLDER else {})
    drawn = {field for field in values_of if usual.get(field) is not None or field in ("head_dim", "eos_token_id")} & {
        *usual
    }
    if SLIDING in (usual.get("rope_parameters") or {}):  # a rope for each kind of layer
        drawn -= {"rope_parameters"}
    if "kv_lora_rank" in usual:  # all heads share one vector; files say otherwise
        drawn -= {"head_dim", "num_key_value_heads"}
    drawn -= _NOT_DRAWN.get(name, set())
    rng = random.Random(f"{name} {seed}")
    found = {field: rng.choice(values) for field, values in values_of.items() if field in drawn}
    if "qkv_bias" in found and "bias" in usual:  # transformers has one switch for both (InternLM3)
        found["bias"] = found["qkv_bias"]
    return found


LM = {"GPT2": "GPT2LMHeadModel"}
"""Classes of models that have another name than their config's."""
