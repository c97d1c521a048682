"""SuffixDecoding: the oracle against figures of the original's code, the drafts against the oracle, and the shared texts."""

import dataclasses
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import specjax
from specjax.assembly.registry import build_drafter
from specjax.draft import Suffix, View
from specjax.draft.datastore import build
from specjax.draft.heads.datastore import save_datastore
from specjax.draft.suffix import appended
from specjax.models.tabular import TabularLM, random
from specjax.prompts import Prompts
from specjax.reference import suffix as oracle
from specjax.sampling import row_keys
from specjax.verify import Rejection

B, L, ROOM = 4, 24, 8


# ---- the oracle -----------------------------------------------------------------------------------------------------

ONE, THREE = [[1, 2, 3, 1, 2, 4, 1, 2]], [[5, 6, 7, 8, 9], [5, 6, 7, 8, 2], [5, 6, 3]]
FIVES = [[1, 2, 3, 4, 5] * 2]


@pytest.mark.parametrize(
    ("sequences", "text", "span", "factor", "min_prob", "found"),
    [
        (ONE, ONE[0], 64, 1, 0.1, (2 / 3, 2, [1 / 3] * 2)),
        (ONE, ONE[0], 64, 4, 0.1, (2.0, 2, [1 / 3] * 6)),
        (THREE, [9, 5, 6], 64, 1, 0.1, (4 / 3, 2, [2 / 3] * 2)),
        (THREE, [9, 5, 6], 64, 2, 0.1, (5 / 3, 2, [2 / 3, 2 / 3, 1 / 3])),
        (THREE, [9, 5, 6], 64, 4, 0.5, (4 / 3, 2, [2 / 3] * 2)),
        (FIVES, FIVES[0], 3, 4, 0.1, (1.0, 1, [1 / 2] * 2)),
    ],
)
def test_the_oracle_has_the_originals_figures(sequences, text, span, factor, min_prob, found):
    score, size, chances = oracle.speculate(oracle.counts_of(sequences, span), text, 8, span, factor, 0.0, min_prob)
    assert (score, size) == (pytest.approx(found[0], abs=1e-4), found[1]) and chances == pytest.approx(found[2])


@pytest.mark.parametrize(
    ("sequences", "text", "factor", "offset", "score", "chances"),
    [
        (ONE, ONE[0], 4, 0, 8 / 3, [1 / 3] * 8),
        (THREE, [9, 5, 6], 2, 0, 2.0, [2 / 3, 2 / 3, 1 / 3, 1 / 3]),
        (THREE, [9, 5, 6], 4, 0, 7 / 3, [2 / 3, 2 / 3, 1 / 3, 1 / 3, 1 / 3]),
        (THREE, [9, 5, 6], 0, 3, 5 / 3, [2 / 3, 2 / 3, 1 / 3]),
    ],
)
def test_the_oracles_trees_have_the_originals_figures(sequences, text, factor, offset, score, chances):
    found = oracle.speculate(oracle.counts_of(sequences, 64), text, 8, 64, factor, offset, 0.1, tree=True)
    assert found == (pytest.approx(score, abs=1e-4), 2, pytest.approx(chances))


DEEP = (
    (
        [1, 4, 4, 2, 1, 1, 4, 4, 4, 2, 1, 1, 3, 3, 4, 4, 4, 4, 4, 4],
        [(2,), (2, 1), (2, 1, 1), (4,), (4, 4), (4, 4, 4)],
    ),
    (
        [1, 1, 2, 3, 1, 1, 2, 3, 1, 3, 2, 2, 2, 2, 1, 1, 1, 1, 1, 1],
        [(1,), (1, 1), (1, 1, 1), (2,), (2, 3), (2, 3, 1)],
    ),
)
"""Texts, and what the original's program drafts for them with six tokens; no token left out has the last one's chance."""


