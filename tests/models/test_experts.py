"""Models with experts: Qwen3-MoE, and SDAR-MoE and LLaDA-MoE in its layers, against transformers; and their folders."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from support.shapes import small
from support.small_experts import blocks, decoded, edited, ours, theirs

import specjax
from specjax import models
from specjax.decode import Diffusion
from specjax.models import LlamaLM, Masked, ModelError, masked, tensors
from specjax.models.experts import ExpertsConfig, Router, route
from specjax.models.families import base
from specjax.serve.sampling import Sampling
from specjax.sharding import make_mesh

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

V, MASK, BLOCK = 48, 47, 4
SIZES = {
    "vocab_size": V, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "moe_intermediate_size": 12, "num_experts": 5, "num_experts_per_tok": 2,
    "mlp_only_layers": [1], "max_position_embeddings": 64, "initializer_range": 0.3, "attn_implementation": "eager",
}  # fmt: skip


def made(folder, **changes):
    """A tiny Qwen3-MoE of transformers, saved, whose norms are no ones."""
    torch.manual_seed(0)
    model = transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**SIZES | changes)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.2 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    return model, folder


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    return made(tmp_path_factory.mktemp("qwen") / "qwen", norm_topk_prob=True)


@pytest.fixture(scope="module")
def sdar(qwen, tmp_path_factory):
    """The same weights as the SDAR project writes them: no model of its own but the name, the mask and the blocks."""
    names = {"architectures": ["SDARMoeForCausalLM"], "model_type": "sdar_moe", "num_experts": 5}
    return edited(
        qwen[1], tmp_path_factory.mktemp("sdar") / "sdar", ("num_local_experts",), mask_token_id=MASK, block_size=BLOCK,
        **names,
    )  # fmt: skip


@pytest.fixture(scope="module")
def llada(tmp_path_factory):
    """LLaDA-MoE's fields over weights that Qwen3-MoE computes alike: probabilities among all experts, as they are."""
    model, folder = made(tmp_path_factory.mktemp("moe") / "theirs", norm_topk_prob=False, num_key_value_heads=4)
    fields = {
        "architectures": ["LLaDAMoEModelLM"], "model_type": "lladamoe", "num_experts": 5, "expert_intermediate_size": 12,
        "dense_intermediate_size": 40, "moe_layer_freq": [1, 0, 1], "qk_layernorm": True, "clip_qkv": None,
        "partial_rotary_factor": 1, "routed_scaling_factor": 1, "moe_router_score_function": "softmax",
        "moe_router_enable_expert_bias": False, "shared_expert_intermediate_size": None, "norm_topk_prob": None,
        "mask_token_id": MASK,
    }  # fmt: skip
    drop = ("intermediate_size", "moe_intermediate_size", "mlp_only_layers", "decoder_sparse_step", "head_dim")
    return model, edited(folder, folder.parent / "llada", (*drop, "num_local_experts"), **fields)


IDS = np.random.default_rng(0).integers(0, V, (2, 12))
BLOCKS = blocks(12, BLOCK)


def test_qwen3_moe_is_transformers(qwen, tmp_path):
    reference, folder = qwen
    model = models.load(folder, dtype="float32")
    want = theirs(reference, IDS)
    assert want.std() > 1
    np.testing.assert_allclose(ours(model, IDS, causal=True), want, atol=1e-4)
    models.save(tmp_path / "again", model.lm, model.params)
    assert set(tensors.read_folder(tmp_path / "again")) == set(tensors.read_folder(folder))
    again = models.load(tmp_path / "again", dtype="float32")
    assert again.lm == model.lm and all(
        map(np.array_equal, jax.tree.leaves(again.params), jax.tree.leaves(model.params))
    )
    reread = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "again", dtype=torch.float32).eval()
    np.testing.assert_allclose(theirs(reread, IDS), want, atol=1e-4)


@pytest.mark.slow
def test_qwen3_moe_decodes_token_by_token_as_transformers(qwen):
    reference, folder = qwen
    prompts = [IDS[0, :5].tolist(), IDS[1, :9].tolist()]
    records = specjax.generate(
        models.load(folder, dtype="float32"), prompts, max_new_tokens=8, sampling=Sampling(ignore_eos=True)
    )
    for prompt, record in zip(prompts, records, strict=True):
        text = list(prompt)
        for _ in range(8):
            text.append(int(theirs(reference, np.asarray([text]))[0, -1].argmax()))
        assert record.tokens == text[len(prompt) :]


def test_sdar_moe_is_qwen3_moe_by_blocks(qwen, sdar, tmp_path):
    model = models.load(sdar, dtype="float32")
    assert model.masked == Masked(MASK, shift=False, block=BLOCK)
    want = theirs(qwen[0], IDS, BLOCKS)
    assert np.abs(want - theirs(qwen[0], IDS)).max() > 0.1
    np.testing.assert_allclose(ours(model, IDS, BLOCKS), want, atol=1e-4)
    models.save(tmp_path / "again", model.lm, model.params, diffusion=model.masked)
    config = json.loads((tmp_path / "again" / "config.json").read_text())
    assert (config["architectures"], config["num_experts"]) == (["SDARMoeForCausalLM"], 5)
    assert set(tensors.read_folder(tmp_path / "again")) == set(tensors.read_folder(sdar))
    assert models.load(tmp_path / "again", dtype="float32").lm == model.lm


