"""X-MBR: a majority without other languages, the mean utility by hand, a function of the user's, and what it does not take."""

import dataclasses

import numpy as np
import pytest
from support.two_models import LARGE, LETTERS, PROMPTS

import specjax
from specjax import cli
from specjax.lm import Block, Wants
from specjax.search import Candidate, Majority, ScorerError, Step, XMbr
from specjax.search.pool import Drawn
from specjax.search.selection import answer_of

METHOD = XMbr(4, languages="b|c", foreign=2, ask="n{language}")
ASKED = ["".join(LETTERS[token] for token in prompt) for prompt in PROMPTS]
WARM = {"max_new_tokens": 10, "temperature": 1.0, "seed": 3}
ALONE = dataclasses.replace(METHOD, languages="", utility="answer")


def pools():
    """Every prompt's greedy completion and then the drawn ones."""
    drawn = specjax.generate(LARGE, ASKED, drafter="none", num_return_sequences=4, progress=False, **WARM)
    greedy = specjax.generate(LARGE, ASKED, drafter="none", progress=False, max_new_tokens=10)
    return [[one, *drawn[4 * at + 1 : 4 * at + 4]] for at, one in enumerate(greedy)]


@pytest.mark.parametrize(
    "answer", (pytest.param("([a-m])[^a-m]*$", id="letter"), pytest.param("", id="text", marks=pytest.mark.slow))
)
def test_without_other_languages_and_by_answers_it_is_the_majority(answer):
    records = dataclasses.replace(ALONE, answer=answer)(LARGE, ASKED, **WARM)
    scores = set()
    for own, record in zip(pools(), records, strict=True):
        said = [Candidate(answer_of(one.text, answer or None)) for one in own]
        at, votes = Majority().choose(said)
        assert record.tokens == own[at].tokens and record.score == votes / 4
        assert record.passes == sum(one.steps for one in own)
        scores.add(votes)
    assert answer == "" or len(scores) > 1


def by_hand(text):
    """The mean of the hidden states over a text, of one whole pass."""
    ids = np.asarray([LARGE.tokenizer.encode(text)], np.int32)
    block = Block(ids, np.arange(ids.shape[1])[None], np.zeros(1, np.int32))
    cache = LARGE.lm.init_cache(1, 16)
    return np.mean(LARGE.lm(LARGE.params, block, cache, wants=Wants(final=True)).final[0], axis=0)


@pytest.mark.slow
@pytest.mark.parametrize("batch_size", (4, 3))
def test_the_highest_mean_similarity_to_all_evidence_is_taken(batch_size):
    records = METHOD(LARGE, ASKED, batch_size=batch_size, **WARM)
    changed = 0
    for text, own, record in zip(ASKED, pools(), records, strict=True):
        steps, foreign = record.steps[:4], record.steps[4:]
        assert [list(step.tokens) for step in steps] == [one.tokens for one in own]
        assert [step.by for step in foreign] == ["b", "b", "c", "c"]
        for language, first in (("b", foreign[0]), ("c", foreign[2])):
            (said,) = specjax.generate(LARGE, f"{text}n{language}", drafter="none", max_new_tokens=10)
            assert list(first.tokens) == said.tokens
        vectors = [by_hand(step.text) if step.text else np.zeros(16) for step in record.steps]
        unit = np.asarray([own / max(np.linalg.norm(own), 1e-12) for own in vectors])
        means = np.mean(unit[:4] @ unit.T, axis=1)
        np.testing.assert_allclose([step.score for step in steps], means, atol=1e-4)
        assert record.score == max(step.score for step in steps) and record.text in [step.text for step in steps]
        changed += int(np.argmax(means) != np.argmax(np.mean(unit[:4] @ unit[:4].T, axis=1)))
        blocks = sum(bool(step.text) for step in record.steps)
        assert record.passes == sum(len(step.tokens) for step in record.steps) + blocks
    assert changed  # the other languages matter


@pytest.mark.slow
def test_one_completion_is_greedy():
    records = dataclasses.replace(METHOD, samples=1)(LARGE, ASKED, max_new_tokens=10)
    assert [record.tokens for record in records] == [own[0].tokens for own in pools()]
    assert all(len(record.steps) == 1 for record in records)


def longest(prompt, text, evidence):
    """A utility of the user's: how much longer a text is than others."""
    assert prompt in ASKED and len(evidence) == 8 and text in evidence
    return [len(text) - len(other) for other in evidence]


@pytest.mark.slow
def test_a_function_of_the_users_says_what_agrees():
    for utility in (longest, f"{__name__}.longest"):
        (record,) = dataclasses.replace(METHOD, utility=utility)(LARGE, ASKED[:1], **WARM)
        assert len(record.text) == max(len(step.text) for step in record.steps[:4])
    wrong = {
        "must return a finite number for each text of the evidence": lambda *given: [1.0],
        "failed: ZeroDivisionError": lambda *given: [1 / 0],
        "returns? a finite": lambda prompt, text, evidence: [float("nan")] * len(evidence),
    }
    for said, utility in wrong.items():
        with pytest.raises(ScorerError, match=said.replace("returns?", "return")):
            dataclasses.replace(METHOD, utility=utility)(LARGE, ASKED[:1], **WARM)


def test_one_that_failed_is_neither_taken_nor_evidence():
    one = lambda text, end="eos": Drawn(Step((1,), text), end)
    pool = [one("b", "error"), one("c"), one("b"), one("b", "error")]
    found = ALONE._taken(LARGE, "p", pool, [])
    assert (found.text, found.score) == ("c", 0.5)
    assert ALONE._taken(LARGE, "p", [one("b", "error"), one("c")], []).text == "c"
    assert ALONE._taken(LARGE, "p", [one("b", "error")], []).finish_reason == "error"


REFUSED = (
    ({}, {}, "completions of a greedy prompt are all the same: set a temperature"),
    ({}, {"temperature": 1.0, "prompts": [[1, 2]]}, "give texts or chats, not ids"),
    ({"samples": 0}, {}, "samples must be a whole number from 1 on"),
    ({"foreign": 0}, {}, "foreign must be a whole number from 1 on"),
    ({"ask": "x"}, {}, "ask must hold {language}"),
    ({"answer": "("}, {}, "answer must be a regular expression"),
    ({"utility": "nothing.here"}, {"temperature": 1.0}, "utility cannot read nothing.here"),
    ({"utility": "bleu"}, {"temperature": 1.0}, "utility needs a function, as in utility=pkg.function, got 'bleu'"),
    ({"utility": 3}, {"temperature": 1.0}, "utility is hidden, answer or a function"),
)


@pytest.mark.parametrize(("fields", "options", "said"), REFUSED, ids=lambda case: str(case)[:40])
def test_what_it_does_not_take(fields, options, said):
    with pytest.raises(ValueError, match=said):
        dataclasses.replace(METHOD, **fields)(LARGE, **{"prompts": ["ab"], "max_new_tokens": 10, **options})


def test_the_command_says_what_is_missing(capsys):
    assert cli.main(["generate", "x", "--decode", "x_mbr:utility=bleu", "--temperature", "1"]) == 2
    assert "utility needs a function" in capsys.readouterr().err
