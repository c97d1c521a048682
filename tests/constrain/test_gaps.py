"""What may stand in a canvas with open places: equal to the enumeration of all texts that fill it."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.constrain import Table
from specjax.sampling import SamplingArrays
from specjax.sampling.warp import completable, filled, fillings
from specjax.warpers.gaps import Gaps

V, END, MASK, L = 6, 4, 5, 5
ROWS = 64


def random_table(rng, states=4):
    """A random language of tokens 0 to 3, or of a random one of their classes."""
    classes = np.append(rng.integers(0, 4, 4), (4, 5)).astype(np.int32)
    while True:
        following = np.where(rng.random((states, 6)) < 0.4, rng.integers(0, states, (states, 6)), -1)
        following[:, 4:] = -1
        accepts = rng.random(states) < 0.4
        try:
            return Table.of("random", following, classes, accepts, (END,))
        except ValueError:  # an empty language
            continue


def texts_of(table, length):
    """All canvases of a length that hold a text of the language, its end, and more ends up to the canvas's end."""
    found = []
    for text in itertools.product(range(V), repeat=length):
        state = functools.reduce(lambda state, token: -1 if state < 0 else table.next(state, token), text, 0)
        if state >= 0 and table.distance[state] == 0 and MASK not in text:
            found.append(text)
    return np.asarray(found, int).reshape(-1, length)


def drawn(rng, table, length):
    """A canvas that some text of the language fills, or nearly such a one; -1 is open."""
    every = texts_of(table, length)
    text = every[rng.integers(len(every))] if len(every) and rng.random() < 0.8 else rng.integers(0, END, length)
    return np.where(rng.random(length) < 0.5, -1, text)


def cases(seed):
    rng = np.random.default_rng(seed)
    tables = [random_table(rng) for _ in range(ROWS)]
    begins = rng.integers(0, 3, ROWS)
    lengths = rng.integers(1, L + 1, ROWS)
    return tables, begins, lengths, [drawn(rng, *each) for each in zip(tables, lengths, strict=True)]


def batch(tables, begins, lengths, canvases, never=()):
    tokens = np.zeros((ROWS, L + 3), np.int32)
    is_open = np.zeros_like(tokens, bool)
    for row, (begin, canvas) in enumerate(zip(begins, canvases, strict=True)):
        place = slice(begin, begin + len(canvas))
        tokens[row, place], is_open[row, place] = np.where(canvas < 0, MASK, canvas), canvas < 0
        is_open[row, begin + len(canvas) :] = True  # beyond the end nothing matters
    sampling = SamplingArrays.make(ROWS, constraint=tables)
    places = jnp.asarray(begins, jnp.int32), jnp.asarray(begins + lengths, jnp.int32)
    return sampling, Gaps(jnp.asarray(tokens), jnp.asarray(is_open), *places, jnp.ones(ROWS, bool), (MASK, *never))


@functools.cache
def program(sampling_shapes, never):
    everywhere = jnp.broadcast_to(jnp.arange(L + 3, dtype=jnp.int32)[None], (ROWS, L + 3))
    scores = jnp.zeros((ROWS, L + 3, V))

    @jax.jit
    def both(sampling, gaps):
        known = fillings(sampling, gaps.never)
        return filled(scores, known, gaps, everywhere) == 0, completable(known, gaps)

    return both


@pytest.mark.parametrize("never", ((), (END,), pytest.param((1,), marks=pytest.mark.slow)), ids=str)
@pytest.mark.parametrize("seed", (0, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)))
def test_a_token_may_stand_where_some_text_has_it(seed, never):
    tables, begins, lengths, canvases = cases(seed)
    sampling, gaps = batch(tables, begins, lengths, canvases, never)
    form = tuple(leaf.shape for leaf in jax.tree.leaves(sampling))
    found, whole = map(np.asarray, program(form, never)(sampling, gaps))
    counts = [0, 0]
    for row, (table, begin, canvas) in enumerate(zip(tables, begins, canvases, strict=True)):
        every = texts_of(table, len(canvas))
        fills = lambda canvas, every=every: np.where(canvas < 0, ~np.isin(every, never), every == canvas).all(axis=1)
        fits = every[fills(canvas)]
        assert whole[row] == (len(fits) > 0)
        counts[len(fits) > 0] += 1
        for place in range(len(canvas)):
            others = np.where(np.arange(len(canvas)) == place, -1, canvas)
            own = every[fills(others)][:, place]
            want = np.isin(np.arange(V), own)
            got = found[row, begin + place]
            may = [token for token in range(V) if token not in (MASK, *never)]  # the others' scores are not looked at
            assert np.array_equal(got[may], want[may]), (row, place)
        assert found[row, :begin].all() and found[row, begin + len(canvas) :].all()
    assert min(counts) > 3  # canvases of both kinds
