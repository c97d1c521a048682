"""Couplings of least entropy, under a rate too, and texts that carry a message: their distribution, and what a reader finds."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.table_lm import Table
from support.two_models import LARGE, SMALL

import specjax
from specjax.models import Model
from specjax.search import (
    HideMessage,
    ReadMessage,
    bottleneck_coupling,
    compressed,
    entropy,
    greedy_coupling,
    mutual_information,
)
from specjax.search.coupling import bottleneck
from specjax.search.coupling.factors import Factors
from specjax.search.coupling.rows import Text
from specjax.search.stepwise import Asked

DRAWN = {"temperature": 1.0}
BY_LAST = np.asarray([[0.5, 0.3, 0.15, 0.05], [0.1, 0.2, 0.3, 0.4], [0.25, 0.25, 0.25, 0.25], [0.7, 0.1, 0.1, 0.1]])
"""The next token's distribution by the last token; a text begins after token 0."""


def coin(chance):
    """The entropy of a coin."""
    return entropy(np.asarray([chance, 1 - chance]))


def only(token):
    return lambda tokens, weights: int(np.flatnonzero(tokens == token)[0]) if token in tokens else None


def test_the_greedy_coupling_is_the_authors():
    joint = greedy_coupling([0.5, 0.3, 0.2], [0.4, 0.4, 0.2])
    np.testing.assert_allclose(joint, [[0.4, 0.1, 0], [0, 0.3, 0], [0, 0, 0.2]], atol=1e-15)
    assert math.isclose(entropy(joint), 1.8464393, abs_tol=1e-6)
    three = greedy_coupling([1.0], [0.75, 0.25], [0.6, 0.3, 0.1])  # the example of their program
    np.testing.assert_allclose(three, [[[0.6, 0.05, 0.1], [0, 0.25, 0]]], atol=1e-15)


def test_a_coupling_of_two_coins_is_near_the_least_entropy():
    """All couplings of two coins have one free number."""
    rng = np.random.default_rng(0)
    for first, second in rng.random((50, 2)):
        joint = greedy_coupling([first, 1 - first], [second, 1 - second])
        np.testing.assert_allclose(joint.sum(axis=1), [first, 1 - first], atol=1e-12)
        np.testing.assert_allclose(joint.sum(axis=0), [second, 1 - second], atol=1e-12)
        both = np.linspace(max(0, first + second - 1), min(first, second), 101)
        least = min(entropy(np.asarray([x, first - x, second - x, 1 - first - second + x]).clip(0)) for x in both)
        assert least - 1e-9 <= entropy(joint) <= least + math.log2(math.e) / math.e


@pytest.mark.parametrize("size", [6, 12])
def test_a_code_keeps_its_rate_and_says_what_the_bound_promises(size):
    """Of a few values the best function is known, and the greedy one is at most the bound below the rate."""
    rng = np.random.default_rng(size)
    for _ in range(20):
        source = rng.dirichlet(np.full(size, rng.choice([0.3, 1.0, 3.0])))
        rate = rng.uniform(0, entropy(source))
        code = compressed(source, rate)
        np.testing.assert_allclose(code.sum(axis=1), source, atol=1e-12)
        assert entropy(code.sum(axis=0)) <= rate + 1e-9
        said = mutual_information(code)
        assert said >= rate - coin(min(np.sort(source)[-2], 0.5)) - 1e-9
        if size <= bottleneck.ENUMERATED:
            sums = ([source[group].sum() for group in own] for own in bottleneck._partitions(list(range(size))))
            bits = [entropy(np.asarray(own)) for own in sums]
            assert said >= max(own for own in bits if own <= rate) - 1e-9


def test_the_two_likeliest_groups_are_merged_first(monkeypatch):
    """Not the two smallest: these would leave nothing of four equal values at 0.9 bits."""
    monkeypatch.setattr(bottleneck, "ENUMERATED", 0)
    below, above = bottleneck._functions(np.full(4, 0.25), 0.9)
    assert sorted(map(len, below)) == [1, 3] and sorted(map(len, above)) == [1, 1, 2]


