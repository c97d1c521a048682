"""Stochastic beam search draws texts without replacement: against enumeration, and its first text against plain decoding."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from scipy.stats import chisquare
from support.conformance import MIXED, TARGET, Rows, params, plain, start
from support.table_lm import Table

import specjax
from specjax import cli
from specjax import decoder as decoding
from specjax.decode import StochasticBeam
from specjax.search import StochasticBeamSearch

EOS, NEW, HEAT = 3, 2, 0.7
TABLE = jax.random.normal(jax.random.key(2), (4, 4, 4))
DRAWN = dataclasses.replace(MIXED, new_tokens=10)


def leaves(prompt, top_k=0):
    """Every text of up to two tokens that plain decoding can draw, and its probability, by enumeration."""

    def dist(before, last):
        scores = np.asarray(TABLE, np.float64)[before, last] / HEAT
        scores = np.where(scores >= np.sort(scores)[-top_k], scores, -np.inf)  # of 0: all
        return np.exp(scores) / np.exp(scores).sum()

    found = {}
    for first, p in enumerate(dist(*prompt)):
        if first == EOS:
            found[first,] = p
        else:
            found |= {(first, second): p * q for second, q in enumerate(dist(prompt[1], first))}
    return {text: p for text, p in found.items() if p}


def drawn(search, count, top_k=0):
    """The texts of so many rows in the order of their scores, and the final state."""
    options = {"temperature": HEAT, "top_k": top_k}
    rows = Rows(((1, 2),) * count, tuple(f"row {i}" for i in range(count)), (options,) * count, NEW)
    state = decoding.run(
        search, {"target": TABLE}, start(search, rows, model={"target": TABLE}, capacity=16, eos=(EOS,))
    )
    found, order = jax.device_get(state.found), np.argsort(-np.asarray(state.found.scores), axis=1)
    lists = [
        [tuple(found.tokens[row, at, 2 : found.length[row, at]].tolist()) for at in own]
        for row, own in enumerate(order)
    ]
    return lists, state


def p_of_pairs(search, count=4096):
    """p of a chi-square test that ordered pairs of texts have the distribution of two draws without replacement."""
    dists, (lists, _) = leaves((1, 2)), drawn(search, count)
    wanted = {(a, b): p * q / (1 - p) * count for a, p in dists.items() for b, q in dists.items() if a != b}
    seen = dict.fromkeys(wanted, 0)
    for one in lists:
        seen[tuple(one)] += 1
    often = [pair for pair, mean in wanted.items() if mean >= 8]
    rest = lambda table: sum(number for pair, number in table.items() if pair not in often)
    assert len(often) > 30
    return chisquare([*(seen[pair] for pair in often), rest(seen)], [*(wanted[pair] for pair in often), rest(wanted)])[
        1
    ]


@dataclasses.dataclass(frozen=True)
class Unbounded(StochasticBeamSearch):
    """A fault: the noise of a continuation does not know that of its text."""

    def _noisy(self, own, noise, ceiling):
        return own + noise


def test_pairs_are_draws_without_replacement():
    assert p_of_pairs(StochasticBeamSearch(Table(), StochasticBeam(2))) > 0.01
    assert p_of_pairs(Unbounded(Table(), StochasticBeam(2))) < 1e-6


@pytest.mark.parametrize("top_k", (0, 2))
def test_wide_enough_it_finds_every_text_once(top_k):
    """With its log-probability under the warped distribution; places without a text say so."""
    dists = leaves((1, 2), top_k)
    lists, state = drawn(StochasticBeamSearch(Table(), StochasticBeam(14)), 2, top_k)
    for row, one in enumerate(lists):
        real = one[: len(dists)]
        assert sorted(real) == sorted(dists) and int(np.isfinite(state.found.scores[row]).sum()) == len(dists)
        order = np.argsort(-np.asarray(state.found.scores[row]))[: len(dists)]
        np.testing.assert_allclose(
            np.asarray(state.found.log_probs)[row][order], np.log([dists[text] for text in real]), atol=1e-5
        )


@pytest.mark.slow
def test_the_first_text_is_plain_decodings():
    """Of ragged rows with warpers of their own, and of a greedy one, whose distribution is a single text."""
    model = {"target": params("none")["target"]}
    search = StochasticBeamSearch(TARGET, StochasticBeam(3))
    state = decoding.run(search, model, start(search, DRAWN, model=model))
    begin, end, tokens = (np.asarray(x) for x in (state.prompt_length, state.length, state.tokens))
    assert [tokens[row, begin[row] : end[row]].tolist() for row in range(len(begin))] == plain(DRAWN)
    hot = np.asarray(state.sampling.temperature) > 0
    assert (np.isfinite(np.asarray(state.found.scores)).sum(axis=1) == np.where(hot, 3, 1)).all() and hot.any()


@pytest.mark.slow
def test_generate_and_the_command_line(capsys):
    options = {"temperature": 1.0, "max_new_tokens": 8, "seed": 5}
    several = specjax.generate("tiny", "Once upon", num_return_sequences=3, decode=StochasticBeam(3), **options)
    one = specjax.generate("tiny", "Once upon", drafter="none", **options)
    assert several[0].tokens == one[0].tokens and len({tuple(record.tokens) for record in several}) == 3
    assert several[0].score > several[1].score > several[2].score
    words = [
        "generate",
        "--model",
        "tiny",
        "--decode",
        "stochastic_beam:stochastic_beams=3",
        "--num-return-sequences",
        "3",
        "--json",
    ]
    assert cli.main([*words, "--temperature", "1", "--max-new-tokens", "8", "--seed", "5", "Once upon"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["tokens"] for line in lines] == [record.tokens for record in several]


REFUSED = (
    ({}, "a stochastic beam search draws its texts: set a temperature"),
    (
        {"decode": "stochastic_beam:num_beams=2", "temperature": 1.0},
        "has no field 'num_beams'; it has stochastic_beams",
    ),
    ({"temperature": 1.0, "drafter": "prompt_lookup"}, "leave drafter out"),
    ({"model": "tiny-diffusion"}, "a diffusion model, and a stochastic beam search writes from left to right"),
)


@pytest.mark.parametrize(("options", "said"), REFUSED, ids=str)
def test_what_it_does_not_go_with(options, said):
    with pytest.raises(ValueError, match=said):
        specjax.generate(**{"model": "tiny", "prompts": ["a"], "decode": StochasticBeam(2), **options})
    with pytest.raises(ValueError, match="a whole number from 1 on, got 0"):
        StochasticBeam(0)