def test_trees_are_the_originals_three_levels_deep():
    drafter = Suffix(6, span=64, factor=4.0, matches=48, pieces=0, tree=True)
    tree = propose(drafter, None, view_of([*(text for text, _ in DEEP), [1], [1]]))
    assert [sorted(ways_of(tree, row)) for row in range(B)] == [*(wanted for _, wanted in DEEP), [], []]
    assert not drafter.is_chain and (drafter.nodes, drafter.depth) == (7, 6)


# ---- drafts ---------------------------------------------------------------------------------------------------------

propose = jax.jit(lambda drafter, state, view: drafter.propose({}, state, view, None).tree, static_argnums=0)
DRAFTERS = [
    Suffix(5, span=8, factor=1.0, matches=48, pieces=0),
    Suffix(5, span=6, factor=0.5, offset=2.0, min_prob=0.3, matches=48, pieces=5, piece=ROOM),
]


def view_of(texts):
    tokens = np.full((B, L), 1)
    for row, text in enumerate(texts):
        tokens[row, : len(text)] = text
    lengths = jnp.asarray([len(text) for text in texts])
    return View(jnp.asarray(tokens, jnp.int32), lengths, jnp.ones(B, bool), (), max_depth=5)


def state_of(drafter, outputs):
    state = drafter.init({}, B, L)
    if state is None:  # without pieces there is none
        return None
    pieces = np.array(state.pieces)
    for piece, output in zip(pieces, outputs, strict=True):
        piece[: len(output)] = output
    return jax.tree.map(jnp.asarray, type(state)(pieces, state.head + 2, state.piece, state.written))


words = lambda most, count: st.lists(
    st.lists(st.integers(0, 2), min_size=1, max_size=most), min_size=count, max_size=count
)


@pytest.mark.slow
@pytest.mark.parametrize("drafter", DRAFTERS, ids=["own", "all"])
@settings(max_examples=25, deadline=None)
@given(words(L, B), words(ROOM, 5))
def test_drafts_are_the_oracles(drafter, texts, outputs):
    fields = drafter.length, drafter.span, drafter.factor, drafter.offset, drafter.min_prob
    tree = propose(drafter, state_of(drafter, outputs[: drafter.pieces]), view_of(texts))
    everywhere = oracle.counts_of(outputs[: drafter.pieces], drafter.span)
    for row, text in enumerate(texts):
        places = [oracle.counts_of([text], drafter.span), everywhere]
        found = [oracle.speculate(counts, text, *fields) for counts in places]
        score, _, chances = found[0] if found[0][0] >= found[1][0] - 1e-6 else found[1]
        drafted = [t for t, ok in zip(tree.tokens[row, 1:].tolist(), tree.valid[row, 1:].tolist(), strict=True) if ok]
        assert len(drafted) == len(chances)
        close = [i for i in (0, 1) if abs(found[i][0] - score) < 1e-6]
        assert any(_has(places[i], text, found[i], drafted) for i in close)


def ways_of(tree, row):
    """The tokens from the root's children down to every node."""
    parent, tokens = (np.asarray(x)[row].tolist() for x in (tree.parent, tree.tokens))
    found = {0: ()}
    for node in np.flatnonzero(np.asarray(tree.valid)[row])[1:].tolist():
        found[node] = (*found[parent[node]], tokens[node])
    return list(found.values())[1:]


@pytest.mark.slow
@pytest.mark.parametrize("drafter", DRAFTERS, ids=["own", "all"])
@settings(max_examples=25, deadline=None)
@given(words(L, B), words(ROOM, 5))
def test_trees_are_the_oracles(drafter, texts, outputs):
    drafter = dataclasses.replace(drafter, tree=True)
    fields = drafter.length, drafter.span, drafter.factor, drafter.offset, drafter.min_prob
    tree = propose(drafter, state_of(drafter, outputs[: drafter.pieces]), view_of(texts))
    everywhere = oracle.counts_of(outputs[: drafter.pieces], drafter.span)
    for row, text in enumerate(texts):
        places = [oracle.counts_of([text], drafter.span), everywhere]
        found = [oracle.speculate(counts, text, *fields, tree=True) for counts in places]
        score = found[0][0] if found[0][0] >= found[1][0] - 1e-6 else found[1][0]
        ways = ways_of(tree, row)
        assert len({*ways}) == len(ways)

        def chances(counts, size, text=text, ways=ways):
            match = tuple(text[len(text) - size :]) if size else ()
            return sorted((counts[(*match, *way)] / max(counts[match], 1) for way in ways), reverse=True)

        close = [i for i in (0, 1) if abs(found[i][0] - score) < 1e-6]
        assert any(chances(places[i], found[i][1]) == pytest.approx(found[i][2]) for i in close)


