"""Compressed experts: a token by hand, a layer by a loop over tokens, the published keys, and what they cannot stand for."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file
from support import small_target as small
from support.random_weights import drawn
from support.small_experts import ours

from specjax import models
from specjax.models import ExpertsConfig, LlamaLM, Mapped, Model, ModelError, hf_config, routing
from specjax.models.compressed import combined
from specjax.sharding import make_mesh

LM = small.with_experts()
WIDE = ExpertsConfig(6, 4, 5, norm_topk_prob=False, auxiliary=2, vectors=True)
IDS = np.random.default_rng(0).integers(0, 24, (2, 12))


def layer(config, width, seed=0):
    """A layer's experts with drawn weights."""
    own, rng = config.build(width, jnp.float32, nnx.Rngs(0)), np.random.default_rng(seed)
    return jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), jnp.float32), own)


def by_hand(own, x):
    """The same of one token `[E]`, in float64."""
    c, f = own.config, own.config.moe_intermediate_size
    gate, up, down = (np.asarray(getattr(own.experts, name).kernel[...], np.float64) for name in ("gate", "up", "down"))
    logits = x @ np.asarray(own.router.kernel[...], np.float64)
    shares = np.exp(logits - logits.max())
    shares /= shares.sum()
    best = np.argsort(-shares)[: c.num_experts_per_tok]
    weights = shares[best] / (shares[best].sum() if c.norm_topk_prob else 1)
    left, vectors = weights[c.main :], np.asarray(own.ces[...], np.float64)
    mean = sum(w * vectors[e] for w, e in zip(left / left.sum(), best[c.main :], strict=True))
    total = 0.0
    for weight, expert in zip(weights[: c.main], best, strict=False):
        inner = (x * mean[0]) @ gate[expert]
        inner = inner / (1 + np.exp(-inner)) * ((x * mean[2]) @ up[expert]) * mean[1][:f]
        total = total + weight * (inner @ down[expert])
    return total


def test_a_token_by_hand():
    vectors = jnp.ones((4, 3, 3))
    vectors = vectors.at[1].set(jnp.asarray([[1, 0.5, 1], [2, 1, 1], [1, 1, 0]]))
    vectors = vectors.at[2].set(jnp.asarray([[1, 1, 0.5], [1, 0.5, 1], [2, 1, 1]]))
    own = ExpertsConfig(4, 3, 2, norm_topk_prob=False, auxiliary=2, vectors=True).build(3, jnp.float32, nnx.Rngs(0))
    own = jax.tree.map(jnp.zeros_like, own)
    own.ces[...] = vectors
    own.router.kernel[...] = own.router.kernel[...].at[0].set(jnp.asarray([1, 0.5, 0, -1]))
    for name, matrix in (
        ("gate", [[2, -2, 1], [1, 1, -1]]),
        ("up", [[0, 1, -2], [-1, 1, 1]]),
        ("down", [[-1, 2], [-1, 0], [0, -2]]),
    ):
        kernel = getattr(own.experts, name).kernel
        kernel[...] = kernel[...].at[0].set(jnp.asarray(matrix, jnp.float32).T)
    odds = np.exp([0.5, 0.0])
    c = combined(vectors, jnp.asarray([odds], jnp.float32), jnp.asarray([[1, 2]]))
    want = [[1, 0.688770, 0.811230], [1.622459, 0.811230, 1], [1.377541, 1, 0.377541]]
    np.testing.assert_allclose(c[0], want, atol=1e-6)
    x = jnp.asarray([[[1.0, 2, -1]]])
    np.testing.assert_allclose(own(x)[0, 0], [1.150093, 0.573266, -0.576827], atol=1e-6)
    own.ces[...] = jnp.ones_like(vectors)
    np.testing.assert_allclose(own(x)[0, 0], [0.269753, 0.269753, 0], atol=1e-6)


def test_weights_of_zero_count_alike():
    vectors = jnp.arange(24.0).reshape(4, 3, 2)
    c = combined(vectors, jnp.zeros((1, 2)), jnp.asarray([[3, 1]]))
    np.testing.assert_allclose(c[0], (vectors[3] + vectors[1]) / 2)


@pytest.mark.slow
@pytest.mark.parametrize("normed", [False, True])
def test_a_layer_by_a_loop_over_tokens(normed):
    own = layer(dataclasses.replace(WIDE, norm_topk_prob=normed), 8)
    x = np.random.default_rng(1).normal(size=(2, 5, 8))
    got = np.asarray(jax.jit(lambda x: own(x))(jnp.asarray(x, jnp.float32)))
    want = np.stack([[by_hand(own, token) for token in row] for row in x])
    np.testing.assert_allclose(got, want, atol=1e-4 * np.abs(want).max())
    without = nnx.merge(*nnx.split(own))
    without.ces[...] = jnp.ones_like(own.ces[...])
    assert np.abs(without(jnp.asarray(x, jnp.float32)) - want).max() > 0.01 * np.abs(want).max()


@pytest.mark.slow
def test_experts_of_several_devices():
    """Each holds three whole ones; values and derivatives are those of one device, few rows (by turns) and many."""
    own, mesh = layer(WIDE, 8), make_mesh("data=1,model=2", jax.devices()[:2])
    graph, params = nnx.split(own)
    for tokens in (40, 600):
        x = jnp.asarray(np.random.default_rng(tokens).normal(size=(1, tokens, 8)), jnp.float32)
        both = jax.jit(jax.value_and_grad(lambda p, x: jnp.sum(jnp.sin(nnx.merge(graph, p)(x)))))
        alone, grads = both(params, x)
        with jax.set_mesh(mesh):
            split, others = both(params, x)
        np.testing.assert_allclose(split, alone, rtol=1e-4)
        for a, b in zip(*map(jax.tree.leaves, (grads, others)), strict=True):
            np.testing.assert_allclose(a, b, atol=2e-4 * float(jnp.abs(b).max()) + 1e-6)


