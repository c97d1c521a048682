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

from specjax import models
from specjax.draft.head import draft_logits, head_kernel
from specjax.draft.heads.folder import fingerprint, sample
from specjax.draft.trim import trimmed_model
from specjax.lm import Block, Wants
from specjax.models import ModelError, hf_config, masked, tensors
from specjax.models.families import table
from specjax.models.published_configs import CONFIGS

safetensors = pytest.importorskip("safetensors.numpy")
ELSEWHERE = ("llama", "mistral", "qwen", "gemma", "gpt_oss")
"""What the names of those begin with that have files of their own."""
FAMILIES = tuple(name for name in tiny_families.FAMILIES if not name.startswith(ELSEWHERE))
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


@pytest.mark.parametrize("name", FAMILIES)
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
MORE: dict[str, dict[str, Any]] = {
    "mixtral": {"sliding_window": 5, "rope_theta": 1e5, "num_local_experts": 4},
    "glm4_moe": {
        "partial_rotary_factor": 0.25,
        "n_group": 4,
        "topk_group": 2,
        "first_k_dense_replace": 0,
        "head_dim": 16,
    },
    "olmo2": {"rope_theta": 5e5, "rope_scaling": YARN, "attention_bias": True, "num_key_value_heads": 2},
    "olmo3": {"rope_theta": 2e5, "rope_scaling": YARN, "sliding_window": 9},
    "smollm3": {"no_rope_layer_interval": 3, "use_sliding_window": True, "sliding_window": 7, "mlp_bias": True},
    "granite": {
        "attention_multiplier": 0.1,
        "residual_multiplier": 0.2,
        "embedding_multiplier": 3,
        "logits_scaling": 4,
    },
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


@pytest.mark.parametrize("kind", CLASSES)
def test_a_config_says_what_transformers_makes_of_it(kind):
    """Fields that a file leaves out, and what we write."""
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{CLASSES[kind]}Config")
    read = set()
    sizes = SIZES | NEEDED.get(kind, {})
    for given in (sizes, sizes | MORE.get(kind, {})):
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
        ("olmo3", {"sliding_window": None}, "layer_types has sliding_attention, but the sliding window is off"),
        ("olmo3", {"rope_scaling": {"rope_type": "dynamic"}}, "rope type 'dynamic'"),
        ("smollm3", {"no_rope_layers": [1, 0]}, r"no_rope_layers must have 0 or 1 for each layer, not \[1, 0\]"),
        ("smollm3", {"no_rope_layer_interval": 0}, "no_rope_layer_interval must be a number of layers, not 0"),
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


NEEDED: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "granitemoehybrid": {"layer_types": ["attention"] * 8, "num_local_experts": 0},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "gemma4_text": {"hidden_size_per_layer_input": 0},
    "stablelm": {"num_key_value_heads": 8},
}
SWITCHES = {
    "attn_output_gate": (True, False), "clip_qkv": (8.0, None), "is_causal": (False, True),
    "use_parallel_residual": (True, False), "logit_scale": (0.0625, 1.0),
    "attn_logit_softcapping": (20.0, None), "attention_multiplier": (0.5, None),
    "kv_lora_rank": (512, None), "layer_types": (["linear_attention"] * 8, None), "rope_interleave": (True, False),
    "decoder_sparse_step": (2, 1), "mlp_only_layers": ([0], []), "logits_scaling": (16.0, 1.0), "scale_emb": (12, 1),
}  # fmt: skip
"""Of fields a value that changes what a model computes, and one that does not."""
OWN = {
    "gemma2": {"attn_logit_softcapping"}, "granite": {"attention_multiplier", "logits_scaling"},
    "granitemoehybrid": {"attention_multiplier", "logits_scaling"}, "qwen3_moe": {"decoder_sparse_step", "mlp_only_layers"},
    "gpt_neox": {"use_parallel_residual"}, "stablelm": {"use_parallel_residual"},
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
    if kind != "glm4_moe":  # whose norms the field is for
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

    def ours(model, count, chunk):
        """After a cache, `chunk` tokens per pass."""
        lm, cache, out = model.lm, model.lm.init_cache(1, 32), []
        for at in range(0, count, chunk):
            tokens = ids[:, at : min(at + chunk, count)]
            block = Block(tokens, at + np.arange(tokens.shape[1])[None], np.full(1, at, np.int32))
            logits, cache = forward(lm, model.params, block, cache)
            out.append(logits)
        return np.concatenate(out, axis=1)

    long, short = (models.load(tmp_path / "plain", dtype="float32", longest=most) for most in (None, 16))
    assert short.max_length == 16 and long.max_length == 64
    for model, count in ((long, 30), (short, 16)):
        for chunk in (count, count // 2):
            np.testing.assert_allclose(ours(model, count, chunk), theirs(reference, count), atol=1e-4)
    assert np.abs(ours(long, 16, 16) - theirs(reference, 16)).max() > 0.1  # short in transformers
    models.save(tmp_path / "short", short.lm, short.params)
    assert models.load(tmp_path / "short", dtype="float32").lm == short.lm
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "short", dtype="float32").eval()
    np.testing.assert_allclose(theirs(again, 16), theirs(reference, 16), atol=1e-4)
    for wrong in (65, 0, "16"):
        with pytest.raises(ModelError, match="longest must be a number of positions .* up to 64"):
            models.load(tmp_path / "plain", longest=wrong)


PUBLISHED = {
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
        ("jhu-clsp/ettin-decoder-1b", 1.03),
    )},
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_sizes_of_published_models(name, tmp_path):
    """Parameters in billions, as their cards say them."""
    billions, config = PUBLISHED[name]
    (tmp_path / "config.json").write_text(json.dumps(config))
    count = sum(leaf.size for leaf in jax.tree.leaves(models.abstract(tmp_path).params))
    assert abs(count / 1e9 - billions) < 0.02 * billions, count
