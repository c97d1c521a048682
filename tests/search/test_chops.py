"""CHOPS: a model that always names one number, the checklist and the replies beside whole passes, and what it does not take."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.two_models import EOS, LARGE, LETTERS, PROMPTS, Letters

import specjax
from specjax import cli
from specjax.lm import BaseLM, Output
from specjax.models import Model
from specjax.search import Chops, Step
from specjax.search.pool import Drawn

METHOD = Chops(
    4, checklist="n", checklist_tokens=6, before="l{checklist}m", each="m{answer}", after="l", reply="k{number}"
)
ASKED = ["".join(LETTERS[token] for token in prompt) for prompt in PROMPTS]
WARM = {"max_new_tokens": 10, "temperature": 1.0, "seed": 3}


@dataclasses.dataclass(frozen=True)
class Naming(BaseLM):
    """Names one number after `k`; elsewhere it writes any of `a` to `g`, or ends."""

    number: int = 2
    vocab_size: int = 24

    def init_cache(self, batch, capacity, dtype=None):
        return jnp.zeros((batch, capacity), jnp.float32)

    def __call__(self, params, block, cache, *, wants, draw=None, past=None, partial=None):
        named = jax.nn.one_hot(14 + self.number, 24)
        free = jnp.arange(24) <= EOS[0]
        asked = (block.tokens == LETTERS.index("k"))[..., None]
        logits = jnp.where(asked, 20 * named, jnp.where(free, 0.0, -50.0)) + 0 * params["scale"]
        draws = draw(logits) if wants.draw and draw is not None else None
        return Output(
            block.tokens.astype(jnp.float32) + 0 * cache[:, :1], logits=logits if wants.logits else None, draw=draws
        )


def naming(number):
    return Model(
        Naming(number), {"scale": jnp.ones(())}, Letters(), EOS, "naming", None, np.dtype("float32"), longest=512
    )


@pytest.mark.parametrize("number", (2, pytest.param(4, marks=pytest.mark.slow)))
def test_the_completion_that_the_model_names_is_taken(number):
    records = METHOD(naming(number), ["dcb", "aa"], **WARM)
    for record in records:
        assert len({step.text for step in record.steps}) > 2
        assert record.text == record.steps[number - 1].text and record.score > max(
            step.score for at, step in enumerate(record.steps) if at != number - 1
        )


def seconds(text, record):
    """The prompt with checklist and completions, and the passes that both requests took."""
    (said,) = specjax.generate(LARGE, f"{text}n", drafter="none", max_new_tokens=6)
    second = METHOD.question(text, said.text, [step.text for step in record.steps])
    return second, said.steps + -(-1 // 64) + -(-(len(second) - len(text)) // 64) + len(record.steps)


@pytest.mark.slow
@pytest.mark.parametrize("batch_size", (4, 3))
def test_it_is_the_likeliest_reply_after_checklist_and_completions(batch_size):
    """Completions are `generate`'s, of which the first is greedy; checklist and replies are those of whole passes."""
    records = METHOD(LARGE, ASKED, batch_size=batch_size, **WARM)
    drawn = specjax.generate(LARGE, ASKED, drafter="none", num_return_sequences=4, progress=False, **WARM)
    greedy = specjax.generate(LARGE, ASKED, drafter="none", progress=False, max_new_tokens=10)
    differed = 0
    for at, (text, record) in enumerate(zip(ASKED, records, strict=True)):
        own = [greedy[at], *drawn[4 * at + 1 : 4 * at + 4]]
        assert [list(step.tokens) for step in record.steps] == [one.tokens for one in own]
        passes = sum(one.steps for one in own)
        if len({one.text for one in own}) == 1:
            assert (record.score, record.passes) == (0, passes)
            continue
        differed += 1
        second, more = seconds(text, record)
        replies = [LARGE.tokenizer.encode(f"k{number}") for number in range(1, 5)]
        found = [one.logprob for one in specjax.score(LARGE, second, replies)]
        np.testing.assert_allclose([step.score for step in record.steps], found, atol=2e-4)
        best = record.steps[int(np.argmax(found))]
        assert (record.text, record.tokens, record.score) == (best.text, list(best.tokens), best.score)
        assert record.passes == passes + more
    assert differed > 2


