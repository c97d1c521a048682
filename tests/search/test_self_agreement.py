"""Self-agreement: a model that counts names the most frequent answer, and both prompts' texts are those of whole passes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.two_models import EOS, LARGE, LETTERS, PROMPTS, Letters

import specjax
from specjax import cli
from specjax.lm import BaseLM, Output
from specjax.models import Model
from specjax.search import SelfAgreement
from specjax.search.selection import answer_of

METHOD = SelfAgreement(samples=5, before="n", each="m{answer}", after="l", reply="k{answer}")
NEW = 12


@dataclasses.dataclass(frozen=True)
class Counting(BaseLM):
    """Says a digit that stands before, each with a weight of so many nats as it stands there, and after its digit the end."""

    vocab_size: int = 24

    def init_cache(self, batch, capacity, dtype=None):
        return jnp.zeros((batch, capacity), jnp.float32)

    def __call__(self, params, block, cache, *, wants, draw=None, past=None, partial=None):
        seen = jnp.arange(cache.shape[1])[None] < block.length[:, None]
        is_digit = lambda tokens: jax.nn.one_hot(tokens.astype(jnp.int32) - 14, 10)
        before = jnp.sum(is_digit(cache) * seen[..., None], axis=1)
        counts = before[:, None] + jnp.cumsum(is_digit(block.tokens), axis=1)
        last = jnp.where(block.tokens[..., None] >= 14, 100.0, 0.0)  # an answer is a digit, and then the end
        logits = jnp.zeros((*block.tokens.shape, 24)) - 50.0
        logits = logits.at[..., 14:].set(jnp.where(counts > 0, params["scale"] * counts, -50.0))
        logits = logits.at[..., EOS[0]].set(last[..., 0] - 50.0 + 0 * params["scale"])
        delta = block.tokens.astype(jnp.float32)
        draws = draw(logits) if wants.draw and draw is not None else None
        return Output(delta, logits=logits if wants.logits else None, draw=draws)


COUNTS = Model(Counting(), {"scale": jnp.ones(())}, Letters(), EOS, "counting", None, np.dtype("float32"), longest=512)
ASKED = ["5a", "4412a", "123a", "9876a", "0123a", "2345a", "13579a", "56789a"]


@dataclasses.dataclass(frozen=True)
class Deaf(SelfAgreement):
    """A fault: the second prompt does not hold the completions."""

    def question(self, prompt, answers):
        return super().question(prompt, [""] * len(answers))


def named(prompt, record):
    """The digits that stand most often in a prompt and its completions."""
    text = prompt + "".join(step.text for step in record.steps)
    counts = {digit: text.count(digit) for digit in "0123456789"}
    return {digit for digit, count in counts.items() if count == max(counts.values())}


@pytest.mark.slow
def test_it_names_what_most_completions_say():
    """Of completions that are all alike that one; and of others the most frequent, which the prompt alone does not tell."""
    records = METHOD(COUNTS, ASKED, max_new_tokens=NEW, temperature=1.5, seed=2)
    assert records[0].text == "5" and [step.text for step in records[0].steps] == ["5"] * 5
    assert all(record.text in named(prompt, record) for prompt, record in zip(ASKED, records, strict=True))
    assert all(record.finish_reason == "eos" for record in records)
    deaf = Deaf(**vars(METHOD))(COUNTS, ASKED, max_new_tokens=NEW, temperature=1.5, seed=2)
    assert [record.steps for record in deaf] == [record.steps for record in records]
    assert any(record.text not in named(prompt, record) for prompt, record in zip(ASKED, deaf, strict=True))


@pytest.mark.parametrize("batch_size", (4, pytest.param(3, marks=pytest.mark.slow)))
def test_texts_are_those_of_two_plain_runs(batch_size):
    """The completions are `generate`'s, and what is said of them is its greedy text after the second prompt; passes are these
    tokens and a block for every 64 that the second prompt has more than the first."""
    texts = ["".join(LETTERS[token] for token in prompt) for prompt in PROMPTS]
    options = {"temperature": 1.0, "seed": 3, "max_new_tokens": NEW}
    records = METHOD(LARGE, texts, batch_size=batch_size, **options)
    drawn = specjax.generate(LARGE, texts, drafter="none", num_return_sequences=5, progress=False, **options)
    for at, (text, record) in enumerate(zip(texts, records, strict=True)):
        own = drawn[5 * at : 5 * at + 5]
        assert [list(step.tokens) for step in record.steps] == [one.tokens for one in own]
        second = METHOD.question(text, [one.text for one in own])
        (said,) = specjax.generate(LARGE, second, drafter="none", max_new_tokens=NEW)
        assert (record.tokens, record.text) == (said.tokens, said.text)
        blocks = -(-(len(second) - len(text)) // 64)
        assert record.passes == sum(one.steps for one in own) + said.steps + blocks
    assert len({step.tokens for record in records for step in record.steps}) > 8


@pytest.mark.slow
def test_equal_prompts_in_different_batches_have_completions_of_their_own():
    options = {"temperature": 1.0, "seed": 3, "max_new_tokens": NEW}
    records = METHOD(LARGE, ["dgh"] * 2, batch_size=1, **options)
    drawn = specjax.generate(LARGE, "dgh", drafter="none", num_return_sequences=10, progress=False, **options)
    assert [list(step.tokens) for record in records for step in record.steps] == [one.tokens for one in drawn]


CONFINED = dataclasses.replace(METHOD, answer="([0-9])")


@pytest.mark.slow
def test_confined_it_names_what_most_completions_say():
    """The text is the first completion with the answer; their order in the question changes nothing."""
    how = {"max_new_tokens": NEW, "temperature": 1.5, "seed": 2}
    records = CONFINED(COUNTS, ASKED, **how)
    for prompt, record in zip(ASKED, records, strict=True):
        assert record.text in named(prompt, record) and record.text in [step.text for step in record.steps]
    assert records[0].score == 0 and records[0].passes == sum(len(step.tokens) for step in records[0].steps)
    assert any(len({step.text for step in record.steps}) > 2 for record in records)
    turned = Turned(**vars(CONFINED))(COUNTS, ASKED, **how)
    assert [(one.text, one.score) for one in turned] == [(one.text, one.score) for one in records]


@dataclasses.dataclass(frozen=True)
class Turned(SelfAgreement):
    """Lists the completions from the last to the first."""

    def question(self, prompt, answers):
        return super().question(prompt, answers[::-1])


@pytest.mark.slow
@pytest.mark.parametrize("batch_size", (4, 3))
def test_the_answer_is_the_likeliest_reply(batch_size):
    """Of the completions' own answers, against whole passes over the second prompt and every reply; the others reply freely."""
    texts = ["".join(LETTERS[token] for token in prompt) for prompt in PROMPTS]
    options = {"temperature": 1.0, "seed": 3, "max_new_tokens": NEW}
    method = dataclasses.replace(METHOD, answer="([4-8])", reply="kk{answer}k")
    records = method(LARGE, texts, batch_size=batch_size, **options)
    free = METHOD(LARGE, texts, batch_size=4, **options)
    kinds = set()
    for text, record, own in zip(texts, records, free, strict=True):
        assert record.steps == own.steps
        said = [answer_of(step.text, "([4-8])") for step in record.steps]
        answers = [answer for answer in dict.fromkeys(said) if answer is not None]
        kinds.add(min(len(answers), 2))
        if not answers:
            assert (record.tokens, record.score, record.passes) == (own.tokens, None, own.passes)
            continue
        second = method.question(text, [step.text for step in record.steps])
        replies = [LARGE.tokenizer.encode(f"kk{answer}k") for answer in answers]
        found = [0.0] if len(answers) == 1 else [one.logprob for one in specjax.score(LARGE, second, replies)]
        at = said.index(answers[int(np.argmax(found))])
        assert (record.text, record.tokens) == (record.steps[at].text, list(record.steps[at].tokens))
        assert record.score == pytest.approx(max(found), abs=2e-4)
        blocks = 0 if len(answers) == 1 else -(-(len(second) - len(text)) // 64) + len(answers)
        assert record.passes == sum(len(step.tokens) for step in record.steps) + blocks
    assert kinds == {0, 2}


SAID = {
    "The answer is 12.": "12",
    "So the answer is: 12, I think": "12",
    "The answer is **12**.": "12",
    "the answer is $12.50": "12.50",
    r"the answer is $\boxed{12}$": "12",
    "The answer is -3": "-3",
    "The answer is 1,204, or so.": "1,204",
    "First, the answer is 5. No: the answer is Quito. Good.": "Quito",
    "Nothing is said.": None,
}


@pytest.mark.parametrize("text", SAID)
def test_answers_are_found_in_the_forms_that_models_write(text):
    assert answer_of(text, SelfAgreement().answer) == SAID[text]


def test_messages_go_on_in_the_last_one():
    asked = METHOD.question([{"role": "system", "content": "s"}, {"role": "user", "content": "ab"}], ["c ", "d"])
    assert asked == [{"role": "system", "content": "s"}, {"role": "user", "content": "abnmcmdl"}]


REFUSED = (
    ({}, {}, "completions of a greedy prompt are all the same"),
    ({}, {"temperature": 1.0, "prompts": [[1, 2]]}, "give texts or chats, not ids"),
    ({"samples": 40}, {"temperature": 1.0}, "positions, and large has 512: lower samples or max_new_tokens"),
    ({"samples": 0}, {}, "samples must be a whole number from 1 on"),
    ({"each": "x"}, {}, "each must hold {answer}"),
    ({"reply": "x"}, {}, "reply must hold {answer}"),
    ({"reply": "{x}"}, {}, "reply has {answer} as its only place"),
    ({"answer": "("}, {}, "answer must be a regular expression"),
)


@pytest.mark.parametrize(("fields", "options", "said"), REFUSED, ids=lambda case: str(case)[:40])
def test_what_it_does_not_take(fields, options, said):
    with pytest.raises(ValueError, match=said):
        dataclasses.replace(METHOD, **fields)(LARGE, **{"prompts": ["ab"], "max_new_tokens": NEW, **options})


def test_it_is_listed(capsys):
    assert cli.main(["searches"]) == 0 and "\nself_agreement" in capsys.readouterr().out
