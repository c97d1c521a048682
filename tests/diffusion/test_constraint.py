"""Constrained canvases: every policy's texts are in their languages, all texts of a language can be written, other rows stay
as they are.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.conformance import but_slow
from support.operations import check_operations
from support.small_diffusion import LIMITS, LM, MASK, PROMPTS, V, begin, caches, everything, going_together, texts

import specjax
from specjax import decoder as decoding
from specjax.assembly.registry import UNMASKS
from specjax.constrain import Table
from specjax.diffusion import Fixed, FreeDave, Threshold, diffusion
from specjax.prompts import Prompts
from specjax.sampling import SamplingArrays, row_keys
from specjax.sharding import make_mesh
from specjax.state import Finish

END = 0


def listed(texts, size=V):
    """The language of some texts: a table of their tree."""
    states, rows = {(): 0}, [np.full(size, -1)]
    for text in texts:
        for cut in range(len(text)):
            here = text[: cut + 1]
            if here not in states:
                states[here] = len(states)
                rows.append(np.full(size, -1))
            rows[states[text[:cut]]][text[cut]] = states[here]
    accepts = np.isin(range(len(states)), [states[text] for text in texts])
    return Table.of("listed", np.asarray(rows), np.arange(size), accepts, (END,))


def language(row, seed=0):
    """Six texts of a row: of any length that has room, with its prompt's tokens where these stand."""
    rng, found = np.random.default_rng((seed, row)), set()
    first = next((at for at, token in enumerate(PROMPTS[row]) if token == MASK), len(PROMPTS[row]))
    given = PROMPTS[row][first:]
    room = LIMITS[row] - first
    while len(found) < 6:
        text = rng.integers(1, V - 1, rng.integers(max(len(given), room - 6), room + 1))
        known = np.asarray(given, int)
        text[: len(given)] = np.where(known == MASK, text[: len(given)], known)
        found.add(tuple(text.tolist()))
    return sorted(found)


def check(state, rows, languages):
    for row, text, own, finish in zip(rows, texts(state), languages, np.asarray(state.finish), strict=True):
        first = next((at for at, token in enumerate(PROMPTS[row]) if token == MASK), len(PROMPTS[row]))
        assert finish in (Finish.EOS, Finish.LENGTH)
        new = tuple(text[first:])
        if own is not None:
            assert new[: new.index(END)] in own if finish == Finish.EOS else new in own, (row, new)


def run(decoder, languages, **settings):
    own = None if languages is None else [() if each is None else listed(each) for each in languages]
    sampling = {} if own is None else {"constraint": own}
    state = begin(decoder, eos=END, model=everything(), **sampling, **settings)
    return specjax.run(decoder, everything(), state)


ALL = going_together()
KINDS = {
    **{name: lambda name=name: ALL[name] for name in UNMASKS},
    **{
        f"cache {name}": lambda cache=cache: diffusion(LM, MASK, Threshold(0.2), cache, block_length=8)
        for name, cache in caches().items()
    },
    "bold": lambda: diffusion(LM, MASK, Threshold(0.01), block_length=8),
    "guidance": lambda: diffusion(LM, MASK, Threshold(0.2), block_length=8, cfg_scale=1.0),
    "doubted": lambda: diffusion(LM, MASK, Threshold(0.2), block_length=8, doubted=(END,)),
    "blocks": lambda: diffusion(LM, MASK, Threshold(0.01), block_length=8, causal_blocks=True),
    "filled blocks": lambda: diffusion(LM, MASK, Threshold(0.1, published=True), block_length=8, causal_blocks=True),
    "seeded blocks": lambda: diffusion(LM, MASK, Threshold(0.1), block_length=8, causal_blocks=True, shift=True),
    "free_dave in blocks": lambda: diffusion(LM, MASK, FreeDave(4), block_length=8, causal_blocks=True),
    "eager": lambda: diffusion(LM, MASK, FreeDave(4, eager=True), block_length=8),
    "shifted": lambda: diffusion(LM, MASK, Threshold(0.2), caches()["dual"], block_length=8, shift=True),
}
FAST = ("bold",)


SEEDS = ((0, 0.0), (1, 1.0))


def mixed(rows, seed):
    """Languages of rows, none for the second."""
    return [None if row == 1 else language(row, seed) for row in rows]


@pytest.mark.parametrize("name", but_slow(KINDS, *[name for name in KINDS if name not in FAST]))
def test_every_text_is_in_its_language(name):
    """Whatever a policy commits at once, takes back or overwrites, and whatever a cache leaves out."""
    decoder = KINDS[name]()
    rows = range(4 if decoder.fills_in else 3)
    for seed, temperature in SEEDS:
        languages = mixed(rows, seed)
        check(run(decoder, languages, rows=rows, temperature=temperature), rows, languages)


@pytest.mark.parametrize(
    "name", but_slow(("bold", "wino", "cache dual", "joint_threshold"), "wino", "cache dual", "joint_threshold")
)
def test_a_row_without_a_constraint_stays_as_it_is(name):
    for seed, temperature in SEEDS:
        ours, free = (run(KINDS[name](), own, temperature=temperature) for own in (mixed(range(4), seed), None))
        assert texts(ours)[1] == texts(free)[1]


