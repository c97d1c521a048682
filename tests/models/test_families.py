"""Folders of families: what is read and refused. Logits, texts and what is written are compared beside Llama's."""

import copy
import dataclasses
import functools
import json
import shutil
from typing import Any

import jax
import numpy as np
import pytest
from support import tiny_families
from support.conformance import but_slow

import specjax
from specjax import models
from specjax.draft.head import draft_logits, head_kernel
from specjax.draft.heads.folder import fingerprint, sample
from specjax.draft.trim import trimmed_model
from specjax.lm import Block, Wants
from specjax.models import ModelError, byte_ranges, hf_config, masked, mlp, tensors, weights
from specjax.models.families import base, table
from specjax.models.published_configs import CONFIGS
from specjax.models.ropes import QueryScale

safetensors = pytest.importorskip("safetensors.numpy")
ELSEWHERE = ("llama2", "llama3", "llama_", "mistral", "gemma", "gpt_oss")
"""What the names of those begin with that have files of their own."""
FAMILIES = tuple(
    name for name in tiny_families.FAMILIES if not name.startswith(ELSEWHERE) and name not in ("qwen2", "qwen3")
)
CLASSES = {name: tiny_families.FAMILIES[name][0] for name in FAMILIES if name in table.FAMILIES}


def spoilt(folder, to, change):
    """A copy of a folder whose tensors are changed."""
    copy = shutil.copytree(folder, to)
    arrays = safetensors.load_file(folder / "model.safetensors")
    change(arrays)
    safetensors.save_file(arrays, copy / "model.safetensors")
    return copy


def same(a, b):
    return jax.tree.structure(a) == jax.tree.structure(b) and all(map(np.array_equal, *map(jax.tree.leaves, (a, b))))


@pytest.mark.parametrize("name", but_slow(FAMILIES, *tiny_families.ALIKE))
def test_every_tensor_counts(references, tmp_path, name):
    """Those that are missing are named, each kind of them once, and so is one that is over; each reaches a parameter."""
    folder = references(name).folder
    kinds = {name.replace(".1.", ".2.").replace(".0.", ".2."): name for name in sorted(tensors.read_folder(folder))}
    for at, tensor in enumerate(kinds.values()):
        copy = spoilt(folder, tmp_path / str(at), lambda own, tensor=tensor: own.pop(tensor))
        with pytest.raises(ModelError, match=f"missing {tensor} "):
            models.load(copy)
    more = {"model.layers.1.self_attn.sinks": np.zeros(4, np.float32)}
    copy = spoilt(folder, tmp_path / "more", lambda own: own.update(more))
    with pytest.raises(ModelError, match=r"unused model.layers.1.self_attn.sinks \[4\]"):
        models.load(copy)


def test_ling_2_is_glm_in_other_tensors(references, tmp_path):
    """transformers has no Ling 2, but a GLM-4.5 of the same layers: GLM's tensors, joined and renamed, are the same model."""
    glm = references("glm4_moe").folder
    config, arrays = json.loads((glm / "config.json").read_text()), safetensors.load_file(glm / "model.safetensors")
    renamed = {
        "model.embed_tokens": "model.word_embeddings", "self_attn.o_proj": "attention.dense",
        "self_attn.q_norm": "attention.query_layernorm", "self_attn.k_norm": "attention.key_layernorm",
        "gate.e_score_correction_bias": "gate.expert_bias",
    }  # fmt: skip
    made = {}
    for name, array in arrays.items():
        for old, new in renamed.items():
            name = name.replace(old, new)
        if "self_attn.q_proj" in name:
            parts = [arrays[name.replace("q_proj", f"{part}_proj")] for part in "qkv"]
            made[name.replace("self_attn.q_proj", "attention.query_key_value")] = np.concatenate(parts)
        elif "self_attn" not in name:
            made[name] = array
    kept = {name: config[name] for name in (*SIZES, "head_dim", "num_key_value_heads", "moe_intermediate_size")}
    kept |= {name: config[name] for name in ("n_group", "topk_group", "num_experts_per_tok", "routed_scaling_factor")}
    own = {
        "architectures": ["BailingMoeV2ForCausalLM"], "model_type": "bailing_moe", "num_experts": config["n_routed_experts"],
        "num_shared_experts": config["n_shared_experts"], "use_qkv_bias": True, "rms_norm_eps": config["rms_norm_eps"],
        "max_position_embeddings": config["max_position_embeddings"], "norm_topk_prob": True, "rotary_dim": 6,
    }  # fmt: skip
    (tmp_path / "ling").mkdir()
    (tmp_path / "ling" / "config.json").write_text(json.dumps(kept | own))
    safetensors.save_file(made, tmp_path / "ling" / "model.safetensors")
    ling, wanted = (models.load(folder, dtype="float32") for folder in (tmp_path / "ling", glm))
    assert ling.lm == wanted.lm and same(ling.params, wanted.params)
    models.save(tmp_path / "again", ling.lm, ling.params)
    assert set(tensors.read_folder(tmp_path / "again")) == set(made)
    again = models.load(tmp_path / "again", dtype="float32")
    assert again.lm == ling.lm and again.lm.config.family == "bailing_moe" and same(again.params, ling.params)


