"""What holds for decoding, over every drafter, expander and verifier there is."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.compiled import optimised
from support.conformance import (
    ALIKE,
    DRAFTERS,
    EACH_KIND,
    MIXED,
    MODELS,
    ON_MODELS,
    PREFIX,
    SLOW,
    TARGET,
    TWINS,
    VERIFIERS,
    but_slow,
    complete,
    decoder_of,
    judged,
    line,
    model_of,
    params,
    plain,
    same,
    start,
    texts,
)
from support.operations import check_operations
from support.poison import spoilt

import specjax
from specjax import decoder as decoding
from specjax.assembly.registry import DRAFTERS as REGISTRY
from specjax.assembly.registry import EXPANDERS, tree_of
from specjax.assembly.registry import VERIFIERS as REGISTERED

OPTIMISED = (
    "none",
    "eagle2",
    "dflash",
    "kangaroo",
    "swift",
    "lookahead",
    "diffusion_draft",
    "ppd",
)
"""One of each kind, and of each way to use a cache: their steps are compiled once more, as users compile them."""

ANY = decoding.NO_LIMIT, 1
"""`run`'s step and row limits."""

PREFIXED_ON_MODELS = ("eagle2@experts", "lookahead@sinks", "gemma4_assistant@shared")
"""Of which a shared prefix is read, too."""


@pytest.fixture(params=but_slow(DRAFTERS | ON_MODELS, *DRAFTERS, *SLOW), scope="module")
def name(request):
    return request.param


@pytest.fixture(scope="module")
def finished(name):
    """One batch of eight mixed rows, decoded with the drafter under test."""
    return line(name)


def text_of(name, rows=MIXED):
    """Plain decoding's text of the same model."""
    return plain(rows, model_of(name))


def test_the_table_is_complete():
    assert {n.split("-")[0] for n in DRAFTERS} - {"adaptive", "fuse"} == set(REGISTRY)
    assert {n.partition("-")[2] for n in DRAFTERS} >= set(EXPANDERS)
    assert {n.split("-")[0] for n in VERIFIERS} == set(REGISTERED)
    assert {*OPTIMISED, *EACH_KIND} <= set(DRAFTERS) and set(SLOW) <= {*DRAFTERS, *ON_MODELS}
    others = [drafter for name, drafter in DRAFTERS.items() if name not in TWINS]
    for twin in map(DRAFTERS.get, TWINS):
        kin = [other for other in others if type(other) is type(twin)]
        assert twin in [dataclasses.replace(other, expander=twin.expander) for other in kin]
    for model in MODELS:
        kinds = {type(drafter) for name, drafter in ON_MODELS.items() if model_of(name) == model}
        assert len(kinds) == (6 if model == "encoder" else 5), model


def test_same_text_as_plain(name, finished):
    same(finished[0], text_of(name))


def test_steps_are_saved_or_equal(name, finished):
    state = finished[1]
    new = np.asarray(state.length - state.prompt_length)
    steps = np.asarray(state.stats.steps)
    accepted = np.asarray(state.stats.accepted)
    assert (accepted.sum(axis=1) == steps).all()
    committed = (accepted * (1 + np.arange(accepted.shape[1]))).sum(axis=1)
    assert (committed >= new).all()  # the last step may be cut at the limit
    if name == "none":
        assert (steps == new).all()
    if name.startswith(("draft", "fuse")):
        assert steps.sum() < new.sum()


def test_a_row_alone_is_a_row_in_a_batch(name):
    """A greedy and a top-k row, each decoded while the other slots are free."""
    for row in (0, 5):
        alone, _ = line(name, MIXED.pick(row), among=MIXED)
        same(alone, [text_of(name)[row]])


ALONE = ("prompt_lookup", "draft-top_k", "medusa", "diffusion_draft", "fuse")


@pytest.mark.slow
@pytest.mark.parametrize("name", ALONE)
def test_a_batch_of_one(name):
    """The program of a single row is another one."""
    alone, _ = complete(DRAFTERS[name], MIXED.pick(5))
    same(alone, [plain()[5]])


def test_slots_do_not_matter(name):
    order = (7, 3, 5, 1, 6, 0, 2, 4)
    got, _ = line(name, MIXED.pick(*order))
    same(got, [text_of(name)[i] for i in order])


KIN = (
    "adaptive-goodput", "clover", "clover2", "dflash2", "diffusion_draft-top_k", "domino", "dovetail",
    "dspark", "eagle1", "eagle3-top_k",
    "fspad", "fuse", "gemma4_assistant-clusters", "gumiho", "jetspec-best_first", "griffin", "mtp", "peagle", "rasd", "s2d",
    "easyspec",
    "longspec",
)  # fmt: skip
"""Drafters that know of a prompt what another of the table does: they are not tried with a shared prefix."""
PREFIXED = [name for name in DRAFTERS if name not in TWINS + KIN] + list(PREFIXED_ON_MODELS)


@pytest.mark.slow
@pytest.mark.parametrize("name", PREFIXED)
def test_a_shared_prefix_is_read_once_and_keeps_the_text(name):
    """Nor does a drafter draft worse for it: it knows of the prefix what it knows of a prompt."""
    got, state = line(name, ALIKE, prefix=PREFIX, width=8)
    same(got, text_of(name, ALIKE))
    _, whole = line(name, ALIKE)
    # a table of all rows counts every prompt's prefix; a bidirectional draft's entries are those of the chunk they came in
    if not name.startswith(("stand", "diff")):
        np.testing.assert_array_equal(state.stats.steps, whole.stats.steps)


