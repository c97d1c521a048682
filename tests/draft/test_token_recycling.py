"""Token recycling: what the table holds after a step, and the tree read from it."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import specjax
from specjax.draft import Proposal, TokenRecycling, Verdict, View
from specjax.draft.token_recycling import PUBLISHED_TREE, refresh
from specjax.lm import Output
from specjax.models.tabular import TabularLM, random
from specjax.prompts import Prompts
from specjax.reference import drafting as oracle
from specjax.sampling import row_keys

V, K, B = 12, 4, 3
DRAFTER = TokenRecycling(k=K, tree="3 | 2 1 1 | 1x3").bind(TabularLM(V))
observe = jax.jit(lambda *args: DRAFTER.observe({}, *args))
propose = jax.jit(lambda table, view: DRAFTER.propose({}, table, view, None))
refreshed = jax.jit(refresh)


def view(roots):
    tokens = jnp.zeros((B, 4), jnp.int32).at[:, 1].set(jnp.asarray(roots))
    return View(tokens, jnp.full(B, 2), jnp.ones(B, bool), (), max_depth=DRAFTER.depth)


def tables(rng, empty=0.2):
    return np.where(rng.random((V, 1)) < empty, -1, np.argsort(rng.random((V, V)), axis=1)[:, :K]).astype(np.int32)


def test_the_tree_is_looked_up():
    rng = np.random.default_rng(0)
    topology = DRAFTER.topology
    for _ in range(10):
        table, roots = tables(rng), rng.integers(0, V, B)
        tree = propose(jnp.asarray(table), view(roots)).tree
        for row in range(B):
            tokens, valid = oracle.token_recycling_tree(table, roots[row], topology.parents, topology.ranks)
            assert tree.tokens[row].tolist() == tokens and tree.valid[row].tolist() == valid


def test_an_empty_table_proposes_nothing():
    table = DRAFTER.init({}, B, 8)
    tree = propose(table, view([1, 2, 3])).tree
    assert (table == -1).all() and tree.valid.sum(axis=1).tolist() == [1] * B


def observed(rng, table, committed):
    proposal = propose(jnp.asarray(table), view(rng.integers(0, V, B)))
    logits = rng.normal(size=(B, DRAFTER.nodes + 2, V)).astype(np.float32)  # two extra slots: never recycled
    output = Output(delta=(), topk=jax.lax.top_k(jnp.asarray(logits), K))
    verdict = Verdict(jnp.zeros((B, 4), int), jnp.zeros(B, int), jnp.zeros(B, int), jnp.asarray(committed))
    return proposal.tree, logits[:, : DRAFTER.nodes], np.asarray(observe(jnp.asarray(table), proposal, output, verdict))


def test_after_a_step_every_token_of_the_tree_has_its_last_slots_top_k():
    rng = np.random.default_rng(1)
    for _ in range(10):
        table = tables(rng)
        tree, logits, got = observed(rng, table, [1, 2, 4])
        tokens = np.asarray(tree.tokens).ravel()
        want = oracle.token_recycling_update(table, tokens, logits.reshape(-1, V))
        np.testing.assert_array_equal(got, want)
        absent = np.setdiff1d(np.arange(V), tokens)
        np.testing.assert_array_equal(got[absent], table[absent])
        present = np.intersect1d(np.arange(V), tokens)
        assert len(present) and (got[present] >= 0).all()


def test_finished_rows_do_not_write():
    rng = np.random.default_rng(2)
    table = tables(rng)
    tree, logits, got = observed(rng, table, [0, 3, 0])
    want = oracle.token_recycling_update(table, np.asarray(tree.tokens)[1], logits[1])
    np.testing.assert_array_equal(got, want)
    assert (observed(rng, table, [0, 0, 0])[2] == table).all()


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(-1, V - 1), min_size=10, max_size=10), st.integers(0, 2**31))
def test_of_equal_tokens_the_last_slot_wins(tokens, seed):
    rng = np.random.default_rng(seed)
    table, logits = tables(rng), rng.normal(size=(10, V))
    best = np.argsort(-logits, axis=1)[:, :K].astype(np.int32)
    got = refreshed(jnp.asarray(table), jnp.asarray(tokens), jnp.asarray(best))
    np.testing.assert_array_equal(got, oracle.token_recycling_update(table, tokens, logits))


def test_the_table_changes_speed_and_never_text():
    """Cold, warm and poisoned tables: the same words; and the warm one saves steps."""
    lm = TabularLM(V, order=1)
    params = {"target": random(jax.random.key(0), V, 1, concentration=0.1)}
    decoder = specjax.speculative(lm, TokenRecycling(k=K, tree="3 | 2 1 1 | 1x3"))
    prompts = Prompts.of([[1, 2], [3, 4], [5]], [24, 24, 25], keys=row_keys(0, "abc"), temperature=[0.0, 0.0, 1.0])
    start = jax.jit(lambda prompts: decoder.init(params, prompts, capacity=32))

    def run(table):
        state = start(prompts)
        if table is not None:
            state = dataclasses.replace(state, draft=jnp.asarray(table))
        state = specjax.run(decoder, params, state)
        return np.asarray(state.tokens)[:, :26], np.asarray(state.stats.steps), np.asarray(state.draft)

    cold, steps, table = run(None)
    warm, fewer, _ = run(table)
    poisoned, _, _ = run(tables(np.random.default_rng(3)))
    np.testing.assert_array_equal(cold, warm)
    np.testing.assert_array_equal(cold, poisoned)
    assert fewer.sum() < steps.sum() < 3 * 25


def test_shapes():
    assert TokenRecycling(tree=PUBLISHED_TREE).nodes == 81
    with pytest.raises(ValueError, match="rank"):
        TokenRecycling(k=2, tree="3")
    with pytest.raises(ValueError, match="vocabulary"):
        TokenRecycling(k=8).bind(TabularLM(4))
    assert isinstance(propose(DRAFTER.init({}, B, 8), view([0, 0, 0])), Proposal)
