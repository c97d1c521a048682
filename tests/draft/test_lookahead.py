"""Lookahead: the pool against a slow oracle, who sees whom, and a window that follows the target."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.conformance import TARGET, params

import specjax
from specjax.draft import Chunk, Lookahead, Verdict, View
from specjax.draft.lookahead import insert, merge
from specjax.lm import Block, Output, Wants
from specjax.models.tabular import TabularLM, random
from specjax.reference import lookahead as oracle
from specjax.reference import trees

V, K, G, N = 7, 5, 3, 3
inserted = jax.jit(insert)
merged = jax.jit(merge, static_argnums=3)
GRAM = st.tuples(*[st.integers(-1, V - 1)] * N)


def entries(pool):
    """A row's pool as the oracle writes it."""
    grams = {k: [tuple(map(int, g)) for g in bucket if g[0] >= 0] for k, bucket in enumerate(np.asarray(pool))}
    return {k: held for k, held in grams.items() if held}


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(GRAM, min_size=9, max_size=9), min_size=1, max_size=4), st.integers(0, 2**31))
def test_a_batch_of_ngrams_goes_in_one_by_one(batches, seed):
    rng = np.random.default_rng(seed)
    pool, rows = jnp.full((2, K, G, N), -1), ({}, {})
    for grams in batches:
        both = np.stack([np.asarray(grams), rng.integers(0, 3, (9, N))])  # the second row repeats itself often
        pool = inserted(pool, jnp.asarray(both, jnp.int32))
        for held, new in zip(rows, both, strict=True):
            oracle.pool_insert(held, new, K, G)
    for row, held in enumerate(rows):
        assert entries(pool[row]) == held
    # empty places come last
    used = np.asarray(pool)[:, :, :, 0] >= 0
    assert (used[:, :, 1:] <= used[:, :, :-1]).all()


def test_the_oldest_gives_way_and_a_known_one_becomes_the_latest():
    pool = jnp.full((1, K, 2, N), -1)
    put = lambda pool, *grams: inserted(pool, jnp.asarray([grams], jnp.int32))
    pool = put(pool, (1, 2, 3), (1, 2, 4))
    assert entries(pool[0]) == {1: [(1, 2, 4), (1, 2, 3)]}
    pool = put(pool, (1, 2, 3))
    assert entries(pool[0]) == {1: [(1, 2, 3), (1, 2, 4)]}
    assert entries(put(pool, (1, 5, 5))[0]) == {1: [(1, 5, 5), (1, 2, 3)]}
    assert entries(put(pool, (6, 0, 0))[0]) == {1: [(6, 0, 0), (1, 2, 3)]}  # token 6 shares bucket 1


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(*[st.integers(0, 2)] * 3), min_size=4, max_size=4),
    st.lists(st.booleans(), min_size=4, max_size=4),
    st.sampled_from([2, 5, 13]),
)
def test_common_beginnings_share_their_nodes(tails, found, nodes):
    tree = merged(jnp.asarray([9]), jnp.asarray([tails]), jnp.asarray([found]), nodes)
    want = oracle.merged_paths([tail for tail, there in zip(tails, found, strict=True) if there], nodes)
    parent, depth, tokens, valid = (np.asarray(x)[0] for x in (tree.parent, tree.depth, tree.tokens, tree.valid))
    assert valid.tolist() == [i <= len(want) for i in range(nodes)]
    assert (tokens[0], parent[0], depth[0]) == (9, -1, 0) and (tokens[~valid] == -1).all()
    assert (parent[1:] >= 0).all() and (parent < np.arange(nodes)).all()
    paths = trees.path_tokens(tokens, parent, tree.max_depth)
    got = [tuple(int(t) for t in paths[i] if t >= 0) for i in range(1, len(want) + 1)]
    assert got == want
    assert [len(path) for path in got] == depth[1 : len(want) + 1].tolist()


def view_of(drafter, texts, size=24):
    tokens = np.full((len(texts), size), 5, np.int32)
    for row, text in enumerate(texts):
        tokens[row, : len(text)] = text
    length = jnp.asarray([len(text) for text in texts], jnp.int32)
    live = jnp.ones(len(texts), bool)
    return View(jnp.asarray(tokens), length, live, (), max_depth=drafter.depth)