def test_no_retrace_and_no_host(name):
    """Other prompts, temperatures and seeds reuse the compiled program, which never talks to the host."""
    decoder = decoder_of(name)
    decoding.run(decoder, params(name), start(decoder, MIXED, model=params(name)))
    compiled = decoding.run_program._cache_size(), decoding.insert_program._cache_size()
    hotter = dataclasses.replace(MIXED, options=tuple({"temperature": 0.1 * i} for i in range(8)))
    again = decoder_of(name)
    state = start(again, hotter, seed=5, model=params(name))
    traced = decoding.run_program.trace(again, params(name), state, *map(jnp.int32, ANY))
    check_operations(traced)
    decoding.run(again, params(name), state)
    assert (decoding.run_program._cache_size(), decoding.insert_program._cache_size()) == compiled


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", but_slow(OPTIMISED, "none", "dflash", "kangaroo", "swift", "lookahead", "diffusion_draft", "ppd")
)
def test_the_optimised_program(name):
    """What users run: the same text, of a row alone too, and the cache is updated in place.

    No step copies a layer's cache, the target's or a draft's: `[B, K, S, H]` is written where it lies.
    """
    decoder, steps = specjax.speculative(TARGET, DRAFTERS[name]), tuple(map(jnp.int32, ANY))
    state = start(decoder, MIXED, model=params(name))
    program = optimised(decoding.run_program.lower(decoder, params(name), state, *steps))
    shape = ",".join(map(str, jax.tree.leaves(state.cache)[0].shape))
    text = program.as_text()
    assert f"f32[{shape}]" in text
    copies = [line.strip() for line in text.splitlines() if re.search(rf"= f32\[{shape}\]\S* copy\(", line)]
    assert not copies, copies
    same(texts(program(params(name), state, *steps)), plain())
    alone = start(decoder, MIXED.pick(2), model=params(name), among=MIXED)
    same(texts(program(params(name), alone, *steps))[:1], [plain()[2]])


def test_garbage_beyond_the_text_is_never_read(name):
    """Cache slots and text beyond a row's length hold poison, and slots after a window; the text must not change."""
    decoder = decoder_of(name)
    state = start(decoder, MIXED, model=params(name))
    reach = (decoder.target.config.near.window or 1) - 1 + decoder.drafter.looks_back
    poison = jnp.arange(state.tokens.shape[1])[None] >= state.length[:, None]
    cache = spoilt(state.cache, state.length - 1, reach)
    state = dataclasses.replace(state, tokens=jnp.where(poison, 17, state.tokens), cache=cache)
    same(texts(decoding.run(decoder, params(name), state)), text_of(name))


def pairs(able: bool):
    """Every verifier but the default, with drafters that it can judge, or with those that it cannot.

    The kind of tree that it is for, and another kind, each verifier another one as far as they go.
    """
    for number, verifier in enumerate(list(VERIFIERS)[1:]):
        own = f"draft-{tree_of(VERIFIERS[verifier]).partition(':')[0]}"
        can = judged(VERIFIERS[verifier], DRAFTERS)
        if not able:
            yield from ((verifier, name) for name in DRAFTERS if name not in can and not model_of(name))
            continue
        others = [name for name in can if name in EACH_KIND and name != own]
        yield from ((verifier, name) for name in (own,) if name in can)
        yield from ((verifier, name) for name in others[number % 16 :: 16])


@pytest.mark.slow
@pytest.mark.parametrize(("verifier", "name"), list(pairs(able=True)))
def test_a_verifier_is_greedy_at_temperature_zero(verifier, name):
    """All but lossy ones that say so, which must have something to say it for where they have room."""
    greedy = dataclasses.replace(MIXED, options=({"temperature": 0.0},) * 8)
    got, _ = complete(DRAFTERS[name], greedy, VERIFIERS[verifier])
    if VERIFIERS[verifier].keeps_greedy:
        same(got, plain(greedy))
    else:
        assert REGISTERED[verifier].guarantee == "lossy" and all(map(len, got))


@pytest.mark.slow
@pytest.mark.parametrize(("verifier", "name"), list(pairs(able=True)))
def test_a_verifier_does_not_depend_on_the_batch(verifier, name):
    got, _ = complete(DRAFTERS[name], MIXED, VERIFIERS[verifier])
    for row in (4, 5):
        alone, _ = complete(DRAFTERS[name], MIXED.pick(row), VERIFIERS[verifier], among=MIXED)
        same(alone, [got[row]])


@pytest.mark.parametrize(("verifier", "name"), list(pairs(able=False)))
def test_a_verifier_refuses_what_it_cannot_judge(verifier, name):
    with pytest.raises(ValueError, match=verifier.split("-")[0]):
        specjax.speculative(TARGET, DRAFTERS[name], VERIFIERS[verifier])


@pytest.mark.parametrize("verifier", VERIFIERS)
def test_a_verifier_judges_chains_at_least(verifier):
    """So no verifier escapes its checks by refusing everything, and rejection judges no tree."""
    able = judged(VERIFIERS[verifier], DRAFTERS)
    assert {"none", "prompt_lookup", "draft-chain"} <= set(able)
    if verifier == "rejection":
        assert all(DRAFTERS[name].bind(TARGET).is_chain for name in able)


@pytest.mark.slow
def test_a_batch_of_one_by_another_verifier():
    both = [complete(DRAFTERS["draft-chain"], rows, VERIFIERS["rejection"])[0] for rows in (MIXED, MIXED.pick(4))]
    same(both[1], [both[0][4]])