@pytest.fixture(scope="module")
def olmoe():
    """A tiny OLMoE with the fields of its files, whose tokens take four of six experts."""
    raw = {
        "architectures": ["OlmoeForCausalLM"], "vocab_size": 24, "hidden_size": 16, "intermediate_size": 12,
        "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "num_experts": 6,
        "num_experts_per_tok": 4, "max_position_embeddings": 32,
    }  # fmt: skip
    lm = LlamaLM(hf_config.from_hf(raw))
    params = jax.tree.map(lambda x: 2 * jnp.asarray(x), drawn(jax.jit(lm.init)(jax.random.key(0)), seed=4))
    return Model(lm, params)


@pytest.mark.slow
def test_keys_and_names_of_the_publication(olmoe, tmp_path):
    """Written and read again; with vectors of ones the model is that without its auxiliary experts."""
    model, k = olmoe, olmoe.lm.config.experts.num_experts_per_tok
    lm = routing.compressed(model.lm, k - 1, "a test")
    rng = np.random.default_rng(3)
    vectors = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), jnp.float32), routing.ones(model.lm))
    params = routing.joined(model.params, vectors)
    models.save(tmp_path / "x", lm, params)
    config = json.loads((tmp_path / "x" / "config.json").read_text())
    assert (config["model_type"], config["use_ce"], config["n_ce"], config["num_experts_per_tok"]) == (
        "olmoe",
        True,
        1,
        k,
    )
    stored = load_file(tmp_path / "x" / "model.safetensors")
    for i, own in vectors["layers"].items():
        np.testing.assert_array_equal(stored[f"model.layers.{i}.mlp.ces"], own["mlp"]["ces"])
    again = models.load(tmp_path / "x", dtype="float32")
    assert again.lm.config == lm.config
    jax.tree.map(np.testing.assert_array_equal, again.params, params)
    got = ours(again, IDS, causal=True)
    plain = dataclasses.replace(model, lm=lm, params=routing.joined(model.params, routing.ones(model.lm)))
    alone = dataclasses.replace(model, lm=routing.main_alone(model.lm, k - 1, "a test"))
    np.testing.assert_allclose(ours(plain, IDS, causal=True), ours(alone, IDS, causal=True), atol=1e-5)
    assert np.abs(got - ours(plain, IDS, causal=True)).max() > 1e-2


@pytest.mark.slow
def test_no_auxiliary_experts_are_plain_ones(olmoe, tmp_path):
    """`n_ce` 0 with vectors in the file: the plain model; and without the key both are nothing."""
    model = olmoe
    lm = dataclasses.replace(model.lm, config=model.lm.config.every(ExpertsConfig, vectors=True))
    params = routing.joined(model.params, jax.tree.map(lambda x: 2 * x, routing.ones(model.lm)))
    models.save(tmp_path / "x", lm, params)
    again = models.load(tmp_path / "x", dtype="float32")
    assert again.lm.config.experts.vectors and not again.lm.config.experts.auxiliary
    np.testing.assert_array_equal(ours(again, IDS, causal=True), ours(model, IDS, causal=True))
    raw = hf_config.to_hf(model.lm.config)
    assert "use_ce" not in raw and hf_config.from_hf(raw | {"use_ce": False, "n_ce": 1}) == model.lm.config


def test_other_models_may_have_them():
    """Mixtral's layers, whose weights are divided by their sum: the keys are read back."""
    lm = routing.compressed(LM, 1, "a test")
    assert hf_config.from_hf(hf_config.to_hf(lm.config)) == lm.config
    assert lm.axes(lm.abstract())["layers"][0]["mlp"]["ces"] == (None, None, None)


def test_refused(olmoe):
    raw = hf_config.to_hf(olmoe.lm.config)
    k = raw["num_experts_per_tok"]
    for fields, said in (
        ({"use_ce": True}, f"n_ce must be a number below the {k} experts of a token, not None"),
        ({"use_ce": True, "n_ce": k}, "n_ce must be a number below"),
        ({"use_ce": True, "n_ce": -1}, "n_ce must be a number below"),
        ({"use_ce": "yes", "n_ce": 1}, "use_ce must be true or false"),
        ({"use_ce": True, "n_ce": 1, "intermediate_size": 999}, "vectors cannot stand for experts wider .999. than"),
    ):
        with pytest.raises(ModelError, match=said):
            hf_config.from_hf(raw | fields)
    with pytest.raises(ModelError, match="use_ce is true, and the model has no experts"):
        hf_config.from_hf(hf_config.to_hf(small.TARGET.config) | {"use_ce": True, "n_ce": 1})
    kinds = {
        "clamped experts": {"swiglu_limit": 7.0},
        "experts without a gate": {"ungated": "relu2"},
        "experts whose inputs are weighted": {"scoring": "inputs"},
        "experts in a narrower space": {"latent_size": 8},
    }
    for what, fields in kinds.items():
        lm = dataclasses.replace(LM, config=LM.config.every(ExpertsConfig, **fields))
        with pytest.raises(ValueError, match=f"a test: vectors cannot stand for {what}"):
            routing.compressed(lm, 1, "a test")
    with pytest.raises(ValueError, match="another library's: leave vectors out"):
        routing.compressed(Mapped(LM, lambda theirs: theirs), 1, "a test")
    alone = routing.main_alone(LM, 1, "a test")
    with pytest.raises(ModelError, match="no supported architecture has layers.feed=ExpertsConfig"):
        hf_config.to_hf(alone.config)
