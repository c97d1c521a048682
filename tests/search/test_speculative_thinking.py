"""Speculative thinking: without cues the small model's text, and with them that of a slow oracle that reuses nothing."""

import dataclasses
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.two_models import EOS, LARGE, LETTERS, SMALL, STOPS, written

import specjax
from specjax import cli
from specjax.search import SpeculativeThinking, speculative_thinking, writer
from specjax.search.stepwise import Asked

METHOD = SpeculativeThinking(
    SMALL, STOPS, reflect=("c", "8"), affirm=("a",), verify=("B", "j"), peek=3, turn=4, long_turn=6, long_turn_growth=2,
    longest_long_turn=9, patience=1, patience_growth=1, longest_patience=2, help="nlm",
)  # fmt: skip
PROMPTS = [[3, 8, 13], [11, 10, 9], [6, 5, 17, 14, 1], [1, 22, 12, 8, 16]]
NEW = 60
GREEDY = {"max_new_tokens": NEW, "temperature": 0.0}


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

    def mood(self, letters):
        count = lambda cues: sum(letters.count(cue.lower()) for cue in cues)
        affirms, doubts = count(self.method.affirm), count((*self.method.reflect, *self.method.verify))
        return (affirms > doubts) - (0 < doubts >= affirms)

    def run(self):
        method, doubts, patience, long = self.method, 0, self.method.patience, self.method.long_turn
        if method.begin:
            self.take_over(method.begin)
        while not self.over:
            tokens = self.said(SMALL, NEW, STOPS)
            self.small += len(tokens)
            self.add(tokens, "small")
            if self.over:
                break
            if doubts >= patience:
                if len(self.text) + 3 >= NEW:
                    continue
                self.add([LETTERS.index(letter) for letter in method.help], "help")
                self.small += 1
                self.take_over(long)
                doubts, long = 0, min(long + method.long_turn_growth, method.longest_long_turn)
                patience = min(patience + method.patience_growth, method.longest_patience)
                continue
            if not method.always:
                peek = self.said(SMALL, method.peek)
                self.small += len(peek)
                if not self.mood("".join(LETTERS[token] for token in peek if token not in EOS)):
                    continue
            wrote = self.take_over(method.turn)
            doubts += self.mood(wrote) < 0
            if any(cue.lower() in wrote for cue in method.verify):
                self.take_over(method.long_turn)
        return self.steps, self.large, self.small


def said(record):
    return [(step.tokens, step.by) for step in record.steps], record.passes, record.small_passes


@pytest.fixture(scope="module")
def wanted():
    return [Oracle(METHOD, prompt).run() for prompt in PROMPTS]


def test_with_cues_it_is_the_oracle(wanted):
    """The large model's turns, the longer ones after a check, and the sentence after some doubts."""
    records = METHOD(LARGE, PROMPTS, batch_size=4, **GREEDY)
    assert [said(record) for record in records] == wanted
    assert {by for steps, *_ in wanted for _, by in steps} == {"small", "large", "help"}
    assert [said(record) for record in METHOD(LARGE, PROMPTS, batch_size=3, **GREEDY)] == wanted
    eager = dataclasses.replace(METHOD, begin=5, always=True)
    records = eager(LARGE, PROMPTS[:2], batch_size=4, **GREEDY)
    assert [said(record) for record in records] == [Oracle(eager, prompt).run() for prompt in PROMPTS[:2]]


@pytest.mark.slow
def test_a_cache_that_lacks_what_was_read_is_seen(wanted, monkeypatch):
    read = writer._read

    def forgetful(decoder, params, state, *args):
        cache = jax.tree.map(jnp.copy, state.cache)
        state, *heard = read(decoder, params, state, *args)
        return dataclasses.replace(state, cache=cache), *heard

    monkeypatch.setattr(writer, "_read", forgetful)
    assert [said(record) for record in METHOD(LARGE, PROMPTS, batch_size=4, **GREEDY)] != wanted


@pytest.mark.slow
def test_without_cues_it_is_the_small_model():
    """Token for token what `generate` writes with it, greedy or drawn; the large model is never asked. Looking ahead costs
    passes."""
    mute = dataclasses.replace(METHOD, reflect=(), affirm=(), verify=())
    for options in ({"temperature": 0.0}, {"temperature": 1.0, "top_k": 6, "seed": 3}):
        got = mute(LARGE, PROMPTS, max_new_tokens=NEW, batch_size=4, **options)
        wanted = specjax.generate(SMALL, PROMPTS, drafter="none", max_new_tokens=NEW, progress=False, **options)
        assert [record.tokens for record in got] == [record.tokens for record in wanted]
        assert [record.finish_reason for record in got] == [record.finish_reason for record in wanted]
        assert all(mine.passes == 0 and mine.small_passes >= own.steps for mine, own in zip(got, wanted, strict=True))


class Words:
    """A tokenizer of a text a token."""

    def __init__(self):
        self.texts = [""]

    def encode(self, text):
        self.texts.append(text)
        return len(self.texts) - 1

    def decode(self, ids, **options):
        return "".join(self.texts[token] for token in ids)