def _has(counts, text, found, drafted):
    """Whether a draft has the chances that it should have."""
    match = tuple(text[len(text) - found[1] :]) if found[1] else ()
    prefixes = [(*match, *drafted[: i + 1]) for i in range(len(drafted))]
    return [counts[prefix] / counts[match] for prefix in prefixes] == pytest.approx(found[2])


@pytest.mark.slow
def test_more_matches_than_are_counted():
    """The longest stay, then the newest: of three occurrences with a continuation, or of two."""
    texts = [[3, 1, 7, 1, 8, 1, 9, 1], [3, 1, 7, 1, 8, 3, 1]] * 2
    all_of, some = (
        propose(Suffix(5, span=8, factor=1.0, min_prob=0.3, matches=many, pieces=0), None, view_of(texts))
        for many in (3, 2)
    )
    assert all_of.valid.sum(axis=1).tolist() == [1, 3, 1, 3] and some.valid.sum(axis=1).tolist() == [2, 3, 2, 3]
    assert some.tokens[:2, 1:3].tolist() == [[8, -1], [7, 1]]


# ---- what rows have written -----------------------------------------------------------------------------------------


def written(pieces, steps=40, rows=3):
    """The pieces after rows wrote their own numbers, 1000 apart, and how many each wrote; some rows begin again."""
    rng = np.random.default_rng(0)
    state, counts = Suffix(3, pieces=pieces, piece=4).init({}, rows, L), np.arange(rows) * 1000
    for _ in range(steps):
        tokens, count = counts[:, None] + np.arange(4), rng.integers(0, 5, rows)
        state = write(state, jnp.asarray(tokens), jnp.asarray(count))
        counts += count
    return [[t for t in piece if t >= 0] for piece in state.pieces.tolist()], counts % 1000


write = jax.jit(appended)


