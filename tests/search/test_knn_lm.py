"""A kNN-LM: whatever neighbours are guessed, the text is that of a loop that asks before every token."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.two_models import EOS, LARGE, LETTERS, PROMPTS

import specjax
from specjax.lm import Block, Wants
from specjax.search import Dense, Entries, Faiss, KnnLm, build_entries

NEW = 24
TEXT = np.random.default_rng(0).integers(8, 24, 300).tolist()
ENTRIES = build_entries(LARGE, TEXT, window=64)
DRAWN = {"temperature": 1.3, "seed": 4}


def said(records):
    return [(own.tokens, own.text, own.finish_reason) for own in records]


def way(**fields):
    return KnnLm(ENTRIES, neighbours=8, weight=0.6, heat=5.0, **fields)


def forward(ids):
    """The last token's hidden state and logits, of a text that is read anew."""
    final, logits = whole(jnp.asarray([[*ids, *[0] * (64 - len(ids))]]))
    return np.asarray(final[0, len(ids) - 1]), np.asarray(logits[0, len(ids) - 1])


@jax.jit
def whole(tokens):
    block = Block(tokens, jnp.arange(64)[None], jnp.zeros(1, jnp.int32))
    cache = LARGE.lm.init_cache(1, 64, jnp.float32)
    output = LARGE.lm(LARGE.params, block, cache, wants=Wants(logits=True, final=True))
    return output.final, output.logits


def loop(prompt):
    """The greedy text in numpy, nothing kept."""
    text = []
    while len(text) < NEW and not (text and text[-1] in EOS):
        hidden, logits = forward([*prompt, *text])
        squares = ((ENTRIES.vectors.astype(float) - hidden) ** 2).sum(1)
        ids = np.argsort(squares, kind="stable")[:8]
        near = np.exp(-(squares[ids] - squares[ids].min()) / 5)
        mixed = 0.4 * np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()
        np.add.at(mixed, ENTRIES.tokens[ids], 0.6 * near / near.sum())
        text.append(int(mixed.argmax()))
    return text


def test_the_plain_way_is_the_loop_that_keeps_nothing():
    """And its neighbours change the text."""
    records = way(ahead=1)(LARGE, PROMPTS, max_new_tokens=NEW)
    assert [own.tokens for own in records] == [loop(own) for own in PROMPTS]
    assert said(records) != said(dataclasses.replace(way(ahead=1), weight=0.0)(LARGE, PROMPTS, max_new_tokens=NEW))
    assert all(own.guesses == 0 and own.retrievals == len(own.tokens) == own.passes for own in records)


@pytest.mark.parametrize("options", [{}, DRAWN])
def test_without_weight_it_is_plain_decoding(options):
    records = KnnLm(ENTRIES, weight=0.0, ahead=3)(LARGE, PROMPTS, max_new_tokens=NEW, **options)
    plain = specjax.generate(LARGE, PROMPTS, drafter="none", max_new_tokens=NEW, progress=False, **options)
    assert [own.tokens for own in records] == [own.tokens for own in plain]


@pytest.mark.parametrize("options", [{}, DRAWN])
def test_guessed_neighbours_change_no_text(options):
    """Some guesses are right and some wrong, and fewer retrievals are asked than tokens are written."""
    wanted = way(ahead=1)(LARGE, PROMPTS, max_new_tokens=NEW, **options)
    for fields in ({"ahead": 2, "following": 0}, {"ahead": 4}, {"ahead": 7}):
        found = way(**fields)(LARGE, PROMPTS, max_new_tokens=NEW, **options)
        assert said(found) == said(wanted), fields
        guesses, right = sum(own.guesses for own in found), sum(own.matches for own in found)
        assert 0 < right < guesses
        assert sum(own.retrievals for own in found) < sum(own.retrievals for own in wanted)


def test_a_row_depends_on_no_other():
    found = way(ahead=4)(LARGE, PROMPTS, max_new_tokens=NEW, **DRAWN)
    assert said(way(ahead=4)(LARGE, PROMPTS, max_new_tokens=NEW, batch_size=1, **DRAWN)) == said(found)


