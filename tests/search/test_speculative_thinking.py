"""Speculative thinking: without cues the small model's text, and with them that of a slow oracle that reuses nothing."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from support.two_models import EOS, LARGE, LETTERS, PROMPTS, SMALL, STOPS, written

import specjax
from specjax import cli
from specjax.search import SpeculativeThinking, writer

METHOD = SpeculativeThinking(
    STOPS, reflect=("c", "8"), affirm=("a",), verify=("B", "j"), peek=3, turn=4, long_turn=6, turn_growth=1, longest_turn=5,
    long_turn_growth=2, longest_long_turn=9, patience=1, help="nlm",
)  # fmt: skip
NEW = 60


class Oracle:
    """One prompt's text, each part of it written after all that is before it is read anew."""

    def __init__(self, method, prompt):
        self.method, self.prompt, self.text, self.steps = method, prompt, [], []
        self.large, self.small, self.known = 0, 0, 0

    @property
    def over(self):
        return len(self.text) >= NEW or bool(self.text) and self.text[-1] in EOS

    def add(self, tokens, by):
        if tokens:
            self.text += tokens
            self.steps.append((tuple(tokens), by))

    def said(self, own, most, stops=()):
        return written(own, [*self.prompt, *self.text], min(most, NEW - len(self.text)), stops)

    def take_over(self, most):
        if self.over:
            return ""
        self.large += len(self.text) > self.known
        tokens = self.said(LARGE, most)
        self.add(tokens, "large")
        self.large, self.small, self.known = self.large + len(tokens), self.small + 1, len(self.text)
        return "".join(LETTERS[token] for token in tokens if token not in EOS)

    def run(self):
        method, doubts, turn, long = self.method, 0, self.method.turn, self.method.long_turn
        while not self.over:
            tokens = self.said(SMALL, NEW, STOPS)
            self.small += len(tokens)
            self.add(tokens, "small")
            if self.over:
                break
            peek = self.said(SMALL, method.peek)
            self.small += len(peek)
            letters = "".join(LETTERS[token] for token in peek if token not in EOS)
            holds = lambda cues, text: any(cue.lower() in text for cue in cues)
            if not holds((*method.reflect, *method.affirm, *method.verify), letters):
                self.add(peek, "small")
                continue
            doubts += holds(method.reflect, letters) and not holds(method.affirm, letters)
            if holds(method.verify, self.take_over(turn)):
                self.take_over(long)
            if doubts >= method.patience and len(self.text) + 3 < NEW:
                doubts = 0
                self.add([LETTERS.index(letter) for letter in method.help], "help")
                self.small += 1
                self.take_over(long)
                turn, long = min(turn + 1, method.longest_turn), min(long + 2, method.longest_long_turn)
        return self.steps, self.large, self.small


def said(record):
    return [(step.tokens, step.by) for step in record.steps], record.passes, record.small_passes


@pytest.fixture(scope="module")
def wanted():
    return [Oracle(METHOD, prompt).run() for prompt in PROMPTS]


def test_with_cues_it_is_the_oracle(wanted):
    """The large model's turns, the longer ones after a check, and the sentence after some doubts."""
    records = METHOD(LARGE, SMALL, PROMPTS, max_new_tokens=NEW, batch_size=4)
    assert [said(record) for record in records] == wanted
    assert {by for steps, *_ in wanted for _, by in steps} == {"small", "large", "help"}
    assert [said(record) for record in METHOD(LARGE, SMALL, PROMPTS, max_new_tokens=NEW, batch_size=3)] == wanted


def test_a_cache_that_lacks_what_was_read_is_seen(wanted, monkeypatch):
    read = writer._read

    def forgetful(decoder, params, state, *args):
        cache = jax.tree.map(jnp.copy, state.cache)
        state, *heard = read(decoder, params, state, *args)
        return dataclasses.replace(state, cache=cache), *heard

    monkeypatch.setattr(writer, "_read", forgetful)
    assert [said(record) for record in METHOD(LARGE, SMALL, PROMPTS, max_new_tokens=NEW, batch_size=4)] != wanted


def test_without_cues_it_is_the_small_model():
    """Token for token what `generate` writes with it, greedy or drawn; the large model is never asked."""
    mute = dataclasses.replace(METHOD, reflect=(), affirm=(), verify=())
    for options in ({}, {"temperature": 1.0, "top_k": 6, "seed": 3}):
        got = mute(LARGE, SMALL, PROMPTS, max_new_tokens=NEW, batch_size=4, **options)
        wanted = specjax.generate(SMALL, PROMPTS, drafter="none", max_new_tokens=NEW, progress=False, **options)
        assert [record.tokens for record in got] == [record.tokens for record in wanted]
        assert [record.finish_reason for record in got] == [record.finish_reason for record in wanted]
        assert [(record.passes, record.small_passes) for record in got] == [(0, record.steps) for record in wanted]


def test_what_it_does_not_take():
    with pytest.raises(ValueError, match="peek must be a whole number from 1 on, got 0"):
        dataclasses.replace(METHOD, peek=0)
    with pytest.raises(ValueError, match="has no tokenizer, and a text is to be read"):
        METHOD(dataclasses.replace(LARGE, tokenizer=None), SMALL, PROMPTS)


def test_it_is_listed(capsys):
    assert cli.main(["searches"]) == 0 and "\nspeculative_thinking" in capsys.readouterr().out