class Scripted:
    """One row that writes what `says` gives, a token per call; an empty text ends it. `events` are how many it was
    asked for."""

    rows, capacity = 1, 1024

    def __init__(self, words, says, events):
        self.model, self.says, self.events = SimpleNamespace(tokenizer=words, eos_ids=(0,)), says, events
        self.begin, self.length, self.most = np.ones(1, int), np.ones(1, int), np.full(1, 999)
        self.tokens, self.failed, self.passes = np.ones((1, 999), int), [False], [0]

    def enter(self, asked):
        pass

    def over(self, row):
        return self.tokens[row, self.length[row] - 1] == 0

    def reason(self, row):
        return "eos"

    def new(self, row):
        return self.tokens[row, 1 : self.length[row]].tolist()

    def back(self, lengths):
        self.length = np.minimum(self.length, lengths)

    def read(self, texts):
        for token in texts[0]:
            self.tokens[0, self.length[0]] = token
            self.length = self.length + 1

    def write(self, rows, most, step=True):
        if not rows[0]:
            return [[]]
        self.events.append(int(np.ravel(most)[0]))
        text = self.says(step)
        token = self.model.tokenizer.encode(text) if text else 0
        self.read([[token]])
        return [[token]]


def machine(method, peeks, large):
    """Tokens that are asked for by turns, of either model; the text, and the rows at its end. Each peek has its trigger."""
    words, events, at = Words(), [], iter(peeks)
    words.encode("prompt")
    state = {}

    def small(step):
        if step:
            state["peek"] = next(at, None)
            return "" if state["peek"] is None else "."
        return state["peek"]

    help = (words.encode("HELP"),)
    little = Scripted(words, small, [])
    little.events = events
    large = iter(large)
    asked = Asked(("prompt",), ((1,),), np.zeros((1, 2), np.uint32), 1, {})
    rows = speculative_thinking._Rows(method, Scripted(words, lambda step: next(large), events), little, asked, help)
    (record,) = rows.run()
    return [tokens for tokens in events if tokens < 1024], record.text, rows


PEEKS = ("So x", "Wait", "Yes", "Wait", "-", "Wait", "Hmm", "Yes", "Wait", "-")
LARGE_SAYS = ("Wait no", "Yes, final answer", "Let me check it", "so", "helped", "Another", "Wait", "Wait", "so")


def test_its_turns_are_the_authors():
    """The authors' program does this with these texts: what it asks either model for in turn, and the text."""
    method = SpeculativeThinking(patience=2, patience_growth=1, longest_patience=3)
    asked, text, rows = machine(method, PEEKS, LARGE_SAYS)
    assert asked == [20, 20, 20, 20, 20, 20, 20, 125, 125, 20, 20, 20, 20, 20, 20, 20, 150]
    assert text == "..Wait no.Yes, final answer.Let me check itso.HELPhelped.Another..Wait.Wait.HELPso"
    assert (rows.doubts.tolist(), rows.patience.tolist(), rows.long_turn.tolist()) == ([0], [3], [175])


def test_a_model_that_does_not_reason_is_begun_for_and_asked_at_every_trigger():
    """As above; the authors look ahead here too, and pay no heed to what they see."""
    method = SpeculativeThinking(patience=2, begin=100, always=True)
    asked, text, _ = machine(method, PEEKS[:4], ("begun", *LARGE_SAYS))
    assert asked == [100, 20, 20, 20, 125, 125]
    assert text == "begun.Wait no.Yes, final answer.Let me check itso.HELPhelped"


@pytest.mark.parametrize(
    ("text", "mood"),
    [
        ("Wait, yes", -1), ("Yes yes, wait", 1), ("Let me check", -1), ("So x = 2", 0), ("Yesterday we waited", -1),
        ("another, another: the final answer", -1),
    ],
)  # fmt: skip
def test_moods_are_the_authors(text, mood):
    _, _, rows = machine(SpeculativeThinking(), (), ())
    assert rows._mood([rows.large.model.tokenizer.encode(text)]) == mood


def test_the_defaults_are_the_authors():
    """Drawn at 0.6 from 50 tokens with a top-p of 0.95 where no temperature is said."""
    method = SpeculativeThinking()
    assert (method.peek, method.turn, method.long_turn, method.long_turn_growth, method.longest_long_turn) == (
        20,
        20,
        125,
        25,
        200,
    )
    assert (method.patience, method.patience_growth, method.longest_patience) == (15, 5, 30)
    run = lambda **options: [r.tokens for r in METHOD(LARGE, PROMPTS, max_new_tokens=NEW, batch_size=4, **options)]
    drawn = run()
    assert drawn == run(temperature=0.6, top_k=50, top_p=0.95) and drawn != run(temperature=0.0)


def test_what_it_does_not_take():
    with pytest.raises(ValueError, match="peek must be a whole number from 1 on, got 0"):
        dataclasses.replace(METHOD, peek=0)
    with pytest.raises(ValueError, match="has no tokenizer to read a text with"):
        METHOD(dataclasses.replace(LARGE, tokenizer=None), PROMPTS)


def test_it_is_listed(capsys):
    assert cli.main(["searches"]) == 0 and "\nspeculative_thinking" in capsys.readouterr().out