def test_layers_that_draft_are_left_to_drafters(references, tmp_path):
    """GLM-4.5's file counts them; those of another number are no part of the model."""
    folder = references("glm4_moe").folder
    config = json.loads((folder / "config.json").read_text())
    plain = models.load(folder, dtype="float32")
    drafting = {"model.layers.3.eh_proj.weight": np.ones((2, 4), np.float32)}
    for count, layer in ((1, 3), (2, 4)):
        named = {name.replace(".3.", f".{layer}."): x for name, x in drafting.items()}
        copy = spoilt(folder, tmp_path / str(count), lambda own, named=named: own.update(named))
        (copy / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": count}))
        assert same(models.load(copy, dtype="float32").params, plain.params)
        (copy / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": count - 1}))
        with pytest.raises(ModelError, match=f"unused model.layers.{layer}.eh_proj.weight"):
            models.load(copy)


SIZES = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 8, "num_attention_heads": 8,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
LONG = {"type": "longrope", "short_factor": [1.0, 1.5, 2.0, 3.0], "long_factor": [2.0, 3.0, 5.0, 9.0]}


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
GROWS = {"rope_type": "default", "llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 512}
ALPHA = {"type": "dynamic", "alpha": 1000.0, "factor": 1.0, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0}
MORE: dict[str, dict[str, Any]] = {
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
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "num_key_value_heads": 8},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": {"num_experts": 4, "num_key_value_heads": 8},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "granitemoehybrid": {"layer_types": ["attention"] * 8, "num_local_experts": 0},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "exaone4": {"num_key_value_heads": 4},
    "stablelm": {"num_key_value_heads": 8},
    "gemma4_text": {"hidden_size_per_layer_input": 0},
}
"""What a file of theirs must say."""


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


def test_xielu_by_hand():
    act = mlp.XIELU(np.float32)
    act.alpha_p[...], act.alpha_n[...] = np.float32([0.3]), np.float32([-0.2])
    got = act(np.float32([-2, -0.5, 0.5, 2]))
    np.testing.assert_allclose(got, [0.246756, -0.133015, 0.463589, 4.417421], atol=2e-6)


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
        ("granitemoehybrid", {}, "layer_types has mamba layers; .* state space layers .Mamba. are not supported"),
        (
            "granitemoehybrid",
            {"layers_block_type": ["attention"] * 7 + ["linear_attention"]},
            "layer_types has linear_attention layers; GraniteMoeHybridForCausalLM is read if all 8 are attention",
        ),
        ("granitemoehybrid", {"layer_types": ["attention"] * 8}, "num_local_experts 8 is not supported"),
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
        (
            "opt",
            {"word_embed_proj_dim": 32},
            "word_embed_proj_dim 32 is not supported; OPTForCausalLM is read .* width, 64",
        ),
        (
            "modernbert-decoder",
            {"local_attention": 1},
            "local_attention must be null or a number of tokens above 1, not 1",
        ),
        ("modernbert-decoder", {"classifier_activation": "tanh"}, "classifier_activation 'tanh' is not supported"),
        ("opt", {"do_layer_norm_before": False}, "do_layer_norm_before False is not supported"),
        ("gpt_neox", {"hidden_act": "quick_gelu"}, "hidden_act 'quick_gelu' is not supported; supported are silu, "),
        ("gpt2", {"add_cross_attention": True}, "add_cross_attention True is not supported"),
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
    **dict.fromkeys(("cohere", "cohere2"), {"logit_scale", "logits_scaling"}),
    "gemma2": {"attn_logit_softcapping"}, "granite": {"attention_multiplier", "logits_scaling"},
    "granitemoehybrid": {"attention_multiplier", "logits_scaling"}, "gpt_neox": {"use_parallel_residual"},
    "stablelm": {"use_parallel_residual"},
    **dict.fromkeys(("qwen2_moe", "qwen3_moe"), {"decoder_sparse_step", "mlp_only_layers"}),
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
        normed = bool(plain.near.qk_norm or plain.near.qk_wide_norm)
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


@pytest.mark.parametrize("named", ({"architectures": ["Qwen3NextForCausalLM"]}, {"model_type": "qwen3_next"}))
def test_an_architecture_that_is_not_read_has_its_reason(named):
    with pytest.raises(
        ModelError, match=r"(?i)qwen3_?next.*\(layers of linear attention: .* running state\); supported are Llama"
    ):
        hf_config.from_hf(named | SIZES)
    with pytest.raises(ModelError, match=r"unsupported architecture: OwnForCausalLM; supported are LlamaForCausalLM, "):
        hf_config.from_hf({"architectures": ["OwnForCausalLM"]} | SIZES)


def test_a_heads_bias_is_no_part_of_its_kernel(references):
    """Heads begin with the kernel, and a draft that is the target's own head has the bias too."""
    model = models.load(references("phi").folder, dtype="float32")
    head = model.params["head"]
    assert np.abs(head["bias"]).max() > 0.3
    ids = np.array([3, 40, 100])
    np.testing.assert_allclose(head_kernel(model.lm, model.params, ids), head["kernel"][:, ids], rtol=1e-6)
    features = np.random.default_rng(0).normal(size=(1, 2, 64)).astype(np.float32)
    logits = draft_logits(model.lm, {"target": model.params, "draft": {}}, features)
    np.testing.assert_allclose(logits, features @ head["kernel"] + head["bias"][None, None], atol=1e-4)
    small, params = trimmed_model(model.lm, model.params, ids)
    np.testing.assert_allclose(small.unembed(params, features), logits[..., ids], atol=1e-4)


def test_a_layer_norm_is_known_by_its_weights(references):
    """A head's folder says for which target it is, by some of the numbers that its final norm makes."""
    model = models.load(references("phi").folder, dtype="float32")
    norm = model.params["norm"]
    other = dataclasses.replace(model, params=model.params | {"norm": norm | {"scale": 1 + norm["scale"]}})
    assert fingerprint(model) != fingerprint(other) and sample(model) != sample(other)


@pytest.mark.parametrize("name", ("gpt_neox", "gpt2", "opt"))
def test_old_files_of_a_family(references, tmp_path, name):
    """Some hold masks of attention, and those of GPT-2 and OPT lack a prefix."""
    masked = {"gpt_neox": "gpt_neox.layers.0.attention", "gpt2": "transformer.h.0.attn"}.get(name)

    def change(arrays):
        masks = () if masked is None else ("bias", "masked_bias")
        arrays |= {f"{masked}.{mask}": np.ones((1, 1, 4, 4), np.float32) for mask in masks}
        for tensor in list(arrays):
            arrays[tensor.removeprefix("transformer.").removeprefix("model.")] = arrays.pop(tensor)

    folder = references(name).folder
    old = models.load(spoilt(folder, tmp_path / "old", change), dtype="float32")
    assert same(old.params, models.load(folder, dtype="float32").params)


@functools.partial(jax.jit, static_argnums=0)
def forward(lm, params, block, cache):
    """Logits, and the cache with the block in it."""
    found = lm(params, block, cache, wants=Wants(logits=True))
    return found.logits, lm.commit(cache, found.delta, None, block.length)


def in_chunks(model, ids, count, chunk):
    """The logits of a text's first `count` tokens, through a cache, `chunk` tokens per pass."""
    lm, cache, out = model.lm, model.lm.init_cache(1, 32), []
    for at in range(0, count, chunk):
        tokens = ids[:, at : min(at + chunk, count)]
        block = Block(tokens, at + np.arange(tokens.shape[1])[None], np.full(1, at, np.int32))
        logits, cache = forward(lm, model.params, block, cache)
        out.append(logits)
    return np.concatenate(out, axis=1)


@pytest.mark.slow
def test_a_long_rope_is_one_for_all_of_a_text(tmp_path):
    """Chosen when a model is loaded. transformers chooses by the longest text of a pass, so that its cache may mix both."""
    import torch
    import transformers

    torch.manual_seed(0)
    rope = {
        "rope_type": "longrope",
        "rope_theta": 100.0,
        "short_factor": [1.0, 1.2, 1.5],
        "long_factor": [2.0, 3.0, 7.0],
    }
    config = transformers.Phi3Config(
        **SIZES | {"num_hidden_layers": 2}, initializer_range=0.3, max_position_embeddings=64,
        original_max_position_embeddings=16, partial_rotary_factor=0.75, rope_parameters=rope,
    )  # fmt: skip
    reference = transformers.Phi3ForCausalLM(config).eval()
    reference.save_pretrained(tmp_path / "plain")
    ids = np.random.default_rng(0).integers(3, 64, (1, 30))

    def theirs(model, count):
        with torch.no_grad():
            return model(torch.as_tensor(ids[:, :count])).logits.numpy()

    long, short = (models.load(tmp_path / "plain", dtype="float32", longest=most) for most in (None, 16))
    assert short.max_length == 16 and long.max_length == 64
    for model, count in ((long, 30), (short, 16)):
        for chunk in (count, count // 2):
            np.testing.assert_allclose(in_chunks(model, ids, count, chunk), theirs(reference, count), atol=1e-4)
    assert np.abs(in_chunks(long, ids, 16, 16) - theirs(reference, 16)).max() > 0.1  # short in transformers
    models.save(tmp_path / "short", short.lm, short.params)
    assert models.load(tmp_path / "short", dtype="float32").lm == short.lm
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "short", dtype="float32").eval()
    np.testing.assert_allclose(theirs(again, 16), theirs(reference, 16), atol=1e-4)
    for wrong in (65, 0, "16"):
        with pytest.raises(ModelError, match="longest must be a number of positions .* up to 64"):
            models.load(tmp_path / "plain", longest=wrong)


def test_a_dynamic_rope_has_the_base_of_its_longest_text():
    """As transformers computes it for a text of that length; up to the positions that it was made for it is plain."""
    rope = models.RopeConfig(10000.0, models.RopeScaling("dynamic", 2.0))
    np.testing.assert_allclose(rope.fixed(8, 16, 40).theta, 10000 * 4 ** (8 / 6))
    assert rope.fixed(8, 16, 16) == rope.fixed(8, 16, 3) == models.RopeConfig(10000.0)


@pytest.mark.slow
def test_texts_beyond_a_dynamic_rope_are_for_those_who_ask(tmp_path):
    """transformers stretches it anew as a text grows, and leaves cached keys as they were: one pass is the reference."""
    import torch
    import transformers

    torch.manual_seed(0)
    rope = {"rope_type": "dynamic", "factor": 2.5, "rope_theta": 100.0}
    config = transformers.InternLM3Config(
        **SIZES | {"num_hidden_layers": 2}, initializer_range=0.3, max_position_embeddings=16, head_dim=12,
        rope_parameters=rope,
    )  # fmt: skip
    reference = transformers.AutoModelForCausalLM.from_config(config).eval()
    reference.save_pretrained(tmp_path / "made")
    ids = np.random.default_rng(0).integers(3, 64, (1, 30))

    def theirs(model, count):
        with torch.no_grad():
            return model(torch.as_tensor(ids[:, :count])).logits.numpy()

    made, asked = (models.load(tmp_path / "made", dtype="float32", longest=most) for most in (None, 30))
    assert (made.max_length, asked.max_length) == (16, 30)
    for model, count in ((made, 16), (asked, 30)):
        for chunk in (count, count // 2):
            np.testing.assert_allclose(in_chunks(model, ids, count, chunk), theirs(reference, count), atol=1e-4)
    assert np.abs(in_chunks(made, ids, 30, 30) - theirs(reference, 30)).max() > 0.1
    with pytest.raises(ValueError, match="has 30 tokens, .* capacity is 16 positions"):
        specjax.Engine(made, drafter="none").request(ids[0].tolist())
    models.save(tmp_path / "long", asked.lm, asked.params)
    assert models.load(tmp_path / "long", dtype="float32").lm == asked.lm
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "long", dtype="float32").eval()
    np.testing.assert_allclose(theirs(again, 30), theirs(reference, 30), atol=1e-4)


@pytest.mark.parametrize("share", (1.0, 0.5))
def test_pairs_of_neighbours_are_halves_in_memory(tmp_path, share):
    """As files of GLM-4 and ERNIE 4.5 have them; a channel that is not turned stays where it is."""
    family = dataclasses.replace(table.QWEN2, interleaved=True)
    config = models.llama_config(8, 16, 4, 2, 4, 2, 8, rope_theta=10.0).every(models.RopeConfig, share=share)
    config = config.every(models.AttentionConfig, qkv_bias=True)
    config = base.mixers(config, lambda i: {} if i else {"rope": None})
    lm = models.LlamaLM(config)
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda leaf: rng.normal(size=leaf.shape).astype(np.float32), lm.abstract())
    own = params["layers"][1]["attention"]
    own["k"]["bias"] = np.arange(16, dtype=np.float32)
    weights.write(tmp_path / "model.safetensors", params, None, family.names_of(config), family.layout)
    stored = safetensors.load_file(tmp_path / "model.safetensors")
    head = {1.0: [0, 4, 1, 5, 2, 6, 3, 7], 0.5: [0, 2, 1, 3, 4, 5, 6, 7]}[share]  # of ours, by the file's rows
    order = np.concatenate([np.add(head, first) for first in range(0, 32, 8)])
    layer = {i: {name: stored[f"model.layers.{i}.self_attn.{name}_proj.weight"].T for name in "qkv"} for i in (0, 1)}
    for i, name in ((0, "q"), (0, "k"), (1, "v")):
        np.testing.assert_array_equal(layer[i][name], params["layers"][i]["attention"][name]["kernel"])
    np.testing.assert_array_equal(layer[1]["q"], own["q"]["kernel"][:, order])
    np.testing.assert_array_equal(layer[1]["k"], own["k"]["kernel"][:, order[:16]])
    np.testing.assert_array_equal(stored["model.layers.1.self_attn.k_proj.bias"], order[:16])
    sources = weights.match(tensors.read_folder(tmp_path), lm.abstract(), False, family.names_of(config), family.layout)
    assert same(byte_ranges.read(sources, np.float32), params)
    part, box = np.empty((5, 7), np.float32), ((3, 8), (6, 13))  # no whole head
    sources["layers"][1]["attention"]["q"]["kernel"].fill([(box, part)])
    np.testing.assert_array_equal(part, own["q"]["kernel"][3:8, 6:13])


PUBLISHED = {
    "tencent/Hunyuan-7B-Instruct": (7.5, CONFIGS["tencent/Hunyuan-7B-Instruct"]),
    "swiss-ai/Apertus-8B-2509": (8.05, CONFIGS["swiss-ai/Apertus-8B-2509"]),
    "mistralai/Ministral-3-8B-Instruct-2512": (8.49, CONFIGS["mistralai/Ministral-3-8B-Instruct-2512"]),
    "internlm/internlm3-8b-instruct": (8.8, CONFIGS["internlm/internlm3-8b-instruct"]),
    "zai-org/GLM-4-9B-0414": (9.4, CONFIGS["zai-org/GLM-4-9B-0414"]),
    "CohereForAI/c4ai-command-r-v01": (35.0, CONFIGS["CohereForAI/c4ai-command-r-v01"]),
    "CohereForAI/c4ai-command-r7b-12-2024": (8.03, CONFIGS["CohereForAI/c4ai-command-r7b-12-2024"]),
    "LGAI-EXAONE/EXAONE-4.0-32B": (32.0, CONFIGS["LGAI-EXAONE/EXAONE-4.0-32B"]),
    "mistralai/Mixtral-8x7B-v0.1": (46.7, {
        "model_type": "mixtral", "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": 32, "num_attention_heads": 32,
    }),
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
        ("facebook/opt-6.7b", 6.66), ("nvidia/Nemotron-Mini-4B-Instruct", 4.19),
        ("Qwen/Qwen1.5-MoE-A2.7B", 14.3),
        ("allenai/OLMoE-1B-7B-0924", 6.92),
        ("ibm-granite/granite-3.1-3b-a800m-instruct", 3.3),
        ("rednote-hilab/dots.llm1.inst", 142),
        ("MiniMaxAI/MiniMax-M2", 228.7),
        ("baidu/ERNIE-4.5-0.3B-PT", 0.36),
        ("inclusionAI/Ling-mini-2.0", 16.26),
        ("microsoft/Phi-3.5-MoE-instruct", 41.9),
        ("baidu/ERNIE-4.5-21B-A3B-PT", 21.83),
        ("jhu-clsp/ettin-decoder-1b", 1.03),
        ("meta-llama/Llama-4-Scout-17B-16E-Instruct", 109),
    )},
}  # fmt: skip


@pytest.mark.parametrize("name", but_slow(PUBLISHED, *CONFIGS))
def test_sizes_of_published_models(name, tmp_path):
    """Parameters in billions, as their cards say them."""
    billions, config = PUBLISHED[name]
    (tmp_path / "config.json").write_text(json.dumps(config))
    count = sum(leaf.size for leaf in jax.tree.leaves(models.abstract(tmp_path).params))
    assert abs(count / 1e9 - billions) < 0.02 * billions, count