@pytest.mark.slow
def test_one_completion_is_greedy_and_no_checklist_needs_none():
    one = dataclasses.replace(METHOD, samples=1)(LARGE, ASKED, max_new_tokens=10)
    greedy = specjax.generate(LARGE, ASKED, drafter="none", progress=False, max_new_tokens=10)
    assert [own.tokens for own in one] == [own.tokens for own in greedy]
    all_drawn = dataclasses.replace(METHOD, hedged=False, checklist_tokens=0)(LARGE, ASKED, **WARM)
    drawn = specjax.generate(LARGE, ASKED, drafter="none", num_return_sequences=4, progress=False, **WARM)
    steps = [list(step.tokens) for record in all_drawn for step in record.steps]
    assert steps == [one.tokens for one in drawn]
    second = METHOD.question(ASKED[0], "", [step.text for step in all_drawn[0].steps])
    assert "lm" in second and all(step.text in second for step in all_drawn[0].steps)


def test_one_that_failed_is_not_taken():
    one = lambda text, end: Drawn(Step((1,), text), end)
    pool = [one("b", "error"), one("c", "eos"), one("d", "length")]
    found = METHOD._taken("p", pool, ([0.0, -2.0, -1.0], 7))
    assert (found.text, found.score, found.finish_reason, found.passes) == ("d", -1.0, "length", 10)
    assert METHOD._taken("p", pool[:1], None).finish_reason == "error"
    assert METHOD._taken("p", pool, ([math.nan] * 3, 7)).finish_reason == "error"


def test_messages_go_on_in_the_last_one():
    asked = METHOD.question([{"role": "user", "content": "ab"}], " f ", ["c ", "d"])
    assert asked == [{"role": "user", "content": "ablfmmcmdl"}]


REFUSED = (
    ({}, {}, "completions of a greedy prompt are all the same: set a temperature"),
    ({}, {"temperature": 1.0, "prompts": [[1, 2]]}, "give texts or chats, not ids"),
    ({"samples": 40}, {"temperature": 1.0}, "positions, and large has 512: lower samples or max_new_tokens"),
    ({"samples": 0}, {}, "samples must be a whole number from 1 on"),
    ({"samples": True}, {}, "samples must be a whole number from 1 on"),
    ({"checklist_tokens": -1}, {}, "checklist_tokens must be a whole number from 0 on"),
    ({"before": "x"}, {}, "before must hold {checklist}"),
    ({"each": "{number}"}, {}, "each must hold {answer}"),
    ({"reply": "{x}{number}"}, {}, "reply has {number} as its place and no other one"),
)


@pytest.mark.parametrize(("fields", "options", "said"), REFUSED, ids=lambda case: str(case)[:40])
def test_what_it_does_not_take(fields, options, said):
    with pytest.raises(ValueError, match=said):
        dataclasses.replace(METHOD, **fields)(LARGE, **{"prompts": ["ab"], "max_new_tokens": 10, **options})


def test_the_command_says_what_is_missing(capsys):
    assert cli.main(["generate", "x", "--decode", "chops"]) == 2
    assert "set a temperature, or samples to 1" in capsys.readouterr().err


def test_completions_that_grow_when_they_are_read_are_kept(monkeypatch):
    """Without room for the question about them, the first one is taken, and has no score."""
    monkeypatch.setattr("specjax.search.chops.SPARE", -60)
    grown = dataclasses.replace(METHOD, each="m{answer}" + "g" * 100)
    (record,) = grown(naming(2), ["dcb"], **WARM)
    assert record.text == record.steps[0].text and record.score is None and record.finish_reason != "error"


def test_a_long_request_for_a_checklist_has_room():
    asks = dataclasses.replace(METHOD, checklist="n" * 400)
    (record,) = asks(naming(2), ["dcb"], **WARM)
    assert record.text == record.steps[1].text
