"""PlanSearch: how often the model is asked and for what, replies that are lists and programs, and the check that chooses."""

import dataclasses
import itertools
import json

import jax.numpy as jnp
import numpy as np
import pytest
from search.test_verbalized import END, Ascii, Script

import specjax
from specjax.models import Model
from specjax.search import PlanSearch, ScorerError
from specjax.search.plan_search import plans
from specjax.search.plan_search.plans import listed, programs


class Mock:
    """Answers every question, and counts; programs are numbered."""

    def __init__(self, count, bad=0):
        self.count, self.bad, self.chats, self.number = count, bad, [], itertools.count()

    def ask(self, chats, temperature):
        self.chats += [(chat, temperature) for chat in chats]
        return [self.reply(chat, temperature) for chat in chats]

    def reply(self, chat, temperature):
        number = next(self.number)
        if chat[-1]["content"] == plans.AS_JSON:
            known = json.dumps([f"{number}.{at}" for at in range(self.count)])
            return "no list" if temperature in plans.PARSES[: self.bad] else f"```json\n{known}\n```"
        if "Write the program" in chat[-1]["content"]:
            return f"So:\n```python\nprint({number})\n```"
        return f"reply {number}"

    def asked(self, text):
        return [chat for chat, _ in self.chats if text in chat[-1]["content"]]


def search(mock, seed=0, **sizes):
    return programs(
        "Add.", mock.ask, np.random.default_rng(seed), **{"observations": 5, "subset": 2, "layers": 2, **sizes}
    )


def test_the_model_is_asked_as_often_as_the_authors_program_does():
    """Of 5 observations layer one has 1 + 5 + 10 sets; each gives 15 new ones, and the empty one again."""
    mock = Mock(5)
    found = search(mock)
    nodes = 1 + 5 + 10
    sets = 1 + (nodes - 1) + nodes * (nodes - 1)
    assert len(mock.chats) == 4 * (1 + nodes) + 7 * sets
    assert len(found) == 2 * sets == len({own.code for own in found})
    assert len(mock.asked("Give 5 observations")) == 1 and len(mock.asked("Give new observations")) == nodes
    assert len({own.observations for own in found}) == sets and max(len(own.observations) for own in found) == 2
    (empty,) = [own for own in {own.observations for own in found} if not own]
    assert sum(own.observations == empty for own in found) == 2, "one from the sketch and one from its correction"


def test_what_follows_from_observations_is_asked_with_them():
    mock = Mock(1)
    found = search(mock, layers=2)
    derived = [chat[-1]["content"] for chat in mock.asked("Give new observations")]
    (first,) = [own.observations[0] for own in found if own.observations and own.observations[0].startswith("3.")][:1]
    assert sorted(first in own for own in derived) == [False, True]
    sketches = [chat[-1]["content"] for chat in mock.asked("without code")]
    assert all("Add." in own for own in sketches) and sum(f"- {first}" in own for own in sketches) == 1
    fixes = mock.asked(plans.FIX)
    assert [turn["role"] for turn in fixes[0]] == ["system", "user", "assistant", "user"]


@pytest.mark.parametrize("bad", [1, 2, 3])
def test_a_list_is_asked_for_again_a_little_warmer(bad):
    mock = Mock(2, bad)
    found = search(mock, layers=1)
    tried = [temperature for chat, temperature in mock.chats if chat[-1]["content"] == plans.AS_JSON]
    assert tried == list(plans.PARSES[: min(bad + 1, 3)])
    assert len({own.observations for own in found}) == (4 if bad < 3 else 1)


def test_programs_come_in_random_order_at_a_seed():
    codes = lambda seed: [own.code for own in search(Mock(2), seed, layers=1)]
    assert codes(1) == codes(1) != codes(2) and sorted(codes(1)) == sorted(codes(2))
    assert len(search(Mock(2), layers=0)) == 2 and len(search(Mock(3), layers=1, subset=0)) == 2


