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

METHOD = SelfAgreement(samples=5, before="n", each="m{answer}", after="l")
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


def test_messages_go_on_in_the_last_one():
    asked = METHOD.question([{"role": "system", "content": "s"}, {"role": "user", "content": "ab"}], ["c ", "d"])
    assert asked == [{"role": "system", "content": "s"}, {"role": "user", "content": "abnmcmdl"}]


REFUSED = (
    ({}, {}, "completions of a greedy prompt are all the same"),
    ({}, {"temperature": 1.0, "prompts": [[1, 2]]}, "give texts or chats, not ids"),
    ({"samples": 40}, {"temperature": 1.0}, "positions, and large has 512: lower samples or max_new_tokens"),
    ({"samples": 0}, {}, "samples must be a whole number from 1 on"),
    ({"each": "x"}, {}, "each must hold {answer}"),
)


@pytest.mark.parametrize(("fields", "options", "said"), REFUSED, ids=lambda case: str(case)[:40])
def test_what_it_does_not_take(fields, options, said):
    with pytest.raises(ValueError, match=said):
        dataclasses.replace(METHOD, **fields)(LARGE, **{"prompts": ["ab"], "max_new_tokens": NEW, **options})


def test_it_is_listed(capsys):
    assert cli.main(["searches"]) == 0 and "\nself_agreement" in capsys.readouterr().out