@pytest.mark.slow
def test_sdar_moe_decodes_as_whole_passes_of_transformers(qwen, sdar):
    """A token per pass, with the block cache, against passes over the whole text without one."""
    prompt, new = IDS[0, :6].tolist(), 6
    (record,) = specjax.generate(
        models.load(sdar, dtype="float32"),
        [prompt],
        max_new_tokens=new,
        sampling=Sampling(ignore_eos=True),
        decode=Diffusion(unmask="fixed"),
    )
    assert record.tokens == decoded(qwen[0], prompt, new, BLOCK, MASK)


def test_llada_moe_sees_everything(llada, tmp_path):
    reference, folder = llada
    model = models.load(folder, dtype="float32")
    assert model.masked == Masked(MASK, shift=False) and base.sparse_layers(model.lm.config) == [True, False, True]
    want = theirs(reference, IDS, np.ones((12, 12), bool))
    np.testing.assert_allclose(ours(model, IDS), want, atol=1e-4)
    models.save(tmp_path / "again", model.lm, model.params, diffusion=model.masked)
    config = json.loads((tmp_path / "again" / "config.json").read_text())
    assert config["architectures"] == ["LLaDAMoEModelLM"] and config["moe_layer_freq"] == [1, 0, 1]
    assert set(tensors.read_folder(tmp_path / "again")) == set(tensors.read_folder(folder))
    again = models.load(tmp_path / "again", dtype="float32")
    assert (again.lm, again.masked) == (model.lm, model.masked)
    assert masked.from_hf({k: v for k, v in config.items() if k != "mask_token_id"} | {"vocab_size": 157184})[
        1
    ] == Masked(156895, shift=False)


def test_a_mesh_that_does_not_divide_experts_splits_them_within(llada):
    folder = llada[1]
    mesh = make_mesh("data=1,model=2", jax.devices()[:2])
    split = models.load(folder, dtype="float32", mesh=mesh)
    up = split.params["layers"][0]["mlp"]["experts"]["up"]["kernel"]
    assert up.shape == (5, 32, 12) and up.addressable_shards[0].data.shape == (5, 32, 6)
    alone = models.load(folder, dtype="float32")
    assert all(map(np.array_equal, jax.tree.leaves(split.params), jax.tree.leaves(alone.params)))
    np.testing.assert_allclose(ours(split, IDS), ours(alone, IDS), atol=1e-4)


def test_the_published_size():
    """LLaDA-MoE-7B-A1B's fields, and the card's count of parameters."""
    shape = models.abstract("inclusionAI/LLaDA-MoE-7B-A1B-Instruct")
    count = sum(int(np.prod(x.shape)) for x in jax.tree.leaves(shape.params))
    assert round(count / 1e9, 2) == 7.36 and shape.masked == Masked(156895, shift=False)


