"""Hedged sampling: the pool is a greedy text and `generate`'s draws, and a selection takes what it takes of these."""

import dataclasses

import pytest
from support.two_models import LARGE, LETTERS, PROMPTS

import specjax
from specjax import cli
from specjax.assembly.registry import make_selection
from specjax.decode import Hedged
from specjax.decode.hedged import _candidate
from specjax.models import Model
from specjax.search import Borda, Candidate, Reward, Step
from specjax.search.pool import Drawn
from specjax.search.selection import answer_of

ASKED = ["".join(LETTERS[token] for token in prompt) for prompt in PROMPTS]
WARM = {"max_new_tokens": 10, "temperature": 1.0, "seed": 3}
HOW = {"drafter": "none", "progress": False, "logprobs": True}


def shortest(prompt, texts):
    assert prompt in ASKED
    return [-len(text) for text in texts]


SELECTIONS = ('majority:answer="([a-m])"', "self_certainty", "borda:power=2", "first_finish", Reward(shortest))


@pytest.mark.slow
@pytest.mark.parametrize("select", SELECTIONS, ids=["majority", "self_certainty", "borda", "first_finish", "reward"])
def test_it_is_the_selection_among_a_greedy_text_and_draws(select):
    records = Hedged(4, select)(LARGE, ASKED, batch_size=3, **WARM)
    drawn = specjax.generate(LARGE, ASKED, num_return_sequences=4, **WARM, **HOW)
    greedy = specjax.generate(LARGE, ASKED, max_new_tokens=10, **HOW)
    selection = make_selection(select) if isinstance(select, str) else select
    for at, (text, record) in enumerate(zip(ASKED, records, strict=True)):
        own = [greedy[at], *drawn[4 * at + 1 : 4 * at + 4]]
        assert [list(step.tokens) for step in record.steps] == [one.tokens for one in own]
        seen = [
            Candidate(
                answer_of(one.text, selection.answer or None), one.self_certainty, one.new_tokens,
                one.finish_reason == "eos", one.text, text,
            )
            for one in own
        ]  # fmt: skip
        best, score = selection.choose(seen)
        assert record.tokens == own[best].tokens and record.passes == sum(one.steps for one in own)
        assert record.score == (score if score is None else pytest.approx(score, abs=1e-4))


def test_one_completion_is_the_greedy_text():
    for options in ({}, {"temperature": 1.0}):
        records = specjax.generate(
            LARGE, ASKED, decode="hedged:samples=1", max_new_tokens=10, progress=False, **options
        )
        greedy = specjax.generate(LARGE, ASKED, drafter="none", max_new_tokens=10, progress=False)
        assert [record.tokens for record in records] == [own.tokens for own in greedy]


def test_one_that_failed_is_not_taken():
    failed = Drawn(Step((1,), "b"), "error", 9.0)
    seen = [_candidate("p", one, "") for one in (failed, Drawn(Step((2, 3), "cd"), "eos", 1.0))]
    assert make_selection("self_certainty").choose(seen) == (1, 1.0)
    assert seen[1] == Candidate("cd", 1.0, 2, True, "cd", "p")


REFUSED = (
    (lambda: Hedged(0), "samples must be a whole number from 1 on, got 0"),
    (lambda: Hedged(4, "most"), "unknown selection 'most'"),
    (lambda: Hedged(4, 3), "select is a selection"),
    (lambda: Hedged(4)(LARGE, ["ab"]), "set a temperature, or samples to 1"),
    (lambda: Hedged(4, Reward(shortest))(LARGE, [[1, 2]], temperature=1.0), "a scorer reads prompts as texts"),
    (lambda: Hedged(4, "reward:module=nothing.here").bind(LARGE), "cannot read nothing.here"),
    (lambda: Hedged(4)(dataclasses.replace(LARGE, tokenizer=None), [[1, 2]], temperature=1.0), "has no tokenizer"),
)


@pytest.mark.parametrize(("call", "said"), REFUSED, ids=[said[:20] for _, said in REFUSED])
def test_what_it_does_not_take(call, said):
    assert isinstance(LARGE, Model) and Hedged(2, Borda()).selection == Borda()
    with pytest.raises(ValueError, match=said):
        call()


def test_it_is_listed_and_says_what_is_missing(capsys):
    assert cli.main(["searches"]) == 0 and "\nhedged" in capsys.readouterr().out
    assert cli.main(["generate", "x", "--decode", "hedged"]) == 2
    assert "set a temperature, or samples to 1" in capsys.readouterr().err