def test_entries_are_hidden_states_and_the_tokens_after_them():
    hidden, _ = forward(TEXT[:20])
    np.testing.assert_allclose(ENTRIES.vectors[19], hidden, atol=1e-4)
    assert ENTRIES.tokens.tolist() == TEXT[1:]
    second, _ = forward(TEXT[64:70])
    np.testing.assert_allclose(ENTRIES.vectors[69], second, atol=1e-4)


def test_entries_of_a_file(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("".join(LETTERS[token] for token in TEXT), encoding="utf-8")
    found = build_entries(LARGE, path, window=64)
    np.testing.assert_array_equal(found.vectors, ENTRIES.vectors)
    np.testing.assert_array_equal(found.tokens, ENTRIES.tokens)


def test_nearest_is_exact():
    """An entry is its own nearest, and the order is that of distances."""
    asked = ENTRIES.vectors[[5, 77]] + 0.01
    for query, own in zip(asked, ENTRIES.nearest()(asked, 6), strict=True):
        distances = ENTRIES.distances(query, np.arange(len(TEXT) - 1))
        np.testing.assert_allclose(distances[own], np.sort(distances)[:6], rtol=1e-6)


def test_faiss_gives_the_same_text():
    faiss = pytest.importorskip("faiss")
    exact = ENTRIES.nearest()
    assert isinstance(exact, Dense)
    index = faiss.IndexFlatIP(exact.vectors.shape[1])
    index.add(exact.vectors)
    found = way(retriever=Faiss(index, exact.embed))(LARGE, PROMPTS, max_new_tokens=NEW)
    assert said(found) == said(way()(LARGE, PROMPTS, max_new_tokens=NEW))


WRONG = {
    "weight must be from 0 to 1": {"weight": 1.5},
    "heat must be above 0": {"heat": 0.0},
    "neighbours must be a whole number from 1": {"neighbours": 0},
    "ahead must be a whole number from 1": {"ahead": True},
    "following must be a whole number from 0": {"following": -1},
    "retriever must be a function": {"retriever": 3},
    "make them with build_entries": {"entries": [1]},
}


@pytest.mark.parametrize("message", [*WRONG])
def test_wrong_fields(message):
    with pytest.raises(ValueError, match=message):
        KnnLm(**{"entries": ENTRIES, **WRONG[message]})


def test_wrong_entries_and_calls(tmp_path):
    narrow = Entries(ENTRIES.vectors[:, :3], ENTRIES.tokens)
    other = Entries(ENTRIES.vectors, ENTRIES.tokens + 20)
    calls = [
        ("entries are 3 wide", lambda: KnnLm(narrow)(LARGE, PROMPTS)),
        ("entries have tokens that", lambda: KnnLm(other)(LARGE, PROMPTS)),
        ("lower max_new_tokens", lambda: way()(LARGE, PROMPTS, max_new_tokens=1000)),
        ("temperature must be", lambda: way()(LARGE, PROMPTS, temperature=-1)),
        ("a retriever gives for each", lambda: way(retriever=lambda q, k: [[999]])(LARGE, PROMPTS)),
        ("vectors of entries must be finite", lambda: Entries(ENTRIES.vectors * np.nan, ENTRIES.tokens)),
        ("at least one", lambda: Entries(ENTRIES.vectors, ENTRIES.tokens[:4])),
        ("two tokens or more", lambda: build_entries(LARGE, [3])),
        ("token ids must be from 0", lambda: build_entries(LARGE, [3, 99])),
        ("window must be", lambda: build_entries(LARGE, TEXT, window=0)),
        ("give the path of a text file", lambda: build_entries(LARGE, tmp_path / "none")),
        ("no tokenizer", lambda: build_entries(dataclasses.replace(LARGE, tokenizer=None), "text.txt")),
    ]
    for message, call in calls:
        with pytest.raises(ValueError, match=message):
            call()


def test_no_prompts_no_texts():
    assert way()(LARGE, []) == []


def test_a_model_with_running_states_is_refused():
    lm = dataclasses.replace(LARGE.lm)
    object.__setattr__(lm, "states", lambda cache: jnp.zeros(1))
    with pytest.raises(ValueError, match="running states"):
        way()(dataclasses.replace(LARGE, lm=lm), PROMPTS)
