"""Configs of families: what is read, refused and written, against transformers' own config classes."""

import copy
import dataclasses
import json
import re

import jax
import numpy as np
import pytest
from support import tiny_families
from support.conformance import but_slow
from support.family_fields import ALPHA, FAMILIES, GROWS, LONG, MORE, NEEDED, SIZES, YARN

from specjax import models
from specjax.lm import Block, Wants
from specjax.models import ModelError, hf_config, masked
from specjax.models.families import table
from specjax.models.published_configs import CONFIGS
from specjax.models.ropes import QueryScale

CLASSES = {name: tiny_families.FAMILIES[name][0] for name in FAMILIES if name in table.FAMILIES}
"""The transformers classes of families, by `model_type`."""


@pytest.mark.parametrize("kind", CLASSES)
def test_a_config_says_what_transformers_makes_of_it(kind):
    """Fields that a file leaves out, and what we write."""
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{CLASSES[kind]}Config")
    read = set()
    least = SIZES | NEEDED.get(kind, {})
    for given in (least, least | MORE.get(kind, {})):
        theirs = json.loads(config.from_dict(copy.deepcopy(given)).to_json_string(use_diff=False))
        ours = hf_config.from_hf({"model_type": kind} | given)
        assert ours == hf_config.from_hf(theirs | {"architectures": None, "model_type": kind})
        written = hf_config.to_hf(ours)
        again = json.loads(config.from_dict(copy.deepcopy(written)).to_json_string(use_diff=False))
        assert (
            hf_config.from_hf(written) == ours == hf_config.from_hf(again | {"architectures": written["architectures"]})
        )
        assert written["model_type"] == kind
        read.add(ours)
    assert len(read) == 1 + (kind in MORE)


def test_ministral_is_the_text_of_a_mistral_3_that_says_so():
    """What describes no rope has its usual one, whatever `rope_theta` is; queries may stay as they are."""
    text = {"model_type": "ministral3"} | SIZES
    outer = {"architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3"}
    plain = hf_config.from_hf(text)
    assert hf_config.from_hf(outer | {"text_config": text | {"rope_theta": 5.0}}) == plain
    assert (plain.rope.theta, plain.near.query_scale.beta, plain.near.query_scale.period) == (1e6, 0.1, 16384)
    still = hf_config.from_hf(text | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e5}})
    assert still.near.query_scale is None and hf_config.from_hf(hf_config.to_hf(still)) == still
    assert hf_config.to_hf(still)["model_type"] == "ministral3"


def test_layers_of_llama_4():
    """Its `layer_types` may give chunks to layers without positions; old files have a number for true."""
    read = lambda **more: hf_config.from_hf({"model_type": "llama4_text"} | SIZES | more)
    layers = lambda config: [(one.rope is not None, one.window, one.chunked) for one in config.attentions]
    assert layers(read()) == ([(True, 8192, True)] * 3 + [(False, None, False)]) * 2
    assert layers(read(attention_chunk_size=None)) == ([(True, None, False)] * 3 + [(False, None, False)]) * 2
    mixed = read(layer_types=["full_attention", "chunked_attention"] * 4, attention_chunk_size=7)
    assert layers(mixed)[2:4] == [(True, None, False), (False, 7, True)]
    assert hf_config.from_hf(hf_config.to_hf(mixed)) == mixed
    scales = lambda **more: {one.query_scale for one in read(**more).attentions if one.rope is None}
    assert scales() == scales(attn_temperature_tuning=4) == {QueryScale(0.1, 8192, first=1)}
    assert scales(attn_temperature_tuning=False) == scales(attn_temperature_tuning=0) == {None}
    window = read(no_rope_layers=[1] * 8).every(models.AttentionConfig, chunked=False)
    with pytest.raises(ModelError, match="no supported architecture has"):
        hf_config.to_hf(window)
    both_ways = Block(np.zeros((1, 2), int), np.zeros((1, 2), int), np.zeros(1, int), causal=False)
    lm = models.LlamaLM(mixed)
    with pytest.raises(ValueError, match="chunks of a text read it from left to right"):
        jax.eval_shape(lambda params: lm(params, both_ways, None, wants=Wants(logits=True)), lm.abstract())


