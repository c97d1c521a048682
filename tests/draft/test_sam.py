"""SAM decoding: the automaton against known states, the scan against the automaton, and the datastore's matches."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specjax.draft import Sam, View
from specjax.draft.datastore import build
from specjax.reference.sam import Automaton

B, L = 4, 20


def automaton(text):
    made = Automaton()
    lengths = []
    for token in text:
        made.add(token)
        lengths.append(made.cursor[1])
    return made, lengths


def test_the_oracle_has_the_originals_states():
    made, _ = automaton([1, 2, 3, 1, 2, 4, 1, 2])
    states = [(state.length, state.link, state.first) for state in made.states[1:]]
    assert states == [(1, 0, 1), (2, 0, 2), (3, 0, 3), (4, 1, 4), (5, 2, 5), (6, 0, 6), (7, 1, 7), (8, 2, 8)]
    assert made.cursor == (2, 2) and [made.match(token)[1] for token in (3, 4, 1, 5)] == [3, 3, 1, 0]
    assert automaton([7, 1, 2, 3, 8, 1, 2, 3, 9, 9, 9, 9])[1] == [0, 0, 0, 0, 0, 1, 2, 3, 0, 1, 2, 3]


propose = jax.jit(
    lambda drafter, params, view: drafter.propose({"draft": params}, (), view, None).tree, static_argnums=0
)


def drafts(drafter, texts, params=None):
    tokens = np.full((B, L), 1)
    for row, text in enumerate(texts):
        tokens[row, : len(text)] = text
    lengths = jnp.asarray([len(text) for text in texts])
    view = View(jnp.asarray(tokens, jnp.int32), lengths, jnp.ones(B, bool), (), max_depth=5)
    tree = propose(drafter, params, view)
    return [[t for t, ok in zip(*row, strict=True) if ok][1:] for row in zip(
        tree.tokens.tolist(), tree.valid.tolist(), strict=True
    )]  # fmt: skip


texts_of = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=L), min_size=B, max_size=B)


@settings(max_examples=40, deadline=None)
@given(texts_of)
def test_the_match_and_its_place_are_the_automatons(texts):
    drafter = Sam(5, min_match=1, factor=1.5)
    for text, draft in zip(texts, drafts(drafter, texts), strict=True):
        made, _ = automaton(text)
        state, match = made.cursor
        grown, first = list(text), made.states[state].first
        for i in range(min(5, int(1.5 * match))):
            grown.append(grown[first + i])
        assert draft == grown[len(text) :]


@pytest.mark.slow
def test_the_longer_match_wins_and_the_texts_own_counts_more():
    store = jax.tree.map(jnp.asarray, build([[5, 6, 7, 8], [5, 6, 7, 9], [4, 5, 6, 7, 9, 1]], 10))
    drafter = Sam(3, factor=2.0, bias=1, filled=True, vocab_size=10)
    texts = [[4, 5, 6, 7], [0, 5, 6, 7], [5, 6, 7, 2, 5, 6, 7], [6, 7, 3, 4, 5, 6, 7]]
    # the third match in the store is as long as the text's, the last one two tokens longer
    assert drafts(drafter, texts, store) == [[9, 1], [9, 1], [2, 5, 6], [9, 1]]
    assert drafts(dataclasses.replace(drafter, bias=2), texts, store)[3] == [3, 4, 5]
    assert drafts(dataclasses.replace(drafter, min_match=4), texts, store) == [[9, 1], [], [], [9, 1]]


def test_fields():
    for bad in ({"length": 0}, {"span": 65}, {"min_match": 0}, {"min_match": 40}, {"factor": 0.0}, {"matches": 0}):
        with pytest.raises(ValueError, match="sam needs"):
            Sam(**bad)
