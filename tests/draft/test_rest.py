"""REST against a search of the whole store, and its tree against counted prefixes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import specjax
from specjax.draft import Rest, View
from specjax.draft.datastore import build
from specjax.draft.rest import frequent, longest, search
from specjax.models.tabular import TabularLM, random
from specjax.prompts import Prompts
from specjax.reference import retrieval as oracle
from specjax.sampling import row_keys

V, B, L = 7, 16, 40
DRAFTER = Rest(nodes=9, length=4, matches=2048).bind(TabularLM(V))
propose = jax.jit(lambda drafter, store, view: drafter.propose({"draft": store}, (), view, None).tree, static_argnums=0)
found = jax.jit(longest, static_argnums=2)


@pytest.fixture(scope="module")
def library():
    """10,000 random tokens in documents of all sizes, with long repeats, and their datastore."""
    rng = np.random.default_rng(0)
    documents = [rng.integers(0, V, size).tolist() for size in (4000, 1, 0, 2500, 2, 1500, 300, 40)]
    documents.append((documents[0][100:160] * 20)[:1100] + documents[3][:400])
    assert sum(map(len, documents)) > 9_500
    return documents, jax.tree.map(jnp.asarray, build(documents, V))


def some_texts(rng, documents):
    """Pieces of the store, pieces with another beginning, and noise; some shorter than the span."""
    out = []
    for i in range(B):
        size = int(rng.integers(1, L))
        text = rng.integers(0, V, size)
        if i % 4:
            document = documents[(0, 3, 5, -1)[rng.integers(4)]]
            begin = rng.integers(0, len(document) - size)
            piece = np.asarray(document[begin : begin + size])
            cut = rng.integers(0, size) if i % 4 == 1 else 0
            text = np.concatenate([text[:cut], piece[cut:]])
        out.append(text.tolist())
    return out


def view(texts):
    tokens = np.zeros((len(texts), L), np.int32)
    for row, text in enumerate(texts):
        tokens[row, : len(text)] = text
    return View(jnp.asarray(tokens), jnp.asarray([len(t) for t in texts]), jnp.ones(len(texts), bool), (), max_depth=4)


def strings(tree, row):
    return oracle.strings(*(np.asarray(x)[row] for x in (tree.tokens, tree.parent, tree.valid)))


def recent(texts, span):
    out = np.full((len(texts), span), -1)
    for row, text in enumerate(texts):
        back = text[::-1][:span]
        out[row, : len(back)] = back
    return jnp.asarray(out, jnp.int32)


def test_the_longest_suffix_and_all_its_matches_are_found(library):
    documents, store = library
    rng = np.random.default_rng(1)
    lengths = set()
    for _ in range(4):
        texts = some_texts(rng, documents)
        first, count, length = (np.asarray(x) for x in found(store, recent(texts, 16), 2))
        for row, text in enumerate(texts):
            want = oracle.longest_match(documents, text, 16, 2)
            assert count[row] == len(want), text
            starts = np.asarray(store["suffixes"])[first[row] : first[row] + count[row]]
            tokens = np.asarray(store["tokens"])
            assert sorted(s[:8] for s in want) == sorted(_until(tokens[at : at + 8].tolist()) for at in starts)
            if want:  # one more token would match nothing
                assert length[row] == 16 or not oracle.longest_match(documents, text, 16, int(length[row]) + 1)
                assert oracle.longest_match(documents, text, int(length[row]), int(length[row])) == want
                lengths.add(int(length[row]))
    assert {2, 4, 5, 6, 16} <= lengths


@pytest.mark.parametrize("size", [1, 2, 8, 9, 64, 512])
def test_a_text_is_placed_before_and_after_its_equals(size):
    """Sizes around the powers of the search's fan, where its intervals come out even."""
    text = np.random.default_rng(size).integers(1, 6, size + 1)
    store = jax.tree.map(jnp.asarray, build([text.tolist()], 7))
    asked = jnp.arange(7, dtype=jnp.int32)[:, None]
    got = placed(store, asked, jnp.ones((7, 2), jnp.int32), (False, True))
    before = np.sort(text[:-1])
    want = np.stack([np.searchsorted(before, np.arange(7), side) for side in ("left", "right")], axis=1)
    np.testing.assert_array_equal(got, want)


placed = jax.jit(search, static_argnums=3)


def _until(tokens):
    return tuple(tokens[: tokens.index(V)] if V in tokens else tokens)


def test_what_is_kept_are_the_most_frequent_prefixes(library):
    """Brute force over the store: the same counts for each kept node, none more frequent left out, parents before them."""
    documents, store = library
    rng = np.random.default_rng(2)
    most = 0
    for _ in range(4):
        texts = some_texts(rng, documents)
        tree = propose(DRAFTER, store, view(texts))
        assert tree.tokens[:, 0].tolist() == [text[-1] for text in texts]
        for row, text in enumerate(texts):
            counts = oracle.prefix_counts(oracle.longest_match(documents, text, 16, 2), DRAFTER.length)
            got = strings(tree, row)
            check_kept(got, counts, DRAFTER.nodes)
            valid = np.asarray(tree.valid[row])
            assert valid[: 1 + len(got)].all() and not valid[1 + len(got) :].any()
            assert np.asarray(tree.depth[row])[1 : 1 + len(got)].tolist() == [len(string) for string in got]
            most = max(most, max(counts.values(), default=0))
    assert most > 20


