"""The Markov oracle: its probabilities sum to one, and every way of running it gives the same numbers."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.lm import Block, Partial, Wants
from specjax.models.tabular import NEVER, TabularLM, random

V = 5
LOGITS = Wants(logits=True)


def make(order, zeros=0.0, seed=0):
    lm = TabularLM(V, order)
    return lm, random(jax.random.key(seed), V, order, zeros=zeros)


def block(tokens, start=None, **more):
    tokens = jnp.asarray(tokens, jnp.int32)
    start = jnp.zeros(tokens.shape[0], jnp.int32) if start is None else jnp.asarray(start, jnp.int32)
    positions = more.pop("positions", start[:, None] + jnp.arange(tokens.shape[1])[None])
    return Block(tokens, jnp.asarray(positions, jnp.int32), start, **more)


def log_probs(lm, params, *args, **more):
    return np.asarray(jax.nn.log_softmax(lm(params, *args, wants=LOGITS, **more).logits, axis=-1))


@pytest.mark.parametrize("zeros", [0.0, 0.4])
@pytest.mark.parametrize("order", [1, 2])
def test_all_sequences_sum_to_one(order, zeros):
    lm, params = make(order, zeros)
    every = np.array(list(itertools.product(range(V), repeat=4)))
    for prefix in ([], [3], [1, 2, 4]):
        total = np.exp(lm.sequence_log_prob(params, every, prefix)).sum()
        assert abs(total - 1) < 1e-6
    if zeros:
        rows = np.asarray(params["table"])
        assert (rows == NEVER).any() and (rows > NEVER).any(axis=-1).all()
        assert np.exp(lm.sequence_log_prob(params, every)).min() == 0


@pytest.mark.parametrize("order", [1, 2])
def test_forward_equals_next_log_probs(order):
    lm, params = make(order)
    tokens = np.random.default_rng(0).integers(0, V, (3, 7))
    got = log_probs(lm, params, block(tokens), None)
    for i in range(7):
        np.testing.assert_allclose(got[:, i], lm.next_log_probs(params, tokens[:, : i + 1]), atol=1e-5)
    total = sum(got[np.arange(3), i - 1, tokens[:, i]] for i in range(2, 7))
    np.testing.assert_allclose(total, lm.sequence_log_prob(params, tokens[:, 2:], tokens[:, :2]), atol=1e-4)


@pytest.mark.parametrize("order", [1, 2])
def test_ragged_cache_then_tree_equals_each_path(order):
    lm, params = make(order)
    rng = np.random.default_rng(1)
    text, lengths = rng.integers(0, V, (3, 6)), np.array([1, 6, 4])
    cache = lm.init_cache(3, 12)
    delta = lm(params, block(text), None, wants=Wants()).delta
    cache = lm.commit(cache, delta, None, jnp.zeros(3, jnp.int32))
    # nodes 1 and 2 are siblings with their own children 3 and 4; slot 0 is the root
    parent, depth = [-1, 0, 0, 1, 2], np.array([0, 1, 1, 2, 2])
    tree = rng.integers(0, V, (3, 5))
    visible = np.eye(5, dtype=bool)
    for node in range(1, 5):
        visible[node] |= visible[parent[node]]
    visible = jnp.asarray(np.broadcast_to(visible, (3, 5, 5)))
    got = log_probs(lm, params, block(tree, lengths, positions=lengths[:, None] + depth, visible=visible), cache)
    for row, path in itertools.product(range(3), ([0], [0, 1], [0, 2], [0, 1, 3], [0, 2, 4])):
        context = np.concatenate([text[row, : lengths[row]], tree[row, path]])
        np.testing.assert_allclose(got[row, path[-1]], lm.next_log_probs(params, context), atol=1e-5)


def test_a_wrong_mask_or_a_stale_slot_shows():
    lm, params = make(2)
    tokens, positions = [[1, 2, 3, 4]], [[0, 1, 1, 2]]
    right = jnp.asarray([[[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1]]], bool)
    wrong = right.at[0, 3, 2].set(True)
    good = log_probs(lm, params, block(tokens, positions=positions, visible=right), None)
    bad = log_probs(lm, params, block(tokens, positions=positions, visible=wrong), None)
    assert np.abs(good - bad)[0, 3].max() > 1e-2
    cache = lm.commit(
        lm.init_cache(1, 4), lm(params, block([[0, 3, 2, 1]]), None, wants=Wants()).delta, None, jnp.zeros(1, int)
    )
    fresh = Block(jnp.array([[1, 2]]), jnp.array([[1, 2]]), jnp.array([1]))
    stale = Block(jnp.array([[1, 2]]), jnp.array([[1, 2]]), jnp.array([2]))
    assert np.abs(log_probs(lm, params, fresh, cache) - log_probs(lm, params, stale, cache))[0, 1].max() > 1e-2


def test_past_equals_one_block():
    lm, params = make(2)
    tokens = np.random.default_rng(2).integers(0, V, (2, 6))
    whole = log_probs(lm, params, block(tokens), None)
    first = lm(params, block(tokens[:, :2]), None, wants=Wants())
    later = Block(jnp.asarray(tokens[:, 2:]), jnp.tile(jnp.arange(2, 6)[None], (2, 1)), jnp.zeros(2, jnp.int32))
    np.testing.assert_allclose(log_probs(lm, params, later, None, past=first.delta), whole[:, 2:], atol=1e-6)


def test_commit_sources_and_destinations():
    lm, params = make(1)
    delta = lm(params, block([[1, 2, 3], [4, 3, 2]]), None, wants=Wants()).delta
    start = lm.init_cache(2, 4)
    run = lm.commit(start, delta, jnp.array([[0, 2], [1, 1]]), jnp.array([1, 2]))
    assert run.tokens.tolist() == [[0, 1, 3, 0], [0, 0, 3, 3]]
    named = lm.commit(start, delta, jnp.array([[0, 2], [1, 1]]), jnp.array([[3, 9], [0, 4]]))
    assert named.tokens.tolist() == [[0, 0, 0, 1], [3, 0, 0, 0]]


def test_the_menu():
    lm, params = make(2)
    b = block([[1, 2, -1]])
    out = lm(params, b, None, wants=Wants(topk=2, draw=True, hidden=(0,), final=True), draw=lambda x: x.argmax(-1))
    assert out.logits is None and out.topk[0].shape == (1, 3, 2) and out.hidden[0].shape == (1, 3, 2 * V)
    full = lm(params, b, None, wants=LOGITS).logits
    assert (out.draw == full.argmax(-1)).all() and (lm.unembed(params, out.final) == full).all()
    h, delta = lm.layers(params, lm.embed(params, b.tokens), 0, 1, b, None)
    resumed = lm(params, b, None, wants=LOGITS, partial=Partial(h, delta, 1))
    assert (resumed.logits == full).all()
    marked = Block(
        b.tokens,
        b.positions,
        b.length,
        embeddings=lm.embed(params, b.tokens + 1),
        embedded=jnp.array([[False, False, True]]),
    )
    got = lm(params, marked, None, wants=LOGITS).logits
    assert (got[:, :2] == full[:, :2]).all() and (got[:, 2] == full[:, 2]).all()


def test_axes_match_the_trees():
    lm, params = make(2)
    cache = lm.init_cache(2, 3)
    assert len(lm.axes(params)["table"]) == params["table"].ndim == 3
    assert len(lm.cache_axes(cache).tokens) == cache.tokens.ndim
    assert jax.tree.map(jnp.shape, params) == jax.tree.map(lambda x: x.shape, lm.abstract())


@pytest.mark.parametrize(("vocab", "order"), [(4, 3), (4, 0), (0, 1)])
def test_bad_sizes(vocab, order):
    with pytest.raises(ValueError, match="order 1 or 2"):
        TabularLM(vocab, order)