def test_mass_moves_to_a_free_code_or_to_the_likeliest():
    source = np.asarray([0.7, 0.2, 0.1])
    table = bottleneck._table(source, [[0], [1, 2]])
    assert math.isclose(mutual_information(bottleneck._spread(table, 0.94454)), 0.89764, abs_tol=1e-5)
    assert math.isclose(mutual_information(bottleneck._gathered(table, 0.86872)), 0.82182, abs_tol=1e-5)


def test_a_bottleneck_has_both_sides_and_less_information_at_a_lower_rate():
    rng = np.random.default_rng(3)
    source, output = rng.dirichlet(np.ones(5)), rng.dirichlet(np.ones(7))
    found = [bottleneck_coupling(source, output, rate) for rate in (0.0, 0.5, 1.0, 9.0)]
    for own, rate in zip(found, (0.0, 0.5, 1.0, 9.0), strict=True):
        np.testing.assert_allclose(own.joint.sum(axis=1), source, atol=1e-12)
        np.testing.assert_allclose(own.joint.sum(axis=0), output, atol=1e-12)
        assert own.rate <= rate + 1e-9 and own.information <= own.rate + 1e-9
    told = [own.information for own in found]
    assert told == sorted(told) and told[0] < 1e-9 < told[1]
    np.testing.assert_allclose(np.sort(found[-1].joint, axis=None), np.sort(greedy_coupling(source, output), axis=None))


AUTHORS = {  # what the authors' FIMEC believes after a text of BY_LAST, and how likely a message leads to that text
    (True, (1, 3, 0, 2)): ([0, 0.555555555556, 0.444444444444], [0, 0, 0.952380952381, 0, 0.047619047619], (2, 2), 0.08),
    (False, (1, 3, 0, 2)): ([0, 0.555555555556, 0.444444444444], [0, 0, 0.952380952381, 0, 0.047619047619], (2, 4), 0.004),
    (True, (0, 0, 0, 0)): ([1, 0, 0], [1, 0, 0, 0, 0], (0, 0), 0.9375),
    (False, (0, 0, 0, 0)): ([1, 0, 0], [0.8, 0.2, 0, 0, 0], (0, 0), 0.75),
    (True, (3, 2, 1, 0)): ([0, 0, 1], [0, 0, 0, 1, 0], (2, 2), 0.0),
}  # fmt: skip


def outcomes(beliefs, masses, values):
    """Every token that a sender may draw, with its probability and the beliefs after it; a token may come in rounds."""
    scripts = [()]
    while scripts:
        script, heard, after = scripts.pop(), [], beliefs.copy()

        def choose(tokens, weights, script=script, heard=heard):
            heard.append(weights)
            return script[len(heard) - 1] if len(heard) <= len(script) else None

        token = after.step(np.arange(len(masses)), masses, choose, values)
        if token is None:
            scripts += [(*script, at) for at in np.flatnonzero(heard[-1]).tolist()]
        else:
            yield math.prod(float(own[at]) for own, at in zip(heard, script, strict=True)), token, after


def texts(beliefs, values, count, law, last=0):
    """The distribution of the texts of so many tokens that carry a message, and the beliefs after each."""
    if not count:
        return {(): (1.0, beliefs)}
    found = {}
    for chance, token, after in outcomes(beliefs, law[last], values):
        for rest, (more, final) in texts(after, values, count - 1, law, token).items():
            before = found.get((token, *rest), (0.0, None))[0]
            found[token, *rest] = before + chance * more, final
    return found


@pytest.mark.parametrize("case", list(AUTHORS), ids=str)
def test_beliefs_are_those_of_the_authors_program(case):
    (merge, text), (first, second, message, chance) = case, AUTHORS[case]
    beliefs = Factors([3, 5], merge)
    for last, token in zip((0, *text), text, strict=False):
        assert beliefs.step(np.arange(4), BY_LAST[last], only(token)) == token
    np.testing.assert_allclose(beliefs.beliefs[0], first, atol=1e-11)
    np.testing.assert_allclose(beliefs.beliefs[1], second, atol=1e-11)
    found = texts(Factors([3, 5], merge), message, len(text), BY_LAST)
    assert math.isclose(found.get(text, (0.0, None))[0], chance, abs_tol=1e-11)


