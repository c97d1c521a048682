"""Every drafter and every expander that is exported writes plain decoding's text under the default verifier, and keeps
the guarantees of one: over a small target, which `tests/test_conformance.py` has a larger one of, with every usual
warper."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.conformance import but_slow, texts
from support.operations import check_operations
from support.poison import spoilt
from support.small_target import (
    PROMPTS,
    begin,
    eos_of,
    first_lines,
    grown_by,
    line_of,
    lines,
    params_of,
    plain,
    said_by,
    target_of,
)

import specjax
from specjax import decoder as decoding
from specjax.assembly.registry import EXPANDERS
from specjax.draft import PPD, Forced, InputGuided, Jacobi, Lookahead, Lud, MagicDec, Rapid, Switch
from specjax.draft.ahead import Ahead
from specjax.state import Finish

_IN_THE_SLOW_SET = {
    "rasd",
    "diffusion_draft",
    "gad",
    "griffin",
    "clover",
    "hidden_transfer",
    "gumiho",
    "dovetail",
    "dflash2",
    "s2d",
    "lud",
    "self_diffusion",
    "easyspec",
    "pearl",
    "saguaro",
    "mirror_sd",
    "tli",
    "slem",
    "omnidraft",
    "longspec",
    "rapid",
    "main_experts",
}
FAST = {*first_lines(), *map(grown_by, EXPANDERS)} - _IN_THE_SLOW_SET
"""Every registered name has a line in the fast set, or its parts have; the slow one has what differs from another line in
its parts alone."""

LINES = [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in lines()]

SLOW = (
    "none", "suffix", "sam", "ngram_mod", "iad", "token_recycling", "aded", "stand", "rest", "jacobi", "pard", "pard2", "gad",
    "diffusion_draft", "diffuspec", "rasd", "hydra-prefix", "mlp_speculator", "lstm_speculator", "chimera", "eagle1", "eagle2",
    "eagle3", "fspad", "griffin", "dovetail",
    "falcon", "gumiho", "peagle", "dflash", "dflash2", "dspark", "domino", "jetspec-best_first",
    "mtp", "gemma4_assistant", "clover", "clover2", "ppd", "hidden_transfer", "kangaroo", "swift", "del", "small_cache",
    "lookahead", "cascade", "switch", "s2d", "lud", "self_diffusion", "easyspec", "pearl",
    "saguaro", "mirror_sd", "tli", "slem", "omnidraft", "longspec", "magicdec", "rapid", "main_experts",
)  # fmt: skip
"""Drafters of which other programs than that of the batch are in the slow set."""

ONE_RUNG = (
    "suffix",
    "suffix-shared",
    "sam",
    "iad",
    "aded",
    "stand",
    "rest",
    "diffuspec",
    "kangaroo",
    "swift",
    "del",
    "rasd",
    "cascade",
    "switch",
    "adaptive-goodput",
    "easyspec",
    "pearl",
    "saguaro",
    "mirror_sd",
)
"""Compiled for all of their nodes, and not for fewer as well, which takes twice as long."""

ONLY_CONSTRAINED = (Forced,)
"""They draft for rows with a constraint alone; `constrain/test_engine.py` has such rows."""

ONLY_COPIES = (InputGuided,)
"""They draft right where a text copies its prompt, as those of `guarantees/test_drafts_under_rejection.py` do."""

ANY = np.int32(decoding.NO_LIMIT), np.int32(1)


@dataclasses.dataclass(frozen=True)
class Line:
    """A line's decoder and model, its batch when it is done, and how often programs had been traced by then."""

    decoder: Any
    model: Any
    done: Any = None
    traced: tuple[int, ...] = ()

    def begin(self, *args, **options):
        return begin(self.decoder, self.model, *args, eos=eos_of(self.decoder.target), **options)

    def run(self, state, steps=decoding.NO_LIMIT):
        return decoding.run(self.decoder, self.model, state, steps)


def traced():
    return decoding.run_program._cache_size(), decoding.insert_program._cache_size()


def made(name):
    """A line before its first run."""
    target = target_of(name)
    decoder = dataclasses.replace(specjax.speculative(target, line_of(name)), whole=name in ONE_RUNG)
    return Line(decoder, params_of(line_of(name), target, said_by(target)))


@pytest.fixture(params=LINES, scope="module")
def line(request):
    fresh = made(request.param)
    done = fresh.run(fresh.begin())
    return dataclasses.replace(fresh, done=done, traced=traced())


def accepted(state):
    """How many tokens each row accepted in how many steps."""
    return np.asarray(state.stats.accepted).tolist()


