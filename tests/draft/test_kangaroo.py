"""Kangaroo: shallow work is done once and kept, the adapter's cache, and where drafting stops."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.conformance import CONFIG, MODELS, TARGET, params
from support.head_start import check_head_start, count_products, poisoned, proposed, running, step

import specjax
from specjax.draft import Gemma4Assistant, Kangaroo
from specjax.draft.kangaroo import network as head
from specjax.draft.trim import trim
from specjax.lm import Block, Wants
from specjax.models.llama import LlamaLM
from specjax.models.tabular import TabularLM

DRAFTER = Kangaroo(exit_layer=2, length=4, threshold=0.3)


@functools.cache
def model():
    target = params()["target"]
    return {"target": target, "draft": DRAFTER.bind(TARGET).init_params(jax.random.key(0), target)}


@pytest.fixture(scope="module")
def midway():
    return running(DRAFTER, model())


@pytest.mark.slow
def test_the_target_goes_on_from_the_draft(midway):
    check_head_start(*midway[:1], model(), midway[1], lo=2)


@pytest.mark.slow
def test_drafting_reads_no_upper_layer(midway):
    decoder, state = midway
    wanted = proposed(decoder, model(), state).tree.tokens
    np.testing.assert_array_equal(proposed(decoder, poisoned(model(), [2]), state).tree.tokens, wanted)


def test_every_node_passes_the_lower_layers_once(midway):
    """Two products with an MLP's input matrices a layer and pass: root, levels and last node below, one pass per rung
    above."""
    decoder, state = midway
    jaxpr = jax.make_jaxpr(decoder.step)(model(), state).jaxpr
    shape = CONFIG.hidden_size, CONFIG.dense.intermediate_size
    assert count_products(jaxpr, shape) == 2 * (2 * DRAFTER.nodes + 1 * len(DRAFTER.rungs))


@pytest.mark.slow
def test_the_adapters_cache_is_a_fresh_pass_over_committed_tokens(midway):
    decoder, state = midway
    for _ in range(4):
        state = step(decoder, model(), state)
    assert (state.stats.accepted[:, 1:] > 0).any()
    size = state.tokens.shape[1]
    positions = jnp.broadcast_to(jnp.arange(size)[None], state.tokens.shape)
    block = Block(state.tokens, positions, jnp.zeros(len(state.length), jnp.int32))
    h = TARGET(model()["target"], block, None, wants=Wants(hidden=(1,))).hidden[1]
    _, fresh = head.adapt(CONFIG, model()["draft"], h, block, None)
    committed = np.arange(size)[None] < np.asarray(state.length)[:, None] - 1
    for cache, wanted in ((state.draft.key[0], fresh.key[0]), (state.draft.value[0], fresh.value[0])):
        cache = np.asarray(cache).transpose(0, 2, 1, 3)
        np.testing.assert_allclose(cache[committed], np.asarray(wanted)[committed], rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_a_draft_that_is_never_sure_has_one_token(midway):
    decoder = specjax.speculative(TARGET, dataclasses.replace(DRAFTER, threshold=1.0))
    assert (proposed(decoder, model(), midway[1]).tree.valid.sum(axis=1) == 2).all()
    assert proposed(midway[0], model(), midway[1]).tree.valid.sum() > 2 * len(midway[1].length)


@pytest.mark.slow
def test_a_trimmed_head_proposes_its_tokens_alone(midway):
    decoder, state = midway
    ids = np.arange(1, CONFIG.vocab_size, 3)
    drafter, draft = trim(decoder.drafter, model(), ids, CONFIG.vocab_size)
    tree = proposed(specjax.speculative(TARGET, drafter), {**model(), "draft": draft}, state).tree
    drafted = np.asarray(tree.tokens[:, 1:])[np.asarray(tree.valid[:, 1:])]
    assert set(drafted.tolist()) <= set(ids.tolist()) and len(drafted) >= len(state.length)
    with pytest.raises(ValueError, match="already"):
        trim(drafter, {**model(), "draft": draft}, ids, CONFIG.vocab_size)


def test_bad_targets():
    with pytest.raises(ValueError, match="exit_layer=3"):
        Kangaroo(exit_layer=3).bind(TARGET)
    with pytest.raises(ValueError, match="exit_layer=1"):
        Kangaroo(exit_layer=1).bind(TabularLM(4))
    with pytest.raises(ValueError, match="length"):
        Kangaroo(length=0)
    latent = MODELS["latent"]
    with pytest.raises(ValueError, match="must have plain attention .not latent. and no other mixer"):
        Kangaroo(exit_layer=1).bind(latent)
    with pytest.raises(ValueError, match="have plain attention .not latent. and no other mixer, and it has 0 of them"):
        Gemma4Assistant().bind(latent)
    narrow = LlamaLM(dataclasses.replace(CONFIG, hidden_size=32))
    other = DRAFTER.bind(narrow).init_params(None, jax.tree.map(lambda x: np.zeros(x.shape), narrow.abstract()))
    with pytest.raises(ValueError, match=r"attention.*\(32, 32\).*needs \(64, 32\)"):
        DRAFTER.bind(TARGET).init({**model(), "draft": other}, 2, 16)