@pytest.mark.parametrize("merge", [True, False])
def test_texts_have_exactly_the_models_distribution(merge):
    """Over all messages, every text has its own probability; and a reader believes what Bayes' rule says of one part."""
    messages = list(itertools.product(range(3), range(2)))
    found = [texts(Factors([3, 2], merge), own, 3, BY_LAST) for own in messages]
    for text in itertools.product(range(4), repeat=3):
        plain = math.prod(BY_LAST[last, token] for last, token in zip((0, *text), text, strict=False))
        chances = [own.get(text, (0.0, None))[0] for own in found]
        assert math.isclose(sum(chances) / len(messages), plain, abs_tol=1e-15)
        if not merge:
            beliefs = next(own[text][1] for own in found if text in own)
            given = np.asarray(chances).reshape(3, 2).sum(axis=1) / sum(chances)
            np.testing.assert_allclose(beliefs.beliefs[0], given, atol=1e-12)


def test_a_message_of_four_is_read_rightly_as_often_as_enumerated():
    law = np.asarray([[0.6, 0.3, 0.1], [0.2, 0.5, 0.3], [0.1, 0.1, 0.8], [0.5, 0.3, 0.2]])
    rates = []
    for count in (1, 2, 3, 4, 6):
        found = [texts(Factors([4], False), (value,), count, law, 3) for value in range(4)]
        rates.append(
            sum(
                max(own.get(text, (0.0,))[0] for own in found) / 4
                for text in {*found[0], *found[1], *found[2], *found[3]}
            )
        )
    np.testing.assert_allclose(rates, [0.7, 0.94, 0.976, 0.9976, 0.999868], atol=1e-6)


def test_a_value_without_mass_leaves_the_plain_distribution():
    beliefs = Factors([2])
    beliefs.beliefs[0] = np.asarray([1 - 1e-17, 1e-17]) * (1 - 1e-9)
    heard = []
    beliefs.step(np.arange(2), np.asarray([1 - 1e-9, 0.0]), lambda tokens, weights: heard.append(weights) or 0, (1,))
    np.testing.assert_allclose(heard[0], [1 - 1e-9, 0.0])


TABLE = np.random.default_rng(1).normal(0.0, 1.5, (4, 4, 4)).astype(np.float32)
SMALL_WORDS = Model(Table(), jnp.asarray(TABLE), None, (), "table", None, np.dtype("float32"), longest=64)


def test_tokens_are_drawn_from_what_plain_decoding_draws_from():
    asked = Asked.of([SMALL_WORDS], [[1, 2]], 8, 0, {"temperature": 0.7, "top_k": 3})
    text, last = Text(SMALL_WORDS, asked), (1, 2)
    for token in (3, 0, 1):
        logits = TABLE[last] / 0.7
        logits[logits < np.sort(logits)[1]] = -np.inf
        ids, masses = text.next()
        wanted = np.asarray(jax.nn.softmax(logits))
        assert ids.tolist() == np.flatnonzero(wanted).tolist()
        np.testing.assert_allclose(masses, wanted[ids], rtol=1e-5)
        text.tokens.append(token)
        last = (last[1], token)


def test_a_reader_finds_what_was_hidden():
    """Other prompts, a size with room, and a model that ends texts; each from the ids alone."""
    prompts = [[3, 0, 1], [2, 2], [1, 3]]
    hide, told = HideMessage("ok", "key", size=3), {"temperature": 1.0, "max_new_tokens": 60}
    written = hide(SMALL_WORDS, prompts, seed=2, **told)
    assert len({tuple(own.tokens) for own in written}) == 3
    for prompt, own in zip(prompts, written, strict=True):
        assert own.finish_reason == "length" and own.error is None and own.score > math.log(0.9)
        (found,) = ReadMessage(own.tokens, 3, "key")(SMALL_WORDS, [prompt], **told)
        assert (found.text, found.finish_reason) == ("ok", "stop") and found.score == own.score
        (other,) = ReadMessage(own.tokens, 3, "other")(SMALL_WORDS, [prompt], **told)
        assert other.text != "ok"
    again = hide(SMALL_WORDS, prompts, seed=2, batch_size=2, **told)
    assert [own.tokens for own in again] == [own.tokens for own in written]
    (early,) = hide(SMALL_WORDS, prompts[:1], temperature=1.0, max_new_tokens=4)
    assert early.finish_reason == "error" and "before it carries the whole message" in early.error and early.tokens