@pytest.mark.parametrize("scoring", ("softmax", "sigmoid", "biased"))
@pytest.mark.parametrize("normed", (False, True))
def test_routing_is_that_of_a_loop(scoring, normed):
    """Groups, a bias that only chooses, and weights that are divided by their sum or not, expert by expert in float64."""
    config = ExpertsConfig(12, 4, 7, scoring, normed, 2.5, n_group=4, topk_group=2)
    given, bias = np.random.default_rng(1).normal(size=(9, 12)), np.random.default_rng(2).normal(size=12)
    weights, chosen = route(jnp.asarray(given, jnp.float32), jnp.asarray(bias, jnp.float32), config)
    for row, own, experts in zip(given, weights, chosen, strict=True):
        scores = np.exp(row) / np.exp(row).sum() if scoring != "sigmoid" else 1 / (1 + np.exp(-row))
        ranked = scores + bias
        worth = [sum(sorted(ranked[3 * g : 3 * g + 3])[-2:]) for g in range(4)]
        best = sorted(range(4), key=lambda g: -worth[g])[:2]
        want = sorted((i for i in range(12) if i // 3 in best), key=lambda i: -ranked[i])[:4]
        assert experts.tolist() == want
        scale = 2.5 / (scores[want].sum() if normed else 1)
        np.testing.assert_allclose(own, scale * scores[want], rtol=1e-5)


def test_the_two_experts_of_sparsemixer():
    """By the rule in float64; weights by hand, with a noise of 0.25: 2 and 1.5 are near 2, and 1 is as far as may be."""
    config = ExpertsConfig(4, 2, 7, "sparsemixer", router_jitter_noise=0.25)
    by_hand = np.array([[2.0, 1.5, -1.0, 1.0], [-1.0, -2.0, -3.0, -1.5]])
    given = np.concatenate([by_hand, np.random.default_rng(3).normal(size=(50, 4))])
    weights, chosen = route(jnp.asarray(given, jnp.float32), None, config)
    assert chosen[:2].tolist() == [[0, 1], [0, 3]]
    first = 1 / (1 + np.exp(-0.5) + np.exp(-1.0)), 1 / (1 + np.exp(-0.5))
    second = 1 / (1 + np.exp(-1.0) + np.exp(-0.5)), 1 / (1 + np.exp(-0.5) + np.exp(-1.5))
    np.testing.assert_allclose(weights[:2], [first, second], rtol=1e-6)
    for row, own, experts in zip(given, weights, chosen, strict=True):
        left = list(range(4))
        for weight, expert in zip(own, experts, strict=True):
            best = max(left, key=lambda i: row[i])
            near = [i for i in left if (row[best] - row[i]) / max(abs(row[i]), row[best]) <= 0.5]
            assert expert == best
            np.testing.assert_allclose(weight, np.exp(row[best]) / np.exp(row[near]).sum(), rtol=1e-5)
            left.remove(best)


def test_a_routers_bias_is_float32_in_any_type():
    config = ExpertsConfig(4, 2, 3, scoring="sigmoid")
    shape = small(V, 8, 8, 1, 2, 2, 4, experts=config)
    router = LlamaLM(shape).abstract(jnp.bfloat16)["layers"][0]["mlp"]["router"]
    assert (router["kernel"].dtype, router["bias"].dtype) == (jnp.bfloat16, jnp.float32)
    weights = Router(config, 8, jnp.bfloat16, nnx.Rngs(0))(jnp.ones((3, 8), jnp.bfloat16))
    assert weights[0].dtype == jnp.float32


@pytest.mark.parametrize(
    ("changes", "said"),
    (
        ({"num_experts": None}, "positive integers for: num_experts"),
        ({"num_experts": 2**30}, "num_experts is 1073741824; up to 100000 are read"),
        ({"num_experts_per_tok": 6}, "num_experts_per_tok 6 is above 5"),
        ({"moe_intermediate_size": 13}, r"gate_proj.weight has shape \[12, 32\], config.json says \[13, 32\]"),
        ({"num_experts": 6}, r"missing model.layers.0.mlp.experts.5.gate_proj.weight"),
        ({"num_experts": 4}, r"unused model.layers.0.mlp.experts.4.down_proj.weight"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step 0 must be a positive integer"),
        ({"mlp_only_layers": [0, 1, 2]}, "leave no layer with experts"),
        ({"norm_topk_prob": 1}, "norm_topk_prob must be true or false, not 1"),
        ({"block_size": 0}, "needs a block_size of at least 1, got 0"),
    ),
)
def test_a_bad_sdar_moe_folder_is_one_clear_error(sdar, tmp_path, changes, said):
    with pytest.raises(ModelError, match=said):
        models.load(edited(sdar, tmp_path / "spoilt", **changes), dtype="float32")


@pytest.mark.parametrize(
    ("changes", "said"),
    (
        ({"clip_qkv": 8.0}, "clip_qkv 8.0 is not supported; LLaDA-MoE has None"),
        ({"shared_expert_intermediate_size": 12}, "shared_expert_intermediate_size 12 is not supported"),
        ({"moe_router_score_function": "sigmoid"}, "LLaDA-MoE has 'softmax'"),
        ({"norm_topk_prob": True}, "norm_topk_prob True is not supported"),
        ({"moe_layer_freq": [1, 1]}, "moe_layer_freq must have a number for each layer"),
        ({"expert_intermediate_size": 0}, "positive integers for: expert_intermediate_size"),
        ({"partial_rotary_factor": 0.5}, "only ropes over whole heads are supported"),
        ({"qk_layernorm": False}, "unused model.layers.0.self_attn.k_norm.weight"),
        ({"mask_token_id": V}, "outside the vocabulary of 48"),
    ),
)
def test_a_bad_llada_moe_folder_is_one_clear_error(llada, tmp_path, changes, said):
    with pytest.raises(ModelError, match=said):
        models.load(edited(llada[1], tmp_path / "spoilt", **changes), dtype="float32")


def test_what_no_layout_expresses_is_not_saved(qwen, tmp_path):
    model = models.load(qwen[1], dtype="float32")
    with pytest.raises(ModelError, match="is written as LLaDA-MoE, which has"):
        models.save(tmp_path / "x", model.lm, model.params, diffusion=Masked(1, shift=False))
    own = model.lm.config.experts
    shared = dataclasses.replace(own, shared=models.MLPConfig(own.moe_intermediate_size))
    lm = LlamaLM(model.lm.config.mapped(models.ExpertsConfig, lambda _: shared))
    with pytest.raises(
        ModelError, match="has layers.feed.shared=MLPConfig.* with the rest of this model; Qwen3MoeForCausalLM"
    ):
        models.save(tmp_path / "x", lm, lm.abstract())
    with pytest.raises(ModelError, match="its layers have experts"):
        models.widen(model, 2)