@pytest.mark.parametrize(("level", "window"), [(3, 1), (3, 4), (5, 3)])
def test_window_and_tree_do_not_see_each_other(level, window):
    drafter = Lookahead(level=level, window=window, guesses=2, nodes=4).bind(TabularLM(V))
    view = view_of(drafter, [[1, 2, 3], [4]])
    proposal = propose(drafter, drafter.init({}, 2, 24), view)
    block = proposal.block(view)
    slots = [(r, c) for r in range(level - 1) for c in range(window) if (r, c) != (0, 0)]
    assert block.tokens.shape == (2, drafter.nodes + len(slots))
    visible = np.asarray(block.visible)
    assert not visible[:, : drafter.nodes, drafter.nodes :].any()
    assert visible[:, drafter.nodes :, 0].all() and not visible[:, drafter.nodes :, 1 : drafter.nodes].any()
    sees = oracle.window_sees(level, window)
    for i, slot in enumerate(slots):
        for row in range(2):
            assert {slots[j] for j in np.flatnonzero(visible[row, drafter.nodes + i, drafter.nodes :])} == sees[slot]
            assert block.positions[row, drafter.nodes + i] == [3, 1][row] - 1 + sum(slot)
    np.testing.assert_array_equal(proposal.extra.tokens, proposal.draft.window[:, :-1].reshape(2, -1)[:, 1:])


@functools.partial(jax.jit, static_argnums=0)
def propose(drafter, state, view):
    return drafter.propose({}, state, view, None)


@functools.partial(jax.jit, static_argnums=(0, 2))
def read(drafter, state, size, view, weights):
    """One step by hand and without a cache: the text `[size]` goes in front. Returns the new state and the proposal."""
    proposal = drafter.propose({}, state, view, None)
    block = proposal.block(view)
    before, slots = size - 1, block.tokens.shape[1]
    causal = jnp.tril(jnp.ones((1, before, before + slots), bool))
    below = jnp.concatenate([jnp.ones((1, slots, before), bool), block.visible], axis=2)
    whole = Block(
        jnp.concatenate([view.tokens[:, :before], block.tokens], axis=1),
        jnp.concatenate([jnp.arange(before)[None], block.positions], axis=1),
        jnp.zeros(1, jnp.int32),
        jnp.concatenate([causal, below], axis=1),
    )
    logits = TARGET(weights, whole, None, wants=Wants(logits=True)).logits[:, before:]
    zero = jnp.zeros(1, jnp.int32)
    verdict = Verdict(jnp.zeros((1, drafter.depth + 1), jnp.int32), zero, zero, zero + 1)
    return drafter.observe({}, proposal.draft, proposal, Output((), logits=logits), verdict), proposal


@jax.jit
def after_all(tokens, weights):
    block = Block(tokens, jnp.arange(24)[None], jnp.zeros(1, jnp.int32))
    return jnp.argmax(TARGET(weights, block, None, wants=Wants(logits=True)).logits, axis=-1)


def greedy(text, weights):
    return int(after_all(jnp.asarray([np.resize(text, 24)]), weights)[0, len(text) - 1])


def test_a_column_is_continued_as_the_target_would():
    """What the last level hears is the target's argmax after: text, root, level 0 up to the column, the column itself."""
    drafter = Lookahead(level=4, window=3, guesses=2, nodes=4, text=False).bind(TARGET)
    rng = np.random.default_rng(0)
    text = rng.integers(0, 96, 9).tolist()
    window = jnp.asarray(rng.integers(0, 96, (1, 4, 3)), jnp.int32)
    state = dataclasses.replace(drafter.init({}, 1, 24), window=window)
    weights = params()["target"]
    after, proposal = read(drafter, state, len(text), view_of(drafter, [text]), weights)
    levels = np.asarray(proposal.draft.window)[0, :-1]
    np.testing.assert_array_equal(levels[0, 1:], window[0, 1, 1:])  # every level moved up
    np.testing.assert_array_equal(levels[1:], window[0, 2:])
    assert levels[0, 0] == text[-1]
    for column in range(3):
        line = text + levels[0, 1 : column + 1].tolist() + levels[1:, column].tolist()
        assert after.window[0, -1, column] == greedy(line, weights)