def test_by_a_word():
    asked = {"max_new_tokens": 100, "seed": 1, "progress": False, **DRAWN}
    (record,) = specjax.generate(LARGE, "abc", decode="hide_message:message=a,secret=s", **asked)
    assert record.error is None and record.finish_reason == "eos" and not math.isnan(record.score)
    (found,) = specjax.generate(LARGE, "abc", decode=f"read_message:text={record.text},size=1,secret=s", **asked)
    assert found.text == "a" and found.score == record.score


WRONG = {
    "there is none: give message=TEXT": lambda: HideMessage()(SMALL, ["a"], **DRAWN),
    "carries a message, and there is none": lambda: HideMessage().bind(SMALL),
    "message must be a text, got 3": lambda: HideMessage(3),
    "size must be a whole number of bytes from 1 on, got 0": lambda: HideMessage("a", size=0),
    "the message has 2 bytes, and size is 1": lambda: HideMessage("é", size=1),
    "needs the text and how many bytes": lambda: ReadMessage(size=1)(SMALL, ["a"], **DRAWN),
    "give text=TEXT and size=BYTES": lambda: ReadMessage("abc").bind(SMALL),
    "text must be a text or its token ids, got 3": lambda: ReadMessage(3, 1),
    "size must be a whole number of bytes from 1 on, got True": lambda: ReadMessage("abc", True),
    "greedy texts have none: set a temperature": lambda: HideMessage("a")(SMALL, ["a"], temperature=0.0),
    "the text holds the id 24, outside the 24": lambda: ReadMessage((24,), 1)(SMALL, ["a"], **DRAWN),
    "has no tokenizer to read a text with": lambda: ReadMessage("ab", 1)(SMALL_WORDS, [[1]], **DRAWN),
    "a coupling needs distributions": greedy_coupling,
    "distribution 1 must be probabilities that sum to 1, got a sum of 0.9": lambda: greedy_coupling([1.0], [0.9]),
    "distribution 0 must be a list of probabilities, got an array of shape \\(1, 1\\)": lambda: greedy_coupling([[1.0]]),
    "rate must be a number of bits from 0 on, got -1": lambda: compressed([1.0], -1),
    "the source must be probabilities": lambda: bottleneck_coupling([-0.5, 1.5], [1.0], 1.0),
}  # fmt: skip


@pytest.mark.parametrize("said", list(WRONG))
def test_what_cannot_be_done(said):
    with pytest.raises(ValueError, match=said):
        WRONG[said]()


def test_texts_that_no_such_writer_wrote_are_errors():
    read = lambda text, **how: ReadMessage(text, 1)(SMALL_WORDS, [[1, 2]], **{"max_new_tokens": 8, **DRAWN, **how})[0]
    likeliest = int(TABLE[1, 2].argmax())
    assert "token 1 of the text is impossible here" in read(((likeliest + 1) % 4,), top_k=1).error
    assert "the text has 9 tokens, and max_new_tokens leaves 8" in read((1,) * 9).error


@pytest.mark.slow
def test_the_shipped_model_writes_and_reads():
    model, asked = specjax.load("tiny"), {"max_new_tokens": 128, "progress": False}
    hide = HideMessage("tea", "between us")
    records = specjax.generate(model, "Once upon a time", decode=hide, num_return_sequences=4, seed=1, **asked)
    told = [own for own in records if own.error is None]
    assert len(told) >= 3
    for own in told:
        (found,) = specjax.generate(model, "Once upon a time", decode=ReadMessage(own.text, 3, "between us"), **asked)
        assert found.text == "tea"
