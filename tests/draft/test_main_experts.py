"""Drafts by fewer experts: those of the model with as many, from the target's own cache, and what is refused."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from support import small_target as small
from support.conformance import but_slow, texts

import specjax
from specjax import decoder as decoding
from specjax import models
from specjax.assembly.registry import build_drafter
from specjax.draft import MainExperts, View
from specjax.draft.main_experts.folder import save_vectors
from specjax.expand import Chain
from specjax.lm import Block, Wants
from specjax.models import ExpertsConfig, Model
from specjax.models.contrastive import SelfContrastive
from specjax.models.routing import compressed, joined, main_alone, ones, routed
from specjax.sampling import Sampler, SamplingArrays, row_keys
from specjax.sharding import make_mesh

LM = small.with_experts()


def one_layer(config, width):
    """A layer's experts, all weights zero."""
    return jax.tree.map(jnp.zeros_like, config.build(width, jnp.float32, nnx.Rngs(0)))


def test_kept_experts_by_hand():
    """One expert of three, whose weight is its share among all experts, among the three, or 1."""
    gate, up = jnp.asarray([[2.0, -2, 1], [1, 1, -1]]), jnp.asarray([[0.0, 1, -2], [-1, 1, 1]])
    down, router = jnp.asarray([[-1.0, 2], [-1, 0], [0, -2]]), jnp.asarray([1, 0.5, 0, -1])
    x = jnp.asarray([[[1.0, 2, -1]]])
    shares = np.exp(router) / np.exp(router).sum()
    want = np.asarray([0.269753, 0.269753, 0.0])
    for normed, more, weight in (
        (False, {"auxiliary": 2}, 1),
        (True, {"auxiliary": 2}, 1 / shares[:3].sum()),
        (True, {"num_experts_per_tok": 1}, 1 / shares[0]),
    ):
        own = one_layer(dataclasses.replace(ExpertsConfig(4, 3, 2, norm_topk_prob=normed), **more), 3)
        own.router.kernel[...] = own.router.kernel[...].at[0].set(router)
        for part, matrix in ((own.experts.gate, gate), (own.experts.up, up), (own.experts.down, down)):
            part.kernel[...] = part.kernel[...].at[0].set(matrix.T)
        np.testing.assert_allclose(jax.jit(own.__call__)(x)[0, 0], want * weight, atol=1e-6)


@pytest.mark.parametrize("renormalised", but_slow([False, True], True))
def test_a_draft_is_greedy_text_of_fewer_experts(renormalised):
    """Token by token by whole passes: the text before the root by all experts, the root and what follows by the best one."""
    weights = small.weights(LM)
    drafter = MainExperts(renormalised=renormalised, expander=Chain(3)).bind(LM)
    fields = {"num_experts_per_tok": 1} if renormalised else {"auxiliary": 1}
    assert drafter.target.config == LM.config.every(ExpertsConfig, **fields) and drafter.nodes == 4
    text = jnp.asarray([[3, 1, 4, 1, 5]], jnp.int32)
    at, none = jnp.arange(4)[None], jnp.zeros((1,), jnp.int32)

    @jax.jit
    def proposed(weights):
        cache = LM.init_cache(1, 16, jnp.float32)
        delta = LM(weights, Block(text[:, :4], at, none), cache, wants=Wants()).delta
        cache = LM.commit(cache, delta, None, none, none + 4)
        tokens, length, live = jnp.pad(text, ((0, 0), (0, 11))), jnp.asarray([5]), jnp.ones(1, bool)
        sampler = Sampler(row_keys(0, "a"), tokens, length, live, SamplingArrays.make(1, temperature=[0.0]))
        view = View(tokens, length, live, cache, max_depth=3)
        return drafter.propose({"target": weights}, (), view, sampler).tree.tokens, cache

    @jax.jit
    def after(weights, cache, path):
        block = Block(path, 4 + jnp.arange(path.shape[1])[None], none + 4)
        return drafter.target(weights, block, cache, wants=Wants(logits=True)).logits

    tokens, cache = proposed(weights)
    path = [5]
    for step in range(3):
        padded = jnp.asarray([path + [0] * (3 - len(path))])
        path.append(int(np.asarray(after(weights, cache, padded))[0, step].argmax()))
    assert tokens[0].tolist() == path


def decoded(drafter, own=None, mesh=None):
    """Texts of three rows, and how often each number of tokens of a draft was right."""
    model = {"target": small.weights(LM), "draft": own}
    decoder = dataclasses.replace(specjax.speculative(LM, drafter, mesh=mesh), whole=True)
    model = model if mesh is None else jax.device_put(model, decoder.param_shardings(model))
    state = decoding.run(decoder, model, small.begin(decoder, model))
    return texts(state), np.sum(state.stats.accepted, axis=0)


