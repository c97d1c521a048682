"""Every verifier that is exported does what it declares: 60,000 texts of the jitted decoder over a model whose
distribution is known."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.chains import ALPHA, MODEL, NEW, OPTIONS, PARAMS, PROMPT, ROWS, TARGET, V, exact, start
from support.conformance import but_slow
from support.guarantees import held
from support.verifiers import expander_for, verifier_of

import specjax
from specjax.assembly.registry import VERIFIERS
from specjax.draft import NoDrafter
from specjax.prompts import Prompts
from specjax.reference import rejection as oracle
from specjax.reference import statistics
from specjax.sampling import SamplingArrays
from specjax.verify import Coupled

FEWER = {"optimal": 6_000}
"""Texts of a rule whose steps run for long; its own slow test counts all."""

OWN = 300
GREEDY, FREE, COPIES = slice(0, OWN), slice(OWN, 2 * OWN), slice(2 * OWN, 4 * OWN)
"""Greedy rows and sampled ones with prompts of their own, and all of them once more, in other slots beside other rows. The rows
that follow differ in their keys alone, and are counted."""
COUNTED = slice(4 * OWN, None)


def texts_of(drafter, verifier=None, count=ROWS):
    """New tokens `[count, NEW]`, and how many were accepted in how many steps `[D + 1]` of the counted rows."""
    rng = np.random.default_rng(0)
    tokens = np.broadcast_to(PROMPT, (count, len(PROMPT))).copy()
    tokens[: 2 * OWN] = rng.integers(0, V, (2 * OWN, len(PROMPT)))
    heats = np.full(count, OPTIONS["temperature"], np.float32)
    heats[GREEDY] = 0
    keys = np.arange(count)
    for rows in (tokens, heats, keys):
        rows[COPIES] = rows[: 2 * OWN][::-1]
    decoder = specjax.speculative(TARGET, drafter, verifier)
    prompts = Prompts(
        jnp.asarray(tokens),
        jnp.full((count,), len(PROMPT)),
        jax.random.split(jax.random.key(0, impl="threefry2x32"), count)[keys],
        jnp.full((count,), len(PROMPT) + NEW),
        SamplingArrays({"temperature": jnp.asarray(heats), "min_p": jnp.full((count,), OPTIONS["min_p"])}),
    )
    state = start(dataclasses.replace(decoder, verifier=Coupled()), prompts)
    own = decoder.verifier.init_params(jax.random.key(9), PARAMS["target"])
    state = specjax.run(decoder, PARAMS if own is None else PARAMS | {"verify": own}, state)
    assert (np.asarray(state.length) == len(PROMPT) + NEW).all()
    return np.asarray(state.tokens)[:, len(PROMPT) : len(PROMPT) + NEW], np.asarray(state.stats.accepted)[COUNTED].sum(
        0
    )


@functools.cache
def plain(count=ROWS):
    return texts_of(NoDrafter(), count=count)[0]


def p_value(text):
    """Of the counted rows under the exact joint distribution of their tokens."""
    counts = np.zeros((V,) * NEW)
    np.add.at(counts, tuple(text[COUNTED].T), 1)
    return statistics.chi_square(counts, oracle.joint(exact()))


def same_text(verifier, text):
    np.testing.assert_array_equal(text, plain())
    assert p_value(text) > ALPHA


def same_distribution(verifier, text):
    """60,000 texts tell a distribution that is 0.02 away with power 0.99 (`test_power` of
    `verify/test_rejection.py`)."""
    assert verifier.keeps_greedy
    np.testing.assert_array_equal(text[GREEDY], plain(len(text))[GREEDY])
    assert p_value(text) > ALPHA


def lossy(verifier, text):
    greedy = (text[GREEDY] != plain()[GREEDY]).any()
    assert not (verifier.keeps_greedy and greedy)
    assert greedy or p_value(text) < ALPHA, "it writes what plain decoding writes: say so, or give it fields in FIELDS"


def test_what_fewer_texts_tell():
    assert statistics.power(min(FEWER.values()) - 4 * OWN, V**NEW, 0.06, ALPHA) > 0.9


@pytest.mark.parametrize("name", but_slow(VERIFIERS, "gad_plus", "rapid"))
def test_a_verifier_keeps_its_guarantee(name):
    verifier = verifier_of(name)
    drafter = dataclasses.replace(MODEL, expander=expander_for(verifier))
    text, accepted = texts_of(drafter, verifier, FEWER.get(name, ROWS))
    assert accepted[1:].sum() and accepted[:-1].sum(), (
        "nothing was drafted that is accepted, or nothing that is rejected"
    )
    np.testing.assert_array_equal(text[COPIES], text[: 2 * OWN][::-1])  # whatever stands beside a row
    tests = {"same text": same_text, "same distribution": same_distribution, "lossy": lossy}
    held("verifier", name, VERIFIERS[name], tests)(verifier, text)
