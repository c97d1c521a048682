"""SpecReason: either model alone at the ends of the threshold, and a slow oracle that reuses nothing between them."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.margin import teacher_forced
from support.two_models import EOS, LARGE, LETTERS, PROMPTS, SMALL, written

import specjax
from specjax import cli, models
from specjax import decoder as decoding
from specjax.models import LlamaLM
from specjax.search import SpecReason, writer

QUESTION = "nnm"
METHOD = SpecReason(0.00025, "likelihood", QUESTION, separator=(4, 5, 6), step_tokens=6)
NEW = 24


def scored(method, before, step):
    """What the large model makes of a step, by one whole pass."""
    question = [LETTERS.index(letter) for letter in QUESTION]
    ids = [*before, *step, *question]
    laws = np.asarray(jax.nn.log_softmax(teacher_forced(LARGE.lm, LARGE.params, ids), axis=-1), np.float64)
    if method.score == "likelihood":
        at = range(len(before), len(before) + len(step))
        return float(np.exp(np.mean([laws[i - 1, ids[i]] for i in at])))
    if method.score == "digit":
        top = LETTERS[int(np.argmax(laws[-1]))]
        return float(top) if top.isdigit() else 0.0
    return float(sum(np.exp(laws[-1, 14 + digit]) * digit for digit in range(10)))


def oracle(method, prompt):
    """Steps, with whose they are and their scores, and both models' passes."""
    text, steps, large, small = [], [], 0, 0
    while len(text) < NEW and not (text and text[-1] in EOS):
        before, most = [*prompt, *text], min(method.step_tokens, NEW - len(text))
        score, taken = None, False
        if len(steps) >= method.first:
            step = written(SMALL, before, most)
            score = scored(method, before, step)
            taken, large, small = score >= method.threshold, large + 1, small + len(step)
        if not taken:
            step = written(LARGE, before, most)
            large += len(step)
        text += step
        small += not taken and len(text) < NEW and text[-1] not in EOS
        steps.append(
            (
                tuple(step),
                "small" if taken else "large",
                None if score is None else pytest.approx(score, rel=1e-3, abs=1e-6),
            )
        )
    return steps, large, small


def said(record):
    return [(step.tokens, step.by, step.score) for step in record.steps], record.passes, record.small_passes


METHODS = (
    METHOD,
    dataclasses.replace(METHOD, score="digit", threshold=3.0),
    dataclasses.replace(METHOD, score="mean_digit", threshold=1.5, first=1),
)


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.score)
def test_between_the_ends_it_is_the_oracle(method):
    records = method(LARGE, SMALL, PROMPTS, max_new_tokens=NEW, batch_size=4)
    wanted = [oracle(method, prompt) for prompt in PROMPTS]
    assert [said(record) for record in records] == wanted
    assert len({by for steps, *_ in wanted for _, by, _ in steps}) == 2
    assert all(record.text == LARGE.tokenizer.decode(record.tokens, True) for record in records)


def test_a_cache_that_lacks_what_was_read_is_seen(monkeypatch):
    read = writer._read

    def forgetful(decoder, params, state, *args):
        cache = jax.tree.map(jnp.copy, state.cache)
        state, *heard = read(decoder, params, state, *args)
        return dataclasses.replace(state, cache=cache), *heard

    monkeypatch.setattr(writer, "_read", forgetful)
    records = METHOD(LARGE, SMALL, PROMPTS, max_new_tokens=NEW, batch_size=4)
    assert [said(record) for record in records] != [oracle(METHOD, prompt) for prompt in PROMPTS]


@pytest.mark.parametrize("options", ({}, {"temperature": 1.0, "top_k": 6, "seed": 3}), ids=("greedy", "sampled"))
def test_at_the_ends_of_the_threshold_it_is_one_model(options):
    """Token for token what `generate` writes: above the highest score the base model's, at 0 the small one's."""
    texts = []
    for threshold, own in ((1.1, LARGE), (0.0, SMALL)):
        got = dataclasses.replace(METHOD, threshold=threshold)(
            LARGE, SMALL, PROMPTS, max_new_tokens=NEW, batch_size=4, **options
        )
        wanted = specjax.generate(own, PROMPTS, drafter="none", max_new_tokens=NEW, progress=False, **options)
        texts.append([record.tokens for record in got])
        assert texts[-1] == [record.tokens for record in wanted]
        assert [record.finish_reason for record in got] == [record.finish_reason for record in wanted]
        assert {step.by for record in got for step in record.steps} == {"large" if own is LARGE else "small"}
    assert texts[0] != texts[1]


def test_nothing_is_traced_twice_and_lists_are_options():
    """Other prompts of the same number run the same programs; a token that must not be written is not."""
    options = {"max_new_tokens": NEW, "batch_size": 4, "suppress_tokens": [2, 3]}
    first = METHOD(LARGE, SMALL, PROMPTS, **options)
    assert not {2, 3} & {token for record in first for token in record.tokens}
    before = [program._cache_size() for program in (writer._read, decoding.run_program, decoding.insert_program)]
    METHOD(LARGE, SMALL, PROMPTS[::-1], **options)
    assert [
        program._cache_size() for program in (writer._read, decoding.run_program, decoding.insert_program)
    ] == before


def test_a_users_own_score_in_rows_that_follow_each_other():
    """It sees the whole text; and two prompts at a time write what four do."""
    seen = []

    def score(steps):
        seen.extend(steps)
        return [len(step.text) % 2 for step in steps]

    method = dataclasses.replace(METHOD, score=score, threshold=1.0)
    records = method(LARGE, SMALL, PROMPTS, max_new_tokens=NEW, batch_size=4)
    assert all(step.text.endswith(step.step.text) and len(step.logprobs) == len(step.step.tokens) for step in seen)
    for record in records:
        text = ""
        for step in record.steps:
            text += step.text if step.by == "small" else ""
            assert step.by == "large" or len(text) % 2 == 1 or 7 in step.tokens
            text += step.text if step.by == "large" else ""
    assert [said(r) for r in method(LARGE, SMALL, PROMPTS, max_new_tokens=NEW, batch_size=3)] == [
        said(r) for r in records
    ]
    with pytest.raises(ValueError, match="the score must be one number a step"):
        dataclasses.replace(method, score=lambda steps: [])(LARGE, SMALL, PROMPTS[:1], max_new_tokens=NEW)


REFUSED = (
    ({"score": "grade"}, "unknown score 'grade'; choose digit, mean_digit, likelihood"),
    ({"threshold": float("nan")}, "threshold is a score, and nan is none"),
    ({"step_tokens": 0}, "step_tokens must be at least 1"),
)


@pytest.mark.parametrize(("fields", "message"), REFUSED, ids=lambda case: str(case)[:40])
def test_what_it_does_not_take(fields, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(METHOD, **fields)
    wider = dataclasses.replace(SMALL, lm=LlamaLM(dataclasses.replace(SMALL.lm.config, vocab_size=25)))
    with pytest.raises(ValueError, match="small and large have two vocabularies"):
        METHOD(LARGE, wider, PROMPTS)
    with pytest.raises(ValueError, match="tiny-diffusion is a diffusion model"):
        METHOD(LARGE, models.load("tiny-diffusion"), PROMPTS)
    blind = dataclasses.replace(LARGE, tokenizer=None)
    with pytest.raises(ValueError, match="has no tokenizer, and a text is to be read"):
        SpecReason(separator=(4,))(blind, SMALL, PROMPTS)


def test_it_is_listed(capsys):
    assert cli.main(["searches"]) == 0 and "\nspec_reason" in capsys.readouterr().out