def test_positions_of_exaone():
    """Without a window all layers have them; where the file has one, those that have it."""
    read = lambda **more: hf_config.from_hf({"model_type": "exaone4", "num_key_value_heads": 8} | SIZES | more)
    turns = lambda config: [one.rope is not None for one in config.attentions]
    assert turns(read(sliding_window=None)) == [True] * 8
    assert turns(read()) == [True, True, True, False] * 2
    none = read(layer_types=["full_attention"] * 8)
    assert turns(none) == [False] * 8
    assert hf_config.from_hf(hf_config.to_hf(none)) == none


def test_old_names_of_phi_3s_rope():
    """Which transformers 5 takes for longrope, where it has the fields that it asks of that."""
    read = lambda kind: hf_config.from_hf({"model_type": "phi3", "rope_scaling": LONG | {"type": kind}} | SIZES)
    assert read("su") == read("yarn") == read("longrope") != hf_config.from_hf({"model_type": "phi3"} | SIZES)


def test_granite_4_of_attention_layers_is_granite_3():
    """Where it has positions; their tensors differ in names alone."""
    parts = {"num_local_experts": 0, "layer_types": ["full_attention"] * 8, "shared_intermediate_size": 24}
    read = lambda **more: hf_config.from_hf({"model_type": "granitemoehybrid"} | SIZES | parts | more)
    assert read().near.rope is None and hf_config.to_hf(read())["model_type"] == "granitemoehybrid"
    turned = read(position_embedding_type="rope", attention_multiplier=0.1)
    assert (turned.rope.share, turned.dense.intermediate_size, turned.near.scale) == (1, 24, 0.1)
    assert hf_config.to_hf(turned)["model_type"] == "granitemoehybrid"
    assert hf_config.to_hf(dataclasses.replace(turned, family=""))["model_type"] == "granite"


def test_a_model_is_written_as_the_family_that_was_read():
    """Of a model that is also a Llama; one that its family cannot say is written as the first that can."""
    for kind in ("mistral", "smollm3", "llama"):
        more = {"no_rope_layers": [1] * 8} if kind == "smollm3" else {"sliding_window": None}
        config = hf_config.from_hf({"model_type": kind, "num_key_value_heads": 8} | SIZES | more)
        assert hf_config.to_hf(config)["model_type"] == kind
        biased = config.every(models.AttentionConfig, qkv_bias=True)
        assert hf_config.to_hf(biased)["model_type"] == "qwen2"
    seed = hf_config.from_hf({"model_type": "seed_oss"} | SIZES)  # whose biases are Qwen 2's
    assert hf_config.to_hf(seed)["model_type"] == "seed_oss"
    assert hf_config.to_hf(dataclasses.replace(seed, family=""))["model_type"] == "qwen2"


