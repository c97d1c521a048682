"""Prompt lookup against a plain search of the text."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specjax.draft import PromptLookup, View
from specjax.reference import drafting as oracle

B, L = 4, 24
DRAFTERS = [
    PromptLookup(length=5, ngram=3, min_ngram=1),
    PromptLookup(length=8, ngram=2, min_ngram=2),
    PromptLookup(length=6, ngram=4, min_ngram=1, factor=1.5),
]


def view(texts, garbage=0):
    tokens = np.full((len(texts), L), garbage)
    for row, text in enumerate(texts):
        tokens[row, : len(text)] = text
    lengths = jnp.asarray([len(text) for text in texts])
    return View(jnp.asarray(tokens, jnp.int32), lengths, jnp.ones(len(texts), bool), (), max_depth=8)


propose = jax.jit(lambda drafter, view: drafter.propose({}, (), view, None).tree, static_argnums=0)


def proposals(drafter, texts, garbage=0):
    tree = propose(drafter, view(texts, garbage))
    assert tree.is_chain and tree.nodes == drafter.nodes and tree.max_depth == drafter.depth
    assert tree.tokens[:, 0].tolist() == [text[-1] for text in texts]
    return [[t for t, ok in zip(*row, strict=True) if ok] for row in zip(
        np.asarray(tree.tokens)[:, 1:].tolist(), np.asarray(tree.valid)[:, 1:].tolist(), strict=True
    )]  # fmt: skip


texts_of = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=L), min_size=B, max_size=B)


@settings(max_examples=40, deadline=None)
@given(texts_of, st.integers(0, 2))
def test_equal_to_the_search_whatever_lies_beyond_the_text(texts, garbage):
    for drafter in DRAFTERS:
        fields = drafter.length, drafter.ngram, drafter.min_ngram, drafter.factor
        assert proposals(drafter, texts, garbage) == [oracle.prompt_lookup(text, *fields) for text in texts]


@settings(max_examples=20, deadline=None)
@given(st.lists(st.permutations(range(6)), min_size=B, max_size=B), st.integers(1, 6), st.integers(0, 11))
def test_periodic_text_goes_on_with_its_period(words, period, extra):
    texts = [(word[:period] * L)[: period + 1 + extra] for word in words]
    for text, got in zip(
        texts, proposals(PromptLookup(length=5, min_ngram=1, factor=5), texts, garbage=9), strict=True
    ):
        assert got == [text[(len(text) + i) % period] for i in range(5)]


def test_nothing_beyond_the_text_is_proposed():
    """Beyond its length every row is filled with a token that its text does not have."""
    rng = np.random.default_rng(0)
    for _ in range(20):
        texts = [rng.integers(0, 3, rng.integers(1, L + 1)).tolist() for _ in range(B)]
        for drafter in DRAFTERS:
            assert all(9 not in row for row in proposals(drafter, texts, garbage=9))


def test_the_longest_match_wins_then_the_most_recent():
    texts = [[1, 2, 3, 7, 3, 8, 1, 2, 3], [4, 5, 4, 6, 4], [1, 2], [5]]
    got = proposals(PromptLookup(length=2, ngram=3, min_ngram=1), texts)
    assert got == [[7, 3], [6, 4], [], []]


def test_a_longer_match_proposes_more():
    texts = [[1, 2, 3, 4, 5, 6, 7, 8, 9, 0, *ending] for ending in ([1], [1, 2], [1, 2, 3], [])]
    assert [len(row) for row in proposals(PromptLookup(length=8, ngram=3, min_ngram=1, factor=2), texts)] == [
        2,
        4,
        6,
        0,
    ]


def test_garbage_tokens_do_not_stand_for_a_match():
    assert proposals(PromptLookup(length=2, min_ngram=1), [[1, 2], [3], [1, 2, 3], [0]], garbage=0) == [[]] * 4


@pytest.mark.parametrize(
    "bad", [{"length": 0}, {"ngram": 0}, {"min_ngram": 0}, {"ngram": 2, "min_ngram": 3}, {"factor": 0.5}]
)
def test_bad_sizes(bad):
    with pytest.raises(ValueError, match="prompt_lookup"):
        PromptLookup(**bad)