LISTS = {
    '["a", "b"]': ["a", "b"],
    "Sure:\n```python\n['it\\'s', \"b\"]\n```": ["it's", "b"],
    "[]": [],
    '["a", 1]': None,
    '{"a": 1}': None,
    "__import__('os').getcwd()": None,
    "[open('x')]": None,
    '["a"': None,
}


@pytest.mark.parametrize("reply", list(LISTS))
def test_lists_are_read_and_nothing_is_run(reply):
    assert listed(reply) == LISTS[reply]


class Chats(Ascii):
    """Writes messages one after the other; the last one ends with the mark after which the model writes."""

    chat_template = "messages"

    def apply_chat_template(self, messages, tokenize=False, **options):
        return "".join(f"{own['content']}\n" for own in messages).replace("?", ".") + "?"


def model(text, room=6000):
    return Model(
        Script(text), {"scale": jnp.ones(())}, Chats(), (END,), "script", None, np.dtype("float32"), longest=room
    )


TINY = PlanSearch(observations=2, layers=1, check=lambda problem, program: -len(program) + (problem == "Add."))


@pytest.mark.slow
def test_a_model_is_asked_and_the_best_program_is_the_text():
    """One reply serves all questions: a list of two observations, and as a program the list itself."""
    (found,) = TINY(model('["a", "b"]'), ["Add."], max_new_tokens=12, batch_size=4)
    assert found.text == '["a", "b"]' and found.score == 1 - 10 and found.finish_reason == "stop"
    assert (found.calls, found.lost, len(found.steps)) == (4 + 7 * 4, 0, 8) and found.passes == 11 * found.calls
    few = dataclasses.replace(TINY, programs=3)
    (record,) = specjax.generate(model('["a", "b"]'), "Add.", decode=few, max_new_tokens=12, progress=False)
    assert (record.text, record.score, record.steps) == (found.text, found.score, found.passes)
    (none,) = PlanSearch(layers=0)(model("p", 40), ["Add."], max_new_tokens=4)
    assert none.finish_reason == "error" and "wrote no program in 7 replies, 7 of which had no room" in none.error


def test_the_check_chooses_among_so_many_programs(monkeypatch):
    """The first of equals; without a check the first of all, whose score is none."""
    made = [plans.Program(code, "", ()) for code in ("bb", "", "a", "c", "dd")]
    monkeypatch.setattr("specjax.search.plan_search.method.programs", lambda *own, **sizes: made)
    heard = []
    check = lambda problem, program: heard.append((problem, program)) or float(program in "ac")
    (found,) = PlanSearch(check=check, programs=3)(model(""), ["Add."])
    assert (found.text, found.score) == ("a", 1.0) and heard == [("Add.", own) for own in ("bb", "a", "c")]
    (found,) = PlanSearch()(model(""), [[{"role": "user", "content": "Add."}]])
    assert (found.text, found.score, len(found.steps)) == ("bb", None, 4)
    for fails, said in (
        (lambda *own: 1 / 0, "failed: ZeroDivisionError"),
        (lambda *own: float("nan"), "finite number"),
    ):
        with pytest.raises(ScorerError, match=said):
            PlanSearch(check=fails)(model(""), ["Add."])


WRONG = {
    "observations must be a whole number from 1 on, got 0": lambda: PlanSearch(0),
    "layers must be a whole number from 0 on, got -1": lambda: PlanSearch(layers=-1),
    "subset must be a whole number from 0 on, got True": lambda: PlanSearch(subset=True),
    "programs must be a whole number from 1 on, got 0": lambda: PlanSearch(programs=0),
    "check must be a function": lambda: PlanSearch(check=3).bind(model("")),
    "cannot read nothing.here": lambda: PlanSearch(check="nothing.here").bind(model("")),
    "give texts or chats, not ids": lambda: TINY(model(""), [[1, 2]]),
    "has no chat template": lambda: TINY(dataclasses.replace(model(""), tokenizer=Ascii()), ["a"]),
    "batch_size must be a whole number": lambda: TINY(model(""), ["a"], batch_size=0),
}


@pytest.mark.parametrize("said", list(WRONG))
def test_what_cannot_be_done(said):
    with pytest.raises(ValueError, match=said):
        WRONG[said]()
