"""Verbalized sampling: the forms of a reply, the answer that is drawn from it, and replies without answers."""

import dataclasses
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax.lm import BaseLM, Output
from specjax.models import Model
from specjax.search import Verbalized
from specjax.search.verbalized import answers_of

END = 3
REPLY = '{"responses": [{"text": "aa", "probability": 0.5}, {"text": "b", "probability": 0.25},]}'
TWO = [("aa", 0.5), ("b", 0.25)]
METHOD = Verbalized(2, "{answers}:")


class Ascii:
    """A tokenizer of one character a token."""

    chat_template = None

    def encode(self, text, add_special_tokens=True, **options):
        return [ord(letter) for letter in text]

    def decode(self, ids, skip_special_tokens=False, **options):
        return "".join(chr(token) for token in ids if not (skip_special_tokens and token == END))


@dataclasses.dataclass(frozen=True)
class Script(BaseLM):
    """Writes a text after a question mark, and then the end."""

    text: str = REPLY
    vocab_size: int = 128

    def init_cache(self, batch, capacity, dtype=None):
        return jnp.zeros((batch, capacity), jnp.float32)

    def __call__(self, params, block, cache, *, wants, draw=None, past=None, partial=None):
        seen = jnp.arange(cache.shape[1])[None] < block.length[:, None]
        begin = jnp.max(jnp.where(seen, cache, 0.0), axis=1)[:, None]  # 1 + where the question mark stands
        here = jnp.where(block.tokens == ord("?"), block.positions + 1.0, 0.0)
        begin = jnp.maximum(begin, jax.lax.cummax(here, axis=1))
        script = jnp.asarray([*map(ord, self.text), END])
        at = (block.positions + 1 - begin).astype(jnp.int32)
        logits = 50.0 * jax.nn.one_hot(script[jnp.clip(at, 0, script.size - 1)], 128) + 0 * params["scale"]
        draws = draw(logits) if wants.draw and draw is not None else None
        return Output(here, logits=logits if wants.logits else None, draw=draws)


def scripted(text):
    model = Script(text)
    return Model(model, {"scale": jnp.ones(())}, Ascii(), (END,), "script", None, np.dtype("float32"), longest=512)


READ = {
    REPLY: TWO,
    f"```json\n{REPLY}\n```": TWO,
    f"``` {REPLY} ```": TWO,
    f"Of course: {REPLY} There you are.": TWO,
    f"```json\n{REPLY}": TWO,
    '{"reasoning": "r", "responses": [{"response": "aa"}, {"text": "b", "probability": "high"}], }': [
        ("aa", None),
        ("b", None),
    ],
    '{"responses": ["aa", {"text": "b", "probability": NaN}, {"probability": 1}]}': [("aa", None), ("b", None)],
    '{"responses": "aa"}': [],
    '{"answers": [{"text": "aa"}]}': [],
    '{"responses": [{"text": "aa"': [],
    '[{"text": "aa"}, {"text": "b"}]': [],
    "": [],
}


@pytest.mark.parametrize("reply", [pytest.param(own, id=f"{number}") for number, own in enumerate(READ)])
def test_a_reply_is_read_as_the_authors_parser_does(reply):
    """In all forms that this one reads; it passes over entries without a text, and over what is no number."""
    assert answers_of(reply) == READ[reply]


@pytest.mark.slow
def test_an_answer_is_drawn_by_its_probability():
    """Of one reply to 120 equal prompts 2/3; the same again at the same seed, by direct call and by `generate`."""
    model, asked = scripted(REPLY), ["who?"] * 120
    records = METHOD(model, asked, max_new_tokens=120, seed=4, batch_size=40)
    counts = Counter(record.text for record in records)
    assert set(counts) == {"aa", "b"} and abs(counts["aa"] - 80) < 4 * np.sqrt(120 * 2 / 9)
    for record in records:
        assert record.finish_reason == "stop" and record.score == dict(TWO)[record.text]
        assert record.tokens == Ascii().encode(record.text) and record.passes == len(REPLY) + 1
        assert [(step.text, step.score) for step in record.steps] == TWO
    how = {"max_new_tokens": 120, "seed": 4, "progress": False, "batch_size": 16}
    line = 'verbalized:answers=2,instruction="{answers}:"'
    again = specjax.generate(model, asked[:16], decode=line, **how)
    assert [(one.text, one.score) for one in again] == [(one.text, one.score) for one in records[:16]]


@pytest.mark.slow
def test_a_reply_without_answers_is_an_error_of_its_prompt():
    reply = "none"
    (record,) = specjax.generate(scripted(reply), "who?", decode=METHOD, max_new_tokens=60)
    assert record.finish_reason == "error" and record.text == reply
    assert record.error == f'the reply of script is no JSON object with answers under "responses": {reply!r}'


def test_the_instruction_stands_first():
    assert METHOD.question("who?") == "2:\n\nwho?"
    user, system = {"role": "user", "content": "who?"}, {"role": "system", "content": "s"}
    assert METHOD.question([user]) == [{"role": "system", "content": "2:"}, user]
    assert METHOD.question([system, user]) == [{"role": "system", "content": "s\n\n2:"}, user]
    assert "Give 5 different answers" in Verbalized().question("a") and Verbalized().published({}) == {
        "temperature": 0.7
    }


REFUSED = (
    (lambda: Verbalized(0), "answers must be a whole number from 1 on"),
    (lambda: Verbalized(2, "several"), "instruction must hold {answers}"),
    (lambda: METHOD(scripted(""), [[1, 2]]), "give texts or chats, not ids"),
    (lambda: METHOD(scripted(""), "who?"), "prompts are a list of texts"),
    (lambda: specjax.generate(scripted(""), "a", decode=METHOD, stop="b"), "leave the stop strings out"),
)


@pytest.mark.parametrize(("call", "said"), REFUSED, ids=["answers", "instruction", "ids", "one text", "stop"])
def test_what_it_does_not_take(call, said):
    with pytest.raises(ValueError, match=said):
        call()