@pytest.mark.parametrize(
    ("kind", "change", "said"),
    (
        ("mixtral", {"num_local_experts": 0}, "positive integers for: num_experts"),
        ("mixtral", {"num_experts_per_tok": 9}, "num_experts_per_tok 9 is above 8"),
        ("glm4_moe", {"first_k_dense_replace": 8}, "first_k_dense_replace 8 leaves no layer with experts"),
        ("glm4_moe", {"n_shared_experts": None}, "whole numbers for: n_shared_experts"),
        ("glm4_moe", {"n_group": 3}, "128 experts do not form 3 groups"),
        ("glm4_moe", {"partial_rotary_factor": 1.5}, "partial_rotary_factor must be a share of a head, not 1.5"),
        ("mimo_v2_flash", {"hybrid_layer_pattern": [0, 1]}, "hybrid_layer_pattern must have 0 or 1 for each layer"),
        ("mimo_v2_flash", {"mlp_layer_types": ["moe"] * 8}, "mlp_layer_types must have dense or sparse for each layer"),
        (
            "mimo_v2_flash",
            {"hybrid_layer_pattern": [0] * 8, "layer_types": ["full_attention"] * 7 + ["sliding_attention"]},
            "hybrid_layer_pattern and layer_types describe different layers",
        ),
        ("mimo_v2_flash", {"sliding_window_size": -1}, "sliding_window_size must be a number of tokens, not -1"),
        ("mimo_v2_flash", {"num_key_value_heads": 8}, "sliding_attention layers need .* not 8, 16, 192, 128"),
        ("mimo_v2_flash", {"v_head_dim": 0}, "full_attention layers need .* a v_head_dim, .* not 8, 4, 192, 0"),
        ("mimo_v2_flash", {"rope_parameters": {"rope_theta": 1e4}}, "must have a rope for full_attention and sliding_"),
        ("mimo_v2_flash", {"n_group": 0}, "positive integers for: n_group"),
        ("mimo_v2_flash", {"scoring_func": "softmax"}, "scoring_func 'softmax' is not supported"),
        ("minimax_m2", {"rotary_dim": 130}, "rotary_dim must be a number of channels of a head, not 130"),
        ("minimax_m2", {"attn_type_list": [1, 0]}, r"attn_type_list \[1, 0\] has layers other than attention"),
        ("ernie4_5_moe", {"moe_layer_start_index": 9}, "leave no layer with experts"),
        ("ernie4_5_moe", {"moe_layer_interval": 0}, "moe_layer_interval 0 must be numbers of layers"),
        ("phimoe", {"num_experts_per_tok": 3}, "num_experts_per_tok 3 is not supported; PhimoeForCausalLM has 2"),
        ("phimoe", {"rope_scaling": LONG}, "short_mscale must be a positive number, not None"),
        ("bailing_moe", {"norm_head": True}, "norm_head True is not supported; BailingMoeV2ForCausalLM has False"),
        ("bailing_moe", {"rotary_dim": 8}, "rotary_dim 8 is not supported; BailingMoeV2ForCausalLM has 4"),
        ("olmo3", {"sliding_window": None}, "layer_types has sliding_attention, but the sliding window is off"),
        ("olmo3", {"rope_scaling": {"rope_type": "dynamic"}}, "rope type 'dynamic'"),
        ("smollm3", {"no_rope_layers": [1, 0]}, r"no_rope_layers must have 0 or 1 for each layer, not \[1, 0\]"),
        ("smollm3", {"no_rope_layer_interval": 0}, "no_rope_layer_interval must be a number of layers, not 0"),
        ("llama4_text", {"attention_chunk_size": 0}, "attention_chunk_size must be a positive integer, not 0"),
        ("llama4_text", {"floor_scale": 0}, "floor_scale must be a positive integer, not 0"),
        ("llama4_text", {"no_rope_layers": [1, 0]}, r"no_rope_layers must have 0 or 1 for each layer, not \[1, 0\]"),
        ("llama4_text", {"moe_layers": [-1]}, r"moe_layers must be numbers of layers, not \[-1\]"),
        ("llama4_text", {"interleave_moe_layer_step": 0}, "positive integers for: interleave_moe_layer_step"),
        (
            "llama4_text",
            {"layer_types": ["sliding_attention"] * 8},
            "use full_attention or chunked_attention for each layer",
        ),
        ("granite", {"residual_multiplier": 0}, "residual_multiplier must be a positive number, not 0"),
        ("granitemoehybrid", {"mamba_n_groups": 3}, "128 heads of state spaces do not split into 3 groups"),
        (
            "granitemoehybrid",
            {"layers_block_type": ["attention"] * 7 + ["conv"]},
            "layer_types must name one of mamba, linear_attention, attention, full_attention for each of 8 layers",
        ),
        ("granitemoehybrid", {"mamba_d_head": 5}, "128 heads of state spaces of width 5 do not make up 128 channels"),
        ("bamba", {"mamba_n_heads": 4, "mamba_n_groups": 3}, "4 heads of state spaces do not split into 3 groups"),
        ("bamba", {"attn_layer_indices": [9]}, r"attn_layer_indices must be numbers of layers, not \[9\]"),
        ("bamba", {"mamba_expand": "2"}, "mamba_expand must be a positive number, not '2'"),
        ("mamba", {"state_size": 0}, "positive integers for: mamba_d_state"),
        (
            "mamba2",
            NEEDED["mamba2"] | {"time_step_limit": [1, 0]},
            r"time_step_limit must be two numbers in order, not \[1, 0\]",
        ),
        ("jamba", {"attn_layer_offset": 8}, "attn_layer_offset must be a number below attn_layer_period, not 8 of 8"),
        ("falcon_h1", {"ssm_multipliers": [1, 1]}, r"ssm_multipliers must be 5 positive numbers, not \[1, 1\]"),
        ("nemotron_h", {"hybrid_override_pattern": "MX"}, r"made of M, \*, - and E, not 'MX'"),
        ("nemotron_h", {"attention_bias": True}, "attention_bias True is not supported"),
        ("nemotron_h", {"mlp_bias": True}, "mlp_bias true is not supported in a Nemotron-H with experts"),
        ("nemotron_h", {"moe_latent_size": 0}, "moe_latent_size must be a positive integer or null, not 0"),
        (
            "phi3",
            {"rope_scaling": LONG | {"short_factor": [1.0] * 3}},
            "needs 4 positive numbers for short_factor, not",
        ),
        ("phi3", {"rope_scaling": LONG | {"long_factor": None}}, "needs 4 positive numbers for long_factor, not None"),
        ("phi3", {"rope_scaling": {"type": "dynamic"}}, "rope type 'dynamic'"),
        ("llama", {"rope_scaling": LONG}, "rope type 'longrope'; supported are default"),
        ("cohere", {"logit_scale": 0}, "logit_scale must be a positive number, not 0"),
        ("cohere2", {"sliding_window_pattern": 0}, "sliding_window_pattern must be a number of layers, not 0"),
        ("arcee", {"hidden_act": "silu"}, "hidden_act 'silu' is not supported; ArceeForCausalLM has 'relu2'"),
        (
            "exaone4",
            {"num_key_value_heads": 8, "sliding_window_pattern": "LLLG"},
            "sliding_window_pattern must be a number of",
        ),
        ("hunyuan_v1_dense", {"rope_scaling": ALPHA | {"alpha": -1}}, "alpha must be a positive number, not -1"),
        (
            "ministral3",
            {"rope_scaling": GROWS | {"original_max_position_embeddings": 0}},
            "embeddings must be a positive integer",
        ),
        (
            "ministral3",
            {"rope_scaling": GROWS | {"llama_4_scaling_beta": -1}},
            "scaling_beta must be a positive number, not -1",
        ),
        ("opt", {"word_embed_proj_dim": 0}, "word_embed_proj_dim must be a positive integer or null, not 0"),
        (
            "modernbert-decoder",
            {"local_attention": 1},
            "local_attention must be null or a number of tokens above 1, not 1",
        ),
        ("modernbert-decoder", {"classifier_activation": "tanh"}, "classifier_activation 'tanh' is not supported"),
        ("lfm2", {"full_attn_idxs": [8]}, r"full_attn_idxs must be numbers of layers, not \[8\]"),
        ("lfm2", {"layer_types": ["mamba"] * 8}, "layer_types has unknown kinds: mamba; use full_attention or conv"),
        ("lfm2", {"conv_L_cache": 0}, "positive integers for: conv_L_cache"),
        ("lfm2", {"block_multiple_of": 0}, "block_multiple_of 0 a positive integer"),
        (
            "minimax",
            {"layer_types": ["conv"] * 8},
            "layer_types has unknown kinds: conv; use full_attention or linear_att",
        ),
        ("minimax", {"mlp_beta_factor": 0}, "mlp_beta_factor must be a positive number, not 0"),
        ("lfm2_moe", {}, "layer_types must have conv or full_attention for each layer, not None"),
        ("lfm2_moe", {"num_dense_layers": 8}, "num_dense_layers 8 leaves no layer with experts"),
        ("lfm2_moe", {"use_expert_bias": False}, "use_expert_bias False is not supported"),
        ("opt", {"layer_norm_elementwise_affine": False}, "layer_norm_elementwise_affine False is not supported"),
        ("gpt_neox", {"hidden_act": "quick_gelu"}, "hidden_act 'quick_gelu' is not supported; supported are silu, "),
        ("gpt2", {"add_cross_attention": True}, "add_cross_attention True is not supported"),
        ("deepseek_v3", {"rope_interleave": False}, "rope_interleave False is not supported"),
        ("deepseek_v3", {"kv_lora_rank": None}, "needs positive integers for: kv_lora_rank"),
        ("deepseek_v3", {"qk_rope_head_dim": 5}, "qk_rope_head_dim must be even, not 5"),
        (
            "deepseek_v2",
            {"topk_method": "noaux_tc"},
            "topk_method must be greedy or group_limited_greedy, not 'noaux_tc'",
        ),
        (
            "glm4_moe_lite",
            {"mlp_layer_types": ["sparse", "dense"] * 4},
            "dense for the first layers and sparse for the",
        ),
        ("deepseek_v32", {}, "sparse attention .DSA.: an index chooses the tokens that a query sees"),
        ("glm4_moe", {"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported; Glm4MoeForCausalLM has 'silu'"),
    ),
)
def test_what_cannot_be_served_is_named(kind, change, said):
    with pytest.raises(ModelError, match=said):
        hf_config.from_hf({"model_type": kind} | SIZES | change)


SWITCHES = {
    "attn_output_gate": (True, False), "clip_qkv": (8.0, None), "is_causal": (False, True),
    "use_parallel_residual": (True, False), "logit_scale": (0.0625, 1.0),
    "attn_logit_softcapping": (20.0, None), "attention_multiplier": (0.5, None),
    "kv_lora_rank": (512, None), "layer_types": (["linear_attention"] * 8, None), "rope_interleave": (True, False),
    "decoder_sparse_step": (2, 1), "mlp_only_layers": ([0], []), "logits_scaling": (16.0, 1.0), "scale_emb": (12, 1),
}  # fmt: skip
"""Of fields a value that changes what a model computes, and one that does not."""
OWN = {
    "granitemoe": {"attention_multiplier", "logits_scaling"},
    "olmoe": {"clip_qkv"},
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "glm4_moe_lite"), {"kv_lora_rank", "rope_interleave"}),
    **dict.fromkeys(("cohere", "cohere2"), {"logit_scale", "logits_scaling"}),
    "gemma2": {"attn_logit_softcapping"}, "granite": {"attention_multiplier", "logits_scaling"},
    "granitemoehybrid": {"attention_multiplier", "logits_scaling", "layer_types"}, "nemotron_h": {"layer_types"},
    "gpt_neox": {"use_parallel_residual"}, "stablelm": {"use_parallel_residual"}, "minimax": {"layer_types"},
    **dict.fromkeys(("qwen2_moe", "qwen3_moe"), {"decoder_sparse_step", "mlp_only_layers"}),
    "kimi_linear": {"layer_types", "kv_lora_rank"}, "t5": {"logits_scaling"},
    "qwen3_next": {"attn_output_gate", "layer_types", "decoder_sparse_step", "mlp_only_layers"},
    **dict.fromkeys(("qwen3_5_text", "qwen3_5_moe_text"), {"attn_output_gate", "layer_types"}),
    "minicpm": {"scale_emb", "kv_lora_rank"},
}  # fmt: skip