def vectors(spread):
    """Vectors for `LM`, about 1."""
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda x: x + jnp.asarray(spread * rng.normal(size=x.shape), jnp.float32), ones(LM))


@pytest.mark.slow
@pytest.mark.parametrize("own", [None, vectors(0.5)], ids=["alone", "vectors"])
def test_a_mesh_keeps_the_text(own):
    """Rows and experts split; both sides take them from the same devices."""
    drafter = MainExperts(vectors=own is not None)
    said, right = decoded(drafter, own, make_mesh("data=1,model=2", jax.devices()[:2]))
    assert said == [list(text) for text in small.free_texts(LM)]
    assert right[1:].sum(), "nothing is drafted right"


@pytest.mark.slow
def test_vectors_change_drafts_and_no_text():
    """Vectors of ones change nothing at all, others what is right of a draft."""
    alone, same = decoded(MainExperts()), decoded(MainExperts(vectors=True), ones(LM))
    drawn = decoded(MainExperts(vectors=True), vectors(2.0))
    assert alone[0] == same[0] == drawn[0] == [list(text) for text in small.free_texts(LM)]
    np.testing.assert_array_equal(alone[1], same[1])
    assert drawn[1].tolist() != alone[1].tolist()


def test_vectors_of_a_folder(tmp_path):
    """Those alone or a whole model's; the number of main experts is the folder's, and a line's own goes before it."""
    target = Model(LM, small.weights(LM), dtype=jnp.dtype("float32"))
    lm, own = compressed(LM, 1, "a test"), vectors(0.5)
    save_vectors(tmp_path / "own", lm, own, "float32")
    models.save(tmp_path / "whole", lm, joined(target.params, own))
    for name in ("own", "whole"):
        drafter, read = build_drafter(f"main_experts:vectors={tmp_path / name},length=2", target)
        assert (drafter.keep, drafter.vectors, drafter.nodes) == (1, True, 3) and drafter.target == lm
        jax.tree.map(np.testing.assert_array_equal, read, own)
    with pytest.raises(ValueError, match="the weights do not fit config.json: missing"):
        models.load(tmp_path / "own")
    models.save(tmp_path / "plain", LM, target.params)
    other = dataclasses.replace(LM, config=LM.config.every(ExpertsConfig, num_experts=5))
    deep = small.with_layers(LM, 3)
    for line, model, said in (
        (f"vectors={tmp_path / 'plain'}", LM, "plain has no compressed experts .use_ce and n_ce in config.json."),
        (f"vectors={tmp_path / 'nowhere'}", LM, "nowhere"),
        (f"vectors={tmp_path / 'own'}", other, r"needs model.layers.0.mlp.ces \[5, 3, 32\], and it has \[4, 3, 32\]"),
        (f"vectors={tmp_path / 'own'}", deep, r"needs model.layers.2.mlp.ces \[4, 3, 32\], and it has none"),
        (f"vectors={tmp_path / 'own'},renormalised=true", LM, "leave renormalised or vectors out"),
        (f"vectors={tmp_path / 'own'},keep=2", LM, "fewer than its 2, got 2"),
    ):
        with pytest.raises(ValueError, match=said):
            build_drafter(f"main_experts:{line}", dataclasses.replace(target, lm=model))
    with pytest.raises(ValueError, match="reads vectors, which a configuration does not describe"):
        build_drafter(f"main_experts:vectors={tmp_path / 'own'}", dataclasses.replace(target, params=LM.abstract()))


def test_refused():
    drafter, own = build_drafter("main_experts:keep=1,length=5", Model(LM, {}))
    assert (drafter.keep, drafter.nodes, own) == (1, 6, None)
    steered = SelfContrastive(LM, LM)
    for target in (small.TARGET, steered):
        with pytest.raises(ValueError, match="main_experts chooses among a model's experts, and this one has none"):
            MainExperts().bind(target)
    for keep in (-1, 2):
        with pytest.raises(ValueError, match=f"at least one expert of a token and fewer than its 2, got {keep}"):
            MainExperts(keep).bind(LM)
    alone = main_alone(LM, 1, "a test")
    with pytest.raises(ValueError, match="fewer than its 1, got 1"):
        MainExperts().bind(alone)
    with pytest.raises(ValueError, match="scmoe chooses other experts, and this model leaves some"):
        routed(alone, 1, 1, "scmoe")


def test_half_of_the_experts_are_kept():
    """Of eight four, as published, in every layer; of three two."""
    of = lambda k: LM.config.every(ExpertsConfig, num_experts=8, num_experts_per_tok=k)
    kept = lambda k: MainExperts().bind(dataclasses.replace(LM, config=of(k))).target.config.experts.main
    assert [kept(k) for k in (8, 3, 2)] == [4, 2, 1]