def test_a_window_that_is_right_stays_right_and_its_ngrams_are_the_text():
    drafter = Lookahead(level=4, window=3, guesses=2, nodes=4, text=False).bind(TARGET)
    weights = params()["target"]
    line = np.random.default_rng(4).integers(0, 96, 5).tolist()  # a text without repetitions
    start = len(line) - 1
    for _ in range(10):
        line.append(greedy(line, weights))
    right = lambda root, levels: np.asarray([[line[root + c + r] for c in range(3)] for r in range(levels)])
    state = drafter.init({}, 1, 24)
    # as if the step before had been at start - 1
    state = dataclasses.replace(state, window=jnp.asarray(right(start - 1, 4))[None])
    for step in range(2):
        text = line[: start + 1 + step]
        state, _ = read(drafter, state, len(text), view_of(drafter, [text]), weights)
        np.testing.assert_array_equal(state.window[0], right(start + step, 4))
    grams = {gram for bucket in entries(state.pool[0]).values() for gram in bucket}
    assert grams == {tuple(line[i : i + 4]) for i in range(start - 1, start + 3)}
    tree = propose(drafter, state, view_of(drafter, [line[: start + 2]])).tree
    assert tree.valid.all() and tree.tokens[0].tolist() == line[start + 1 : start + 5]


def test_the_text_enters_the_pool():
    drafter = Lookahead(level=3, window=2, guesses=G, nodes=4, buckets=K).bind(TabularLM(V))
    rng = np.random.default_rng(2)
    prompts = [rng.integers(0, 3, 11).tolist(), rng.integers(0, 3, 3).tolist(), [1]]
    want = [{}, {}, {}]
    state = drafter.init({}, 3, 24)
    view = view_of(drafter, prompts)
    for begin in (0, 6):
        columns = begin + np.arange(6)
        tokens = np.asarray(view.tokens)
        real = columns[None] < np.asarray(view.length)[:, None] - 1
        block = Block(jnp.asarray(tokens[:, columns]), jnp.asarray(columns)[None], jnp.zeros(3, int))
        chunk = Chunk(block, jnp.asarray(real), jnp.asarray(tokens[:, columns + 1]))
        state = jax.jit(drafter.prefill, static_argnums=3)({}, state, chunk, None)
        for held, text in zip(want, prompts, strict=True):
            part = text[begin : begin + 7]  # a chunk's tokens and the one that follows
            oracle.pool_insert(held, [part[i : i + 3] for i in range(len(part) - 2)], K, G)
    for row in range(3):
        assert entries(state.pool[row]) == want[row]
    assert state.length.tolist() == [10, 2, 0]
    # the prompt is in; three new tokens bring the n-grams that end at them, no other
    proposal = propose(drafter, state, view)
    assert all(entries(proposal.draft.pool[row]) == want[row] for row in range(3))
    longer = [text + [4, 5, 6] for text in prompts]
    state = dataclasses.replace(proposal.draft, window=jnp.full_like(state.window, -1))
    state = propose(drafter, state, view_of(drafter, longer)).draft
    for row, (held, text) in enumerate(zip(want, longer, strict=True)):
        ends = range(max(len(text) - 3, 2), len(text))
        oracle.pool_insert(held, [text[e - 2 : e + 1] for e in ends], K, G)
        assert entries(state.pool[row]) == held
    off = dataclasses.replace(drafter, text=False)
    assert (propose(off, off.init({}, 3, 24), view_of(off, longer)).draft.pool == -1).all()


@pytest.mark.slow
@pytest.mark.parametrize("text", [True, False])
def test_it_saves_steps_on_text_that_repeats(text):
    lm = TabularLM(12, order=1)
    weights = {"target": random(jax.random.key(0), 12, 1, concentration=0.1)}
    drafter = Lookahead(level=4, window=4, guesses=2, nodes=7, text=text)
    counts = []
    for each in (drafter, None):
        decoder = specjax.speculative(lm, each)
        prompts = specjax.Prompts.of([[1, 2], [3]], [48, 49])
        state = jax.jit(functools.partial(decoder.init, capacity=60))(weights, prompts)
        state = specjax.run(decoder, weights, state)
        counts.append((np.asarray(state.tokens)[:, :50].tolist(), int(state.stats.steps.sum())))
    assert counts[0][0] == counts[1][0]
    assert counts[0][1] < counts[1][1] / 2


def test_sizes():
    drafter = Lookahead()
    assert drafter.bind(TabularLM(100)).buckets == 100 and not drafter.is_chain and drafter.depth == drafter.level - 1
    state = drafter.bind(TabularLM(5000)).init({}, 2, 8)
    assert state.pool.nbytes == 2 * 4 * drafter.buckets * drafter.guesses * drafter.level
    with pytest.raises(ValueError, match="level >= 3"):
        Lookahead(level=2)
    with pytest.raises(ValueError, match="2 to 7 nodes"):
        Lookahead(level=4, guesses=2, nodes=8)