@pytest.mark.parametrize("kind", table.FAMILIES)
def test_a_field_that_its_family_does_not_have_must_be_off(kind):
    config = {"model_type": kind, "num_key_value_heads": 8} | SIZES | NEEDED.get(kind, {})
    plain = hf_config.from_hf(config)
    others = {name: values for name, values in SWITCHES.items() if name not in OWN.get(kind, ())}
    for name, (on, off) in others.items():
        with pytest.raises(ModelError, match=name):
            hf_config.from_hf(config | {name: on})
        off = config.get(name, off)
        assert (
            hf_config.from_hf(config | {name: off}) == hf_config.from_hf({"text_config": {name: off}} | config) == plain
        )
    if kind not in ("glm4_moe", "bailing_moe", "cohere", "llama4_text"):  # whose norms the field is for
        near = plain.attention_sizes
        normed = bool(near.qk_norm or near.qk_wide_norm)
        assert hf_config.from_hf(config | {"use_qk_norm": normed}) == plain
        with pytest.raises(ModelError, match=f"use_qk_norm {not normed} is not supported; .* has {normed}"):
            hf_config.from_hf(config | {"use_qk_norm": not normed})


def test_what_a_field_says_may_be_so_in_any_case():
    """A scale that is the usual one, windows that there are, and a diffusion model that sees both ways."""
    config = {"model_type": "llama"} | SIZES
    same = {
        "attention_multiplier": 8**-0.5,
        "query_pre_attn_scalar": 8,
        "layer_types": ["full_attention"] * 8,
        "rotary_dim": 8,
    }
    assert hf_config.from_hf(config | same) == hf_config.from_hf(config)
    windowed = {"model_type": "mistral", "sliding_window": 5, "num_key_value_heads": 8}
    hf_config.from_hf(config | windowed | {"layer_types": ["sliding_attention"] * 8})
    with pytest.raises(ModelError, match="layer_types .* is not supported"):
        hf_config.from_hf(config | {"sliding_window": 5, "layer_types": ["sliding_attention"] * 8})
    both_ways = {"model_type": "a2d-llama", "is_causal": False, "mask_token_id": 3}
    assert masked.from_hf(config | both_ways)[0] == hf_config.from_hf(config)
    with pytest.raises(ModelError, match="llama_4_scaling_beta 0.1 is not supported"):
        hf_config.from_hf(config | {"rope_scaling": YARN | {"llama_4_scaling_beta": 0.1}})


