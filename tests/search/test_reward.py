"""A scorer of the user's: what it is given, what is taken, in every place where completions are selected, and its faults."""

import json
import math
import statistics
import sys

import numpy as np
import pytest

import specjax
from specjax import cli
from specjax.assembly.registry import make_selection
from specjax.search import Candidate, Reward, ScorerError
from specjax.search.reward import function_of

MODULE = """
def digits(prompt, texts):
    return [sum(map(str.isdigit, text)) for text in texts]

def empty(prompt, texts):
    return []

NUMBER = 3
"""


@pytest.fixture
def scorers(tmp_path, monkeypatch):
    """A module in the working directory."""
    (tmp_path / "own_scorers.py").write_text(MODULE)
    (tmp_path / "broken_scorers.py").write_text("def f(:")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [path for path in sys.path if path])
    return tmp_path


def candidates(*texts, answers=None):
    answers = texts if answers is None else answers
    return [Candidate(answer, text=text, prompt="q") for text, answer in zip(texts, answers, strict=True)]


@pytest.mark.parametrize("kind", (list, np.asarray, tuple))
def test_the_best_is_taken_and_of_equals_the_first(kind):
    seen = []

    def scorer(prompt, texts):
        seen.append((prompt, texts))
        return kind([float(len(text)) for text in texts])

    assert Reward(scorer).choose(candidates("a", "bbb", "ccc", "dd")) == (1, 3.0)
    assert seen == [("q", ["a", "bbb", "ccc", "dd"])]


def test_completions_without_an_answer_are_not_asked_about():
    seen = []
    scorer = lambda prompt, texts: seen.append(texts) or [-1.0] * len(texts)
    assert Reward(scorer).choose(candidates("a", "b", "c", answers=(None, "x", "y"))) == (1, -1.0)
    assert Reward(scorer).choose(candidates("a", "b", answers=(None, None))) == (0, None)
    assert seen == [["b", "c"]]


STEPS = {"a": [0.9, 0.1, 0.5], "b": [0.4, 0.6], "c": [0.3], "d": [1.0, 1.0, 0.2]}
WORTH = {"mean": statistics.fmean, "min": min, "last": lambda own: own[-1], "product": math.prod}


@pytest.mark.parametrize("aggregate", WORTH)
def test_numbers_of_steps_are_one_number(aggregate):
    """By enumeration, and another completion is taken by each."""
    got = Reward(lambda prompt, texts: [STEPS[text] for text in texts], aggregate).scores(candidates(*STEPS))
    np.testing.assert_allclose(got, [WORTH[aggregate](own) for own in STEPS.values()])
    assert {"mean": "d", "min": "b", "last": "b", "product": "c"}[aggregate] == [*STEPS][int(np.argmax(got))]


def test_the_sum_of_equal_answers_counts():
    """Three times 0.4 are more than once 0.9; without an answer there is no vote."""
    scorer = lambda prompt, texts: [{"a": 0.9, "b": 0.4, "c": 0.45, "d": 0.35, "e": 5.0}[text] for text in texts]
    own = candidates("a", "b", "c", "d", "e", answers=("7", "5", "5", "5", None))
    assert Reward(scorer).choose(own) == (0, 0.9)
    assert Reward(scorer, vote="sum").choose(own) == (1, pytest.approx(1.2))


