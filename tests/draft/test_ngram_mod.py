"""The table of hashed n-grams: known slots, drafts as the oracle makes them, and when it is cleared."""

import dataclasses
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.draft import NgramMod, Proposal, Verdict, View
from specjax.draft.ngram_mod import CHUNK, index
from specjax.reference.drafting import NgramTable
from specjax.tree import Topology, Tree

B, L = 3, 100
DRAFTER = NgramMod(length=5, min_length=2, ngram=2, slots=64)
propose = jax.jit(lambda state, view: DRAFTER.propose({}, state, view, None))
observe = jax.jit(lambda *args: DRAFTER.observe({}, *args))


@pytest.mark.parametrize(
    ("gram", "slots", "found"),
    [((1, 2), 1024, 815), ((2, 1), 1024, 603), ((1, 2, 3), 1024, 70), ((7, 8, 9), 1 << 22, 1686224),
     ((101, 2023, 2003), 1 << 22, 1024347)],
)  # fmt: skip
def test_slots_are_the_originals(gram, slots, found):
    assert NgramTable(len(gram), slots).index(gram) == found
    assert int(index(jnp.asarray(gram), slots)) == found


def view_of(texts, live=(True,) * B):
    tokens = np.full((B, L), 3)
    for row, text in enumerate(texts):
        tokens[row, : len(text)] = text
    lengths = jnp.asarray([len(text) for text in texts])
    return View(jnp.asarray(tokens, jnp.int32), lengths, jnp.asarray(live), (), max_depth=5)


def drafts(tree):
    return [[t for t, ok in zip(*row, strict=True) if ok][1:] for row in zip(
        tree.tokens.tolist(), tree.valid.tolist(), strict=True
    )]  # fmt: skip


def test_drafts_are_the_oracles_as_texts_grow():
    """Three rows with few tokens, so that n-grams share slots and rows overwrite each other."""
    rng = np.random.default_rng(0)
    texts = [rng.integers(0, 9, size).tolist() for size in (3, 9, 30)]
    state, table, seen, some = DRAFTER.init({}, B, L), NgramTable(2, 64), [0] * B, 0
    for _ in range(25):
        made = propose(state, view_of(texts))
        state = made.draft
        for row, text in enumerate(texts):
            table.add(text, seen[row])
            seen[row] = max(len(text) - 2, 0)
        wanted = [table.draft(text, 5, 2) for text in texts]
        assert drafts(made.tree) == wanted
        assert {i: t for i, t in enumerate(state.entries.tolist()) if t >= 0} == table.entries
        assert int(state.used[0]) == len(table.entries)
        some += sum(map(len, wanted))
        texts = [text + rng.integers(0, 9, rng.integers(1, 4)).tolist() for text in texts]
    assert some > 100


def test_a_long_prompt_is_learnt_whole_and_a_finished_row_not_at_all():
    text = np.random.default_rng(1).integers(0, 9, 2 * CHUNK + 9).tolist()
    state = propose(DRAFTER.init({}, B, L), view_of([text, [8, 8, 8], [1]], (True, False, True))).draft
    table = NgramTable(2, 64)
    table.add(text)
    assert {i: t for i, t in enumerate(state.entries.tolist()) if t >= 0} == table.entries
    assert state.read.tolist() == [len(text) - 2, 0, 0]


def test_it_is_cleared_after_low_steps_in_a_row_and_for_a_text_when_it_is_full():
    """A step without drafts counts for nothing, a good one ends the streak; the texts are learnt again."""
    view = view_of([[1, 2, 3, 1, 2]] * B)
    state = propose(DRAFTER.init({}, B, L), view).draft
    some = jnp.broadcast_to(jnp.arange(6)[None], (B, 6))
    chain = lambda count: jnp.where(some[:, :5] < count, 4, -1)
    whole = Proposal(Tree.of(Topology.chain(5), some, jnp.ones((B, 6), bool)), ())
    verdict = lambda accepted: Verdict(
        some, jnp.full(B, accepted), jnp.zeros(B, int), jnp.full(B, accepted + 1), jnp.where(some < accepted, 4, 8)
    )
    for drafted, accepted, low in ((4, 0, 1), (0, 0, 1), (4, 1, 0), *[(4, 0, i) for i in (1, 2, 3, 4, 5)]):
        marked = dataclasses.replace(state, entries=state.entries.at[50].set(7))
        assert int(propose(marked, view).draft.entries[50]) == 7
        state = observe(dataclasses.replace(state, chain=chain(drafted)), whole, None, verdict(accepted))
        assert int(state.low[0]) == low
    after = propose(dataclasses.replace(state, entries=state.entries.at[50].set(7)), view)
    assert drafts(after.tree) == [[3, 1, 2, 3, 1]] * B
    assert int(after.draft.entries[50]) == -1 and int(after.draft.low[0]) == 0 and int(after.draft.used[0]) == 3
    for used, read, kept in ((16, 0, 7), (17, 3, 7), (17, 0, -1)):
        full = dataclasses.replace(
            marked, used=jnp.asarray([used]), low=jnp.asarray([0]), read=jnp.asarray([3, 3, read])
        )
        assert int(propose(full, view).draft.entries[50]) == kept


def test_fields():
    for bad in ({"length": 0}, {"min_length": 13}, {"ngram": 0}, {"slots": 1000}, {"slots": 0}):
        with pytest.raises(ValueError, match="ngram_mod needs"):
            NgramMod(**bad)


def test_what_another_drafter_beside_it_drafts_does_not_count():
    """Its own chain is compared with what was written, whatever else stood in the tree."""
    drafter = NgramMod(3, ngram=1, slots=64)
    state = dataclasses.replace(drafter.init({}, 3, 16), chain=jnp.asarray([[4, 5, -1], [4, 5, 6], [-1, -1, -1]]))
    tree = Tree.of(Topology.from_counts("9 | 3x9"), jnp.ones((3, 37), jnp.int32), jnp.ones((3, 37), bool))
    low = []
    for emitted in ([4, 5, 9], [4, 8, 9], [7, 5, 9]):
        verdict = SimpleNamespace(
            emitted=jnp.tile(jnp.asarray(emitted), (3, 1)), committed=jnp.asarray([3, 3, 3]), accepted=jnp.zeros(3, int)
        )
        low.append(drafter.observe({}, state, SimpleNamespace(tree=tree), None, verdict).low.tolist())
    assert low == [[0], [0], [1]]
    verdict = SimpleNamespace(emitted=jnp.tile(jnp.asarray([4, 9, 9]), (3, 1)), committed=jnp.asarray([2, 2, 2]))
    cut = Tree.of(Topology.chain(3), jnp.ones((3, 4), jnp.int32), jnp.broadcast_to(jnp.arange(4) < 2, (3, 4)))
    state = dataclasses.replace(state, chain=jnp.asarray([[4, 5, 6]] * 3))
    assert drafter.observe({}, state, SimpleNamespace(tree=cut), None, verdict).low.tolist() == [0]