WHOLE = {
    "mistral": ({"architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3"}, "mistral", {}),
    "qwen2": (
        {"architectures": ["Qwen2_5_VLForConditionalGeneration"], "model_type": "qwen2_5_vl"},
        "qwen2_5_vl_text",
        {"rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}},
    ),
    "qwen3": (
        {"model_type": "qwen3_vl"},
        "qwen3_vl_text",
        {"rope_scaling": {"rope_type": "default", "mrope_section": [2, 1, 1]}},
    ),
}


@pytest.mark.parametrize("kind", WHOLE)
def test_the_text_of_a_model_that_reads_images_is_its_familys(kind):
    """Its fields lie beside the others or apart; transformers ties by the outer switch, and files of older versions by the
    inner one."""
    outer, inner, rope = WHOLE[kind]
    sizes = SIZES | {"num_key_value_heads": 2, "rope_theta": 1e6}
    plain = hf_config.from_hf({"model_type": kind} | sizes)
    tied = hf_config.from_hf({"model_type": kind, "tie_word_embeddings": True} | sizes)
    text, told = {"model_type": inner} | sizes | rope, lambda tied: {"tie_word_embeddings": tied}
    assert plain == hf_config.from_hf(sizes | rope | outer | {"vision_config": {"hidden_size": 8}})
    assert plain == hf_config.from_hf(outer | {"text_config": text}) != tied
    assert plain == hf_config.from_hf(outer | told(False) | {"text_config": text | told(False)})
    for outside, inside in ((True, False), (False, True), (True, True)):
        assert tied == hf_config.from_hf(outer | told(outside) | {"text_config": text | told(inside)})
    assert hf_config.to_hf(plain)["model_type"] == kind


@pytest.mark.parametrize("named", ({"architectures": ["DeepseekV32ForCausalLM"]}, {"model_type": "deepseek_v32"}))
def test_an_architecture_that_is_not_read_has_its_reason(named):
    with pytest.raises(
        ModelError, match=r"(?i)deepseek.*v32.*\(sparse attention \(DSA\): .* sees\); supported are Llama"
    ):
        hf_config.from_hf(named | SIZES)
    with pytest.raises(ModelError, match=r"unsupported architecture: OwnForCausalLM; supported are LlamaForCausalLM, "):
        hf_config.from_hf({"architectures": ["OwnForCausalLM"]} | SIZES)


REFUSED = (
    (
        "kimi_linear",
        {"linear_attn_config": {"kda_layers": 5, "full_attn_layers": [4, 8]}},
        "must be lists that name each",
    ),
    (
        "kimi_linear",
        {"linear_attn_config": {"kda_layers": ["a", 1], "full_attn_layers": [4]}},
        "must be lists that name each",
    ),
    ("bamba", {"mamba_expand": float("nan")}, "mamba_expand must be a positive number"),
    ("falcon_h1", {"mamba_d_ssm": "x"}, "positive integers for: mamba_d_ssm"),
    ("falcon_h1", {"mamba_use_mlp": False}, "mamba_use_mlp False is not supported"),
    (
        "qwen3_5_text",
        {"layer_types": -1},
        "layer_types must have linear_attention or full_attention for each layer, not -1",
    ),
    ("lfm2", {"layer_types": {}}, "layer_types must have conv or full_attention for each layer"),
    ("lfm2", {"conv_dim": 5}, "conv_dim 5 is not supported; convolutions have the model's width"),
    ("minimax", {"attn_type_list": [0] * 7 + [1], "layer_types": None}, "attn_type_list is of MiniMax's own files"),
    ("minimax", {"postnorm": False}, "postnorm False is not supported"),
    ("granitemoehybrid", {"position_embedding_type": "alibi"}, "position_embedding_type 'alibi' is not supported"),
    ("jamba", {"mamba_inner_layernorms": False}, "mamba_inner_layernorms False is not supported"),
    ("mamba2", {"rms_norm": False}, "rms_norm False is not supported"),
)
"""Families, fields that change a model or are no such fields, and what is said."""


@pytest.mark.parametrize(
    ("name", "fields", "said"), REFUSED, ids=[f"{name}-{next(iter(said))}" for name, said, _ in REFUSED]
)
def test_what_a_family_cannot_serve_is_named(name, fields, said):
    usual = {"model_type": name} | SIZES | NEEDED.get(name, {})
    if name == "kimi_linear":
        fields = {"linear_attn_config": (usual.get("linear_attn_config") or {}) | fields["linear_attn_config"]}
        fields |= {"layer_types": None}
    with pytest.raises(ModelError, match=re.escape(said)):
        hf_config.from_hf(usual | fields)


PUBLISHED = {
    "google/flan-t5-xl": (2.85, CONFIGS["google/flan-t5-xl"]),
    "facebook/bart-large-cnn": (0.406, CONFIGS["facebook/bart-large-cnn"]),
    "openai/whisper-large-v3": (1.54, CONFIGS["openai/whisper-large-v3"]),
    "tencent/Hunyuan-7B-Instruct": (7.5, CONFIGS["tencent/Hunyuan-7B-Instruct"]),
    "swiss-ai/Apertus-8B-2509": (8.05, CONFIGS["swiss-ai/Apertus-8B-2509"]),
    "mistralai/Ministral-3-8B-Instruct-2512": (8.49, CONFIGS["mistralai/Ministral-3-8B-Instruct-2512"]),
    "internlm/internlm3-8b-instruct": (8.8, CONFIGS["internlm/internlm3-8b-instruct"]),
    "zai-org/GLM-4-9B-0414": (9.4, CONFIGS["zai-org/GLM-4-9B-0414"]),
    "CohereForAI/c4ai-command-r-v01": (35.0, CONFIGS["CohereForAI/c4ai-command-r-v01"]),
    "CohereForAI/c4ai-command-r7b-12-2024": (8.03, CONFIGS["CohereForAI/c4ai-command-r7b-12-2024"]),
    "LGAI-EXAONE/EXAONE-4.0-32B": (32.0, CONFIGS["LGAI-EXAONE/EXAONE-4.0-32B"]),
    "mistralai/Mixtral-8x7B-v0.1": (46.7, CONFIGS["mistralai/Mixtral-8x7B-v0.1"]),
    "zai-org/GLM-4.5-Air": (106, {
        "model_type": "glm4_moe", "vocab_size": 151552, "hidden_size": 4096, "intermediate_size": 10944, "head_dim": 128,
        "num_hidden_layers": 46, "num_attention_heads": 96,
    }),
    "allenai/OLMo-2-1124-7B": (7.3, {
        "model_type": "olmo2", "vocab_size": 100352, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
        "num_attention_heads": 32,
    }),
    "HuggingFaceTB/SmolLM3-3B": (3.08, {
        "model_type": "smollm3", "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 11008,
        "num_hidden_layers": 36, "num_attention_heads": 16,
    }),
    "ibm-granite/granite-3.3-8b-instruct": (8.17, {
        "model_type": "granite", "vocab_size": 49159, "hidden_size": 4096, "intermediate_size": 12800, "num_hidden_layers": 40,
        "num_attention_heads": 32, "num_key_value_heads": 8, "tie_word_embeddings": True,
    }),
    "microsoft/Phi-4-mini-instruct": (3.84, {
        "model_type": "phi3", "vocab_size": 200064, "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 32,
        "num_attention_heads": 24, "num_key_value_heads": 8, "partial_rotary_factor": 0.75, "tie_word_embeddings": True,
    }),
    **{name: (billions, CONFIGS[name]) for name, billions in (
        ("EleutherAI/pythia-6.9b", 6.86), ("microsoft/phi-2", 2.78), ("openai-community/gpt2-xl", 1.56),
        ("bigcode/starcoder2-7b", 7.17), ("stabilityai/stablelm-2-12b", 12.1),
        ("facebook/opt-6.7b", 6.66), ("facebook/opt-350m", 0.331), ("nvidia/Nemotron-Mini-4B-Instruct", 4.19),
        ("Qwen/Qwen1.5-MoE-A2.7B", 14.3),
        ("allenai/OLMoE-1B-7B-0924", 6.92),
        ("ibm-granite/granite-3.1-3b-a800m-instruct", 3.3),
        ("rednote-hilab/dots.llm1.inst", 142),
        ("MiniMaxAI/MiniMax-M2", 228.7),
        ("Qwen/Qwen3-Next-80B-A3B-Instruct", 79.67),
        ("Qwen/Qwen3.5-27B", 26.90),
        ("XiaomiMiMo/MiMo-V2-Flash", 309),
        ("baidu/ERNIE-4.5-0.3B-PT", 0.36),
        ("inclusionAI/Ling-mini-2.0", 16.26),
        ("microsoft/Phi-3.5-MoE-instruct", 41.9),
        ("baidu/ERNIE-4.5-21B-A3B-PT", 21.83),
        ("jhu-clsp/ettin-decoder-1b", 1.03),
        ("meta-llama/Llama-4-Scout-17B-16E-Instruct", 109),
        ("LiquidAI/LFM2-1.2B", 1.17),
        ("LiquidAI/LFM2-8B-A1B", 8.3),
        ("state-spaces/mamba-2.8b-hf", 2.77),
        ("tiiuae/falcon-mamba-7b", 7.27),
        ("mistralai/Mamba-Codestral-7B-v0.1", 7.29),
        ("ai21labs/Jamba-v0.1", 51.6),
        ("ibm-ai-platform/Bamba-9B-v1", 9.78),
        ("ibm-granite/granite-4.0-h-small", 32.2),
        ("ibm-granite/granite-4.0-h-tiny", 6.94),
        ("nvidia/NVIDIA-Nemotron-Nano-9B-v2", 8.89),
        ("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", 31.6),
        ("tiiuae/Falcon-H1-7B-Instruct", 7.59),
        ("meta-llama/Llama-3.1-8B", 8.03), ("meta-llama/Llama-3.1-70B", 70.6),
        ("meta-llama/Llama-3.2-1B", 1.24), ("meta-llama/Llama-3.2-3B", 3.21),
        ("Qwen/Qwen3-8B", 8.2), ("Qwen/Qwen3-32B", 32.8), ("Qwen/Qwen3-235B-A22B", 235),
        ("deepseek-ai/DeepSeek-V2-Lite", 15.7), ("deepseek-ai/DeepSeek-V2", 236),
        ("deepseek-ai/DeepSeek-V3", 671), ("deepseek-ai/DeepSeek-R1", 671), ("moonshotai/Kimi-K2-Instruct", 1026),
        ("zai-org/GLM-4.7-Flash", 29.94),
        ("Qwen/Qwen2.5-VL-7B-Instruct", 7.62), ("mistralai/Mistral-Small-3.1-24B-Instruct-2503", 23.6),  # texts alone
        ("google/gemma-7b", 8.54), ("google/gemma-2-27b-it", 27.2), ("google/gemma-3-27b-it", 27.0),
        ("google/gemma-3n-E2B-it", 4.46), ("google/gemma-3n-E4B-it", 6.87),
        ("openai/gpt-oss-20b", 20.9), ("openai/gpt-oss-120b", 117),
        ("inclusionAI/LLaDA-MoE-7B-A1B-Instruct", 7.36), ("inclusionAI/LLaDA2.0-mini", 16.26),
    )},
}  # fmt: skip


@pytest.mark.parametrize("name", but_slow(PUBLISHED, *CONFIGS))
def test_sizes_of_published_models(name, tmp_path):
    """Parameters in billions, as their cards say them."""
    billions, config = PUBLISHED[name]
    (tmp_path / "config.json").write_text(json.dumps(config))
    count = sum(leaf.size for leaf in jax.tree.leaves(models.abstract(tmp_path).params))
    assert abs(count / 1e9 - billions) < 0.02 * billions, count


def test_every_built_in_configuration_has_a_size():
    assert set(CONFIGS) <= set(PUBLISHED)


def test_yarn_reaches_as_far_beside_a_state_space():
    read = lambda kind: hf_config.from_hf(
        {"model_type": kind, "rope_scaling": YARN, "num_key_value_heads": 8, "max_position_embeddings": 512} | SIZES
    )
    assert read("falcon_h1").max_position_embeddings == read("llama").max_position_embeddings == 2048