def completable(canvas, texts):
    """Whether one of these texts, with ends after it, has the canvas's tokens."""
    ended = ((*text, *[END] * (len(canvas) - len(text))) for text in texts if len(text) <= len(canvas))
    return any(all(have in (MASK, want) for have, want in zip(canvas, text, strict=True)) for text in ended)


def test_a_pass_commits_the_longest_part_of_its_order_that_can_be_completed():
    """By enumeration: at least one token, and no more than can stand together."""
    decoder, rows, cut = KINDS["bold"](), range(4), 0
    step = jax.jit(decoder.step)
    for seed, temperature in ((2, 0.0), (3, 1.0), (4, 2.0)):
        languages = [language(row, seed) for row in rows]
        constraint = [listed(each) for each in languages]
        state = begin(decoder, rows, temperature, END, model=everything(), constraint=constraint)
        while not bool(state.done.all()):
            before, (state, info) = state, step(everything(), state)
            for row in (row for row in rows if not before.done[row]):
                first, at = int(before.prompt_length[row]), int(info.start[row])
                order = np.argsort(-np.asarray(info.choice.score[row]), kind="stable")
                wish, kept = (np.asarray(each[row]) for each in (info.choice.commit, info.committed))
                wish = [place for place in order if wish[place] and before.tokens[row, at + place] == MASK][
                    : int(LIMITS[row])
                ]
                wish = [place for place in wish if at + place < LIMITS[row]] or np.flatnonzero(kept).tolist()
                canvas, most = np.array(before.tokens[row, first : LIMITS[row]]), 0
                for count, place in enumerate(wish, 1):
                    canvas[at + place - first] = info.choice.tokens[row, place]
                    most = count if completable(canvas, languages[row]) else most
                assert sorted(wish[:most]) == np.flatnonzero(kept).tolist() and most >= 1
                cut += most < len(wish)
        check(state, rows, languages)
    assert cut > 5  # policies did ask for what excludes each other


WORDS = ((1, 2, 3), (1, 3, 3), (2,), (2, 2, 2, 2), (3, 1, 2, 3, 1), (4, 4, 4, 4, 4, 4), (3, 1), ())
"""One is longer than the room, and one is empty."""


@pytest.mark.parametrize(
    "name", ("bold", *(pytest.param(name, marks=pytest.mark.slow) for name in ("fixed", "sequential", "rcr")))
)
def test_all_texts_of_the_language_that_have_room_are_written_and_no_others(name):
    rows, room = 96, 5
    prompts = Prompts(
        jnp.tile(jnp.asarray([[3, 1, 4]]), (rows, 1)), jnp.full(rows, 3), row_keys(0, [str(row) for row in range(rows)]),
        jnp.full(rows, 3 + room), SamplingArrays.make(rows, temperature=9.0, constraint=[listed(WORDS)] * rows),
        jnp.full((rows, 1), END),
    )  # fmt: skip
    state = decoding.empty(KINDS[name](), everything(), rows, 8, None, 1, form=prompts.sampling.form)
    state = decoding.insert(KINDS[name](), everything(), state, jnp.arange(rows), prompts)
    found = texts(specjax.run(KINDS[name](), everything(), state))
    assert {tuple(text[3:]) for text in found} == {(*w, END)[:room] for w in WORDS if len(w) <= room}


@pytest.mark.slow
@pytest.mark.parametrize("settings", ({}, {"causal_blocks": True}), ids=str)
@pytest.mark.parametrize("steps", (0, 2))
def test_free_dave_writes_what_fixed_writes(settings, steps):
    for seed, temperature in SEEDS:
        both = (diffusion(LM, MASK, kind(steps), block_length=8, **settings) for kind in (Fixed, FreeDave))
        plain, ours = (run(each, mixed(range(3), seed), rows=range(3), temperature=temperature) for each in both)
        passes = [int(each.stats.steps.sum()) for each in (ours, plain)]
        assert texts(ours) == texts(plain) and (passes[0] < passes[1] or steps and passes[0] == passes[1])


def test_another_table_of_the_same_size_runs_in_the_same_program_which_asks_no_host():
    decoder = KINDS["bold"]()
    run(decoder, mixed(range(4), 0))
    compiled = decoding.run_program._cache_size()
    run(decoder, mixed(range(4), 1))
    assert decoding.run_program._cache_size() == compiled
    state = begin(decoder, eos=END, constraint=[listed(language(0))] * 4)
    check_operations(decoding.run_program.trace(decoder, everything(), state, jnp.int32(9), jnp.int32(1)))


@pytest.mark.slow
def test_a_mesh_changes_nothing():
    spread = diffusion(LM, MASK, Threshold(0.01), block_length=8, mesh=make_mesh("data=4,model=2"))
    for seed, temperature in SEEDS:
        alone, ours = (run(each, mixed(range(4), seed), temperature=temperature) for each in (KINDS["bold"](), spread))
        assert texts(ours) == texts(alone)