def check_kept(got, counts, nodes):
    assert len(got) == len(set(got)) == min(nodes - 1, len(counts))
    assert all(string[:-1] in ((), *got[:i]) for i, string in enumerate(got))
    order = lambda string: (-counts[string], len(string))
    assert [order(string) for string in got] == sorted(map(order, counts))[: nodes - 1]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.integers(0, 2), max_size=3), min_size=6, max_size=6))
def test_prefixes_are_counted(sequences):
    tokens, real = np.zeros((1, 6, 3), np.int32), np.zeros((1, 6, 3), bool)
    for row, sequence in enumerate(sequences):
        tokens[0, row, : len(sequence)], real[0, row, : len(sequence)] = sequence, True
    for nodes in (2, 5, 19):
        tree = counted(jnp.asarray([9]), jnp.asarray(tokens), jnp.asarray(real), nodes)
        check_kept(strings(tree, 0), oracle.prefix_counts(sequences, 3), nodes)


counted = jax.jit(frequent, static_argnums=3)


def test_more_matches_than_are_read(library):
    """Sixteen of some hundreds, at even distances: every string occurs, and from all over the range."""
    documents, store = library
    few = Rest(nodes=12, length=2, matches=16).bind(TabularLM(V))
    texts = [[documents[0][i], documents[0][i + 1]] for i in range(B)]
    tree = propose(few, store, view(texts))
    for row, text in enumerate(texts):
        counts = oracle.prefix_counts(oracle.longest_match(documents, text, 16, 2), 2)
        assert max(counts.values()) > 16
        got = strings(tree, row)
        assert set(got) <= set(counts) and len({string[0] for string in got}) >= 3


def test_no_match_reaches_from_one_document_into_another():
    store = jax.tree.map(jnp.asarray, build([[1, 2, 3], [4, 5], [3, 4, 6]], V))
    tree = propose(DRAFTER, store, view([[2, 3], [3, 4], [4, 5], [6], [1, 2, 3, 4], [5, 1, 2]]))
    assert [strings(tree, row) for row in range(6)] == [[], [(6,)], [], [], [(6,)], [(3,)]]


def test_one_token_is_enough_where_it_is_allowed():
    store = jax.tree.map(jnp.asarray, build([[1, 2, 3, 2, 3, 2, 4]], V))
    one = Rest(nodes=3, length=1, matches=4, min_span=1).bind(TabularLM(V))
    assert strings(propose(one, store, view([[2]])), 0) == [(3,), (4,)]
    assert strings(propose(DRAFTER, store, view([[2]])), 0) == []


def test_a_store_of_two_tokens():
    store = jax.tree.map(jnp.asarray, build([[5, 6]], V))
    one = Rest(nodes=3, length=2, matches=4, min_span=1).bind(TabularLM(V))
    assert [strings(propose(one, store, view([[5], [6], [0, 5]])), row) for row in range(3)] == [[(6,)], [], [(6,)]]


@jax.jit
def begin(params):
    prompts = Prompts.of([[1, 2], [3, 4]], 40, keys=row_keys(0, "ab"), temperature=[0.0, 1.0])
    return DECODER.init(params, prompts, capacity=50)


LM = TabularLM(12, order=2)
DECODER = specjax.speculative(LM, Rest(nodes=8, length=4, matches=8))


@pytest.mark.slow
def test_a_store_of_the_targets_own_text_saves_steps_and_changes_none():
    target = random(jax.random.key(0), 12, 2, concentration=0.1)

    def run(documents):
        params = {"target": target, "draft": jax.tree.map(jnp.asarray, build(documents, 12))}
        state = specjax.run(DECODER, params, begin(params))
        return np.asarray(state.tokens)[:, :42], np.asarray(state.stats.steps)

    other, slow = run([[5] * 42] * 2)
    own, quick = run(other.tolist())
    np.testing.assert_array_equal(own, other)
    assert (quick <= 14).all() and (slow > 20).all()


def test_shapes_and_bad_input():
    assert DRAFTER.depth == 4 and DRAFTER.rungs == (1, 3, 5, 9) and not DRAFTER.is_chain
    for wrong in ({"nodes": 1}, {"nodes": 99, "length": 2, "matches": 3}, {"length": 0}, {"matches": 0}):
        with pytest.raises(ValueError, match="nodes in"):
            Rest(**wrong)
    for wrong in ({"span": 65}, {"min_span": 0}, {"min_span": 17}):
        with pytest.raises(ValueError, match="span"):
            Rest(**wrong)