WRONG = {
    "too few": (lambda prompt, texts: [1.0], "must return a number for each text: 1 for 2"),
    "NaN": (lambda prompt, texts: [1.0, math.nan], "text 2 has nan"),
    "infinite": (lambda prompt, texts: [math.inf, 0.0], "text 1 has inf"),
    "no steps": (lambda prompt, texts: [[1.0], []], r"text 2 has \[\]"),
    "nested": (lambda prompt, texts: [[[1.0]], 1.0], r"text 1 has \[\[1.0\]\]"),
    "words": (lambda prompt, texts: ["good", "bad"], "text 1 has 'good'"),
    "none": (lambda prompt, texts: None, "failed: TypeError"),
    "raises": (lambda prompt, texts: [1 / 0], "failed: ZeroDivisionError: division by zero"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_return_is_one_line(case):
    scorer, said = WRONG[case]
    with pytest.raises(ScorerError, match=said) as raised:
        Reward(scorer).choose(candidates("a", "b"))
    assert "\n" not in str(raised.value)


def test_a_name_is_looked_for_in_the_working_directory(scorers):
    made = make_selection("reward:module=own_scorers.digits,aggregate=min,vote=sum")
    assert made == Reward("own_scorers.digits", "min", "sum")
    made.ready()
    assert made.choose(candidates("1", "22", "x")) == (1, 2.0)


NAMES = {
    "": "reward needs a scorer, as in reward:module=pkg.function, got ''",
    "digits": "reward needs a scorer",
    "own_scorers.frob": "module 'own_scorers' has no attribute 'frob'",
    "no_such_module_at_all.f": "No module named 'no_such_module_at_all'",
    "broken_scorers.f": "cannot read broken_scorers.f: SyntaxError",
    "own_scorers.NUMBER": "own_scorers.NUMBER is no function",
}


@pytest.mark.parametrize("name", NAMES)
def test_a_wrong_name_is_told_before_a_model_is_loaded(scorers, name):
    with pytest.raises(ValueError, match=NAMES[name]):
        specjax.generate("no/model", "a", select=f"reward:module={name}", num_return_sequences=2, temperature=1.0)


@pytest.mark.parametrize("field", ("aggregate=max", "vote=most"))
def test_unknown_words_are_refused(field):
    with pytest.raises(ValueError, match=f"{field.split('=')[0]} of reward is one of"):
        make_selection(f"reward:{field}")


OPTIONS = {"temperature": 1.2, "num_return_sequences": 3, "max_new_tokens": 12, "drafter": "none"}


@pytest.mark.slow
def test_every_place_takes_the_same(scorers, capsys):
    """Python, the command line, its files of lines and `eval`; a chat's prompt is its words."""
    digits = function_of("own_scorers.digits")
    asked = ["Add 17 and 9.", "Write some numbers."]
    all_of_them = specjax.generate("tiny", asked, chat=True, progress=False, **OPTIONS)
    seen = []

    def scorer(prompt, texts):
        seen.append(prompt)
        return digits(prompt, texts)

    taken = specjax.generate("tiny", asked, chat=True, progress=False, select=Reward(scorer), **OPTIONS)
    groups = (all_of_them[:3], all_of_them[3:])
    for own, record in zip(groups, taken, strict=True):
        worth = digits("", [one.text for one in own])
        assert (record.score, record.chosen) == (max(worth), worth.index(max(worth)))
        assert record.tokens == own[record.chosen].tokens
    assert sorted(seen) == sorted(asked)
    (scorers / "in.jsonl").write_text("".join(json.dumps({"prompt": one}) + "\n" for one in asked))
    words = [f"--{name.replace('_', '-')}={value}" for name, value in OPTIONS.items()]
    line = ["--select", "reward:module=own_scorers.digits"]
    job = ["generate", "--model", "tiny", "--chat", "--input", "in.jsonl", "--output", "out.jsonl", *words]
    assert cli.main([*job, *line]) == 0
    found = [json.loads(own) for own in (scorers / "out.jsonl").read_text().splitlines()]
    assert [own["tokens"] for own in found] == [record.tokens for record in taken]
    wrong = ["--select", "reward:module=own_scorers.empty"]
    assert cli.main([*job[: -len(words) - 1], "new.jsonl", *words, *wrong]) == 2
    assert "0 for 3; new.jsonl holds 0 of 2 records, and the same command goes on" in capsys.readouterr().err
    (scorers / "own.jsonl").write_text('{"prompt": "Add 1 and 2.", "answers": ["3"]}\n')
    asked_of = ["eval", "--model", "tiny", "--questions", "own.jsonl", "--json", *words]
    assert cli.main([*asked_of, *line]) == 0 and '"steps_per_answer":' in capsys.readouterr().out
    assert cli.main([*asked_of, *wrong]) == 2 and "must return a number for each text" in capsys.readouterr().err


def test_ids_are_no_text(scorers):
    with pytest.raises(ValueError, match="a scorer reads prompts as texts"):
        specjax.generate("tiny", [[5, 6]], select="reward:module=own_scorers.digits", progress=False, **OPTIONS)
