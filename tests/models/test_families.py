"""Folders of families: what is read and refused. Logits, texts and what is written are compared beside Llama's."""

import dataclasses
import functools
import json
import shutil

import jax
import numpy as np
import pytest
from support import tiny_families
from support.conformance import but_slow
from support.family_fields import FAMILIES, SIZES

import specjax
from specjax import models
from specjax.draft import Clover2, Kangaroo
from specjax.draft.head import draft_logits, head_kernel
from specjax.draft.heads.folder import fingerprint, sample
from specjax.draft.trim import trimmed_model
from specjax.lm import Block, Wants
from specjax.models import ModelError, byte_ranges, mlp, tensors, weights
from specjax.models.families import base, table

safetensors = pytest.importorskip("safetensors.numpy")


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
    kinds = {kind: name for kind, name in kinds.items() if not name.endswith(tiny_families.COMPUTED)}
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


def test_a_layer_of_kimi_linear_without_experts_has_either_name(references, tmp_path):
    """transformers writes its MLP as if it were experts."""
    folder = references("kimi_linear").folder
    named = lambda own: {name.replace(".0.mlp.", ".0.block_sparse_moe."): x for name, x in own.items()}
    copy = spoilt(folder, tmp_path / "copy", lambda own: (changed := named(own), own.clear(), own.update(changed)))
    assert any(".0.block_sparse_moe.up_proj" in name for name in tensors.read_folder(copy))
    assert same(models.load(copy, dtype="float32").params, models.load(folder, dtype="float32").params)


def test_xielu_by_hand():
    act = mlp.XIELU(np.float32)
    act.alpha_p[...], act.alpha_n[...] = np.float32([0.3]), np.float32([-0.2])
    got = act(np.float32([-2, -0.5, 0.5, 2]))
    np.testing.assert_allclose(got, [0.246756, -0.133015, 0.463589, 4.417421], atol=2e-6)


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


@pytest.mark.slow
@pytest.mark.covers("opt", "kangaroo", "clover2")
@pytest.mark.parametrize("head", (Kangaroo(exit_layer=1), Clover2()))
def test_heads_of_a_target_without_a_final_norm_start_from_its_last_one(references, head):
    model = models.load(references("opt_350m").folder, dtype="float32")
    made = head.bind(model.lm).init_params(jax.random.key(0), model.params)
    assert "norm" not in model.params and same(made["norm"], model.params["layers"][1]["mlp_norm"])


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