def test_a_row_writes_all_of_its_text_into_pieces_of_its_own():
    pieces, counts = written(90)
    for row, count in enumerate(counts.tolist()):
        own = [piece for piece in pieces if piece and piece[0] // 1000 == row]
        assert sum(own, []) == list(range(1000 * row, 1000 * row + count)) and count > 40
        assert all(len(piece) == 4 for piece in own[:-1])


def test_the_oldest_piece_gives_way():
    pieces, counts = written(7)
    for piece in pieces:
        assert piece == list(range(piece[0], piece[0] + len(piece))), "two rows have written into one piece"
        assert counts[piece[0] // 1000] - piece[0] % 1000 <= 40
    assert {1000 * row + count - 1 for row, count in enumerate(counts.tolist())} <= {piece[-1] for piece in pieces}


@pytest.mark.slow
def test_pieces_begin_with_the_last_texts_of_a_datastore():
    store = jax.tree.map(
        jnp.asarray, build([[1, 2, 3, 4, 5], [6, 7], [1, 3]], 9)
    )  # 13 numbers with what lies between the texts
    of = lambda pieces: Suffix(3, pieces=pieces, piece=4, filled=True).bind(TabularLM(9)).init({"draft": store}, 1, L)
    assert of(5).pieces.tolist() == [
        [-1] * 5, [-1, 1, 2, 3, -1], [4, 5, -1, 6, -1], [7, -1, 1, 3, -1], [-1] * 5
    ]  # fmt: skip
    assert of(2).pieces.tolist() == [[5, -1, 6, 7, -1], [-1, 1, 3, -1, -1]]


@pytest.mark.slow
def test_what_one_row_wrote_helps_another_and_changes_no_text():
    """A prompt again, after its text was written: fewer steps, and as many where nothing is shared."""
    lm, prompts = TabularLM(30, order=2), [[1, 2], [3, 4], [1, 2]]
    params = {"target": random(jax.random.key(0), 30, 2), "draft": None}

    def run(drafter):
        decoder = specjax.speculative(lm, drafter)
        given = lambda own, names: Prompts.of(own, [26, 26], keys=row_keys(0, names), temperature=[0.0, 0.0])
        state = decoder.init(params, given(prompts[:1] * 2, "ab"), capacity=48)
        state = specjax.run(decoder, params, state)
        other = given(prompts[1:], "cd")
        state = specjax.decoder.insert(decoder, params, state, jnp.asarray([0, 1]), other)
        state = specjax.run(decoder, params, state)
        return np.asarray(state.tokens)[:, :26].tolist(), np.asarray(state.stats.steps)

    plain, _ = run(None)
    alone, steps = run(Suffix(pieces=0))
    shared, fewer = run(Suffix(pieces=8))
    params["draft"] = jax.tree.map(jnp.asarray, build([plain[1][2:]], 30))
    stored, fewest = run(Suffix(pieces=8, filled=True))
    assert plain == alone == shared == stored
    assert 2 * fewer[1] < steps[1] and fewest[1] <= fewer[1]


def test_a_line_may_name_a_datastore(tmp_path):
    target = SimpleNamespace(lm=TabularLM(9), tokenizer=None, name="nine", abstract=False, path=None)
    save_datastore(tmp_path, build([[1, 2, 3]], 9), "nine", 9, None)
    drafter, store = build_drafter(f"suffix:length=3,datastore={tmp_path}", target)
    assert (drafter.filled, drafter.length) == (True, 3) and store["tokens"].tolist() == [9, 1, 2, 3, 9]
    assert drafter.needs_params and build_drafter("suffix:length=3", target) == (Suffix(3, vocab_size=9), None)


def test_fields():
    for bad in ({"length": 0}, {"span": 1}, {"matches": 0}, {"factor": -1.0}, {"min_prob": 1.5}):
        with pytest.raises(ValueError, match="suffix needs length"):
            Suffix(**bad)
    for bad in ({"pieces": -1}, {"length": 12, "piece": 12}, {"pieces": 1 << 20}):
        with pytest.raises(ValueError, match="suffix needs pieces"):
            Suffix(**bad)
    specjax.speculative(TabularLM(4), Suffix(pieces=0), Rejection())
    with pytest.raises(ValueError, match="rows draft on their own"):
        specjax.speculative(TabularLM(4), Suffix(), Rejection())


def test_what_it_cannot_keep_is_refused():
    for fields, said in (
        ({"pieces": 0, "filled": True}, "leave pieces=0 or the datastore out"),
        ({"factor": float("nan")}, "suffix needs length"),
        ({"offset": float("nan")}, "a finite offset"),
        ({"pieces": 4, "piece": 12}, "of more than 12 tokens"),
    ):
        with pytest.raises(ValueError, match=said):
            Suffix(**fields)
    assert Suffix(200, pieces=0).init({}, 2, L) is None
    assert Suffix(3, pieces=2, piece=4).init({}, 3, L).pieces.shape == (3, 5)  # at least one for each row


def test_a_step_longer_than_a_piece_fills_one():
    """A drafter beside it may be deeper; the piece then holds the beginning, in its order."""
    state = Suffix(3, pieces=4, piece=4).init({}, 2, L)
    state = appended(state, jnp.asarray([[5, 6, 7, 8, 9, 10], [1, 2, 3, 4, 5, 6]]), jnp.asarray([6, 2]))
    assert state.pieces.tolist()[:2] == [[5, 6, 7, 8, -1], [1, 2, -1, -1, -1]]