def ended(state):
    """Every row's text, and why it ends."""
    return list(zip(texts(state), map(Finish, state.finish.tolist()), strict=True))


def test_it_writes_plain_decodings_text(line):
    """Greedy and drawn, to the limit and to an end in the middle of what a step accepts."""
    assert ended(line.done) == plain(line.decoder.target)
    right = sum(np.sum(line.done.stats.accepted, axis=0)[1:])
    elsewhere = isinstance(line.decoder.drafter, (*ONLY_CONSTRAINED, *ONLY_COPIES))
    assert line.decoder.drafter.depth == 0 or right or elsewhere, "nothing is drafted right"


def test_a_row_does_not_depend_on_those_beside_it(line):
    """In other slots, beside a free one or itself. Nor do its steps, unless the drafter says so (`alone`)."""
    for rows in ({0: 2, 2: 0}, {0: 0, 1: 2, 2: 0}):
        moved = line.run(line.begin(tuple(rows.values()), slots=tuple(rows)))
        for slot, row in rows.items():
            assert ended(moved)[slot] == plain(line.decoder.target)[row]
            if line.decoder.drafter.alone:
                assert accepted(moved)[slot] == accepted(line.done)[row]


def test_a_slot_is_filled_again(line):
    """While others are in the middle of their texts, beside padding that goes nowhere."""
    state = line.begin((1,), state=line.run(line.begin(), 2), slots=(1,))
    assert ended(line.run(state)) == plain(line.decoder.target)


def test_what_is_known_of_a_text_is_what_is_known_of_a_prompt(line):
    """A prompt that is as long as the text after two steps goes on as that does: its cache and the drafter's lack nothing."""
    before = line.run(line.begin(), 2)
    going = [row for row, done in enumerate(before.done.tolist()) if not done]
    prompts = [before.tokens[row, :length].tolist() for row, length in enumerate(before.length.tolist())]
    after = line.run(line.begin(going, prompts=prompts))
    wanted = plain(line.decoder.target)
    assert going and [text for text, _ in ended(after)][: len(going)] == [
        wanted[row][0][len(prompts[row]) - len(PROMPTS[row]) :] for row in going
    ]
    if line.decoder.drafter.alone and not isinstance(
        line.decoder.drafter, PPD | Lud | Jacobi | Lookahead | Switch | Ahead | MagicDec | Rapid
    ):  # they learn in every step, draft for the next one, or choose slots or chunks where the prompt ends
        steps = np.asarray(after.stats.accepted)[: len(going)] + np.asarray(before.stats.accepted)[going]
        assert steps.tolist() == [accepted(line.done)[row] for row in going]


def test_garbage_beyond_the_text_is_never_read(line):
    state = line.begin()
    cache = spoilt(state.cache, state.length - 1, 0)
    poison = jnp.arange(state.tokens.shape[1])[None] >= state.length[:, None]
    state = dataclasses.replace(state, tokens=jnp.where(poison, 17, state.tokens), cache=cache)
    assert ended(line.run(state)) == plain(line.decoder.target)


def test_nothing_is_traced_again_and_nothing_asks_the_host(line):
    """A decoder that is made again, other prompts and temperatures."""
    again = specjax.speculative(line.decoder.target, line.decoder.drafter)
    again = dataclasses.replace(line, decoder=dataclasses.replace(again, whole=line.decoder.whole))
    state = again.begin((1, 0), prompts=PROMPTS[::-1])
    check_operations(decoding.run_program.trace(again.decoder, line.model, state, *ANY))
    with jax.no_tracing():
        again.run(state)
    assert traced() == line.traced


@pytest.mark.parametrize("name", but_slow(first_lines(), *SLOW, "draft-chain", "medusa"))
def test_a_batch_of_one(name):
    """The program of a single row is another one."""
    line = made(name)
    assert ended(line.run(line.begin((1,), count=1))) == plain(line.decoder.target)[1:2]


@pytest.mark.parametrize("name", but_slow(first_lines(), *SLOW, "prompt_lookup"))
def test_a_shared_prefix_is_read_once(name):
    """Texts and steps are those of prompts that are read whole; those of drafters that learn in the process may differ."""
    line = made(name)
    alike = tuple((*PROMPTS[0][:5], *prompt[:3]) for prompt in ((), *PROMPTS[1:]))
    shared, whole = (line.run(line.begin(prompts=alike, prefix=prefix)) for prefix in (5, 0))
    assert ended(shared) == ended(whole)
    if line.decoder.drafter.alone:
        assert accepted(shared) == accepted(whole)
