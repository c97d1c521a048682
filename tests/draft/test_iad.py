"""Input-guided aggressive decoding: the published program's places and passes, and drafts against a pointer that moves token by
token."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.draft import InputGuided, View
from specjax.reference.drafting import input_pointer, place_after

B, L, S = 4, 48, 20
DRAFTER = InputGuided(length=5, ngram=3)
propose = jax.jit(lambda drafter, state, view: drafter.propose({}, state, view, None), static_argnums=0)


def view_of(texts, sources=None):
    """Garbage that the inputs have lies beyond the texts."""
    pad = lambda rows, size, value: jnp.asarray([[*row, *[value] * (size - len(row))] for row in rows], jnp.int32)
    source = None if sources is None else pad(sources, S, -1)
    lengths = jnp.asarray([len(text) for text in texts], jnp.int32)
    return View(pad(texts, L, 1), lengths, jnp.ones(len(texts), bool), (), max_depth=5, source=source)


def passes(drafter, prompts, sources, outputs):
    """Lets every row write its output, and yields what is drafted after how many of its tokens."""
    state, done = drafter.init({}, len(prompts), L), [0] * len(prompts)
    while any(count < len(output) for count, output in zip(done, outputs, strict=True)):
        texts = [prompt + output[:count] for prompt, output, count in zip(prompts, outputs, done, strict=True)]
        made = propose(drafter, state, view_of(texts, sources))
        state, rows = made.draft, zip(made.tree.tokens.tolist(), made.tree.valid.tolist(), strict=True)
        drafts = [[t for t, ok in zip(*row, strict=True) if ok][1:] for row in rows]
        yield list(zip(drafts, done, strict=True))
        for row, (draft, output) in enumerate(zip(drafts, outputs, strict=True)):
            left = output[done[row] :]
            same = [a == b for a, b in zip([*draft, -1], left, strict=False)]
            done[row] += min((same + [False]).index(False) + 1, len(left))


def wanted(given, output, begins, drafter=DRAFTER):
    place = input_pointer(given, output, drafter.ngram, begins)
    return [] if place is None else list(given[place : place + drafter.length])


@pytest.mark.parametrize(
    ("text", "place"), [([7, 5], 4), ([9, 5], None), ([9], None), ([5], None), ([8], 5), ([7, 6], 2), ([5, 6, 7, 5], 4)]
)
def test_places_are_the_published_programs(text, place):
    assert place_after([5, 6, 7, 5, 8], text, 3) == place


@pytest.mark.parametrize("encoder", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_drafts_are_the_oracles_after_every_pass(encoder):
    """Outputs are edited inputs of few tokens, so that matches of all lengths are unique or are not."""
    rng, some, found = np.random.default_rng(3), 0, 0
    for _ in range(6):
        inputs = [rng.integers(0, 6, rng.integers(1, S)).tolist() for _ in range(B)]
        outputs = [[token for token in given if rng.random() > 0.2] for given in inputs]
        outputs = [[int(rng.integers(0, 7)) if rng.random() < 0.2 else t for t in [*row, 1]] for row in outputs]
        prompts = [[2, 3]] * B if encoder else inputs
        for step in passes(DRAFTER, prompts, inputs if encoder else None, outputs):
            for row, (draft, done) in enumerate(step):
                assert draft == wanted(inputs[row], outputs[row][:done], encoder)
                some, found = some + (len(draft) > 0), found + (done > 0 and draft != [])
    assert some > 60 and found > 50


def alone(given, output):
    """What is drafted for one output, after how many of its tokens; the other rows write one token."""
    steps = passes(DRAFTER, [[2]] * B, [given, [7], [7], [7]], [output, [8], [8], [8]])
    return [step[0] for step in steps]


def test_a_copy_of_the_input_takes_one_pass_for_each_draft_and_its_bonus():
    text = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8]
    assert alone(text, text) == [(text[:5], 0), (text[6:11], 6)]


def test_it_stops_at_a_mismatch_and_goes_on_where_a_place_is_unique():
    given, output = [5, 6, 7, 5, 8, 9, 5, 6, 4], [5, 6, 0, 7, 5, 8, 9, 1, 9]
    assert alone(given, output) == [(given[:5], 0), ([], 3), ([5, 8, 9, 5, 6], 4), ([], 8)]


def test_tokens_of_another_drafter_move_the_pointer_too():
    """Two steps' tokens at once: they follow the input, or they leave it and end at a place of their own."""
    given = [5, 6, 7, 8, 9, 4, 3]
    state = propose(DRAFTER, DRAFTER.init({}, B, L), view_of([[2]] * B, [given] * B)).draft
    made = propose(DRAFTER, state, view_of([[2, 5, 6, 7], [2, 5, 0, 9], [2, 5, 0], [2, 6]], [given] * B))
    assert made.draft.place.tolist() == [3, 5, -1, 2] and made.draft.begin.tolist() == [1] * B


def test_fields():
    for bad in ({"length": 0}, {"ngram": 0}):
        with pytest.raises(ValueError, match="iad needs"):
            InputGuided(**bad)
