"""SpecReason: either model alone at the ends of the threshold, and a slow oracle that reuses nothing between them."""

import dataclasses
import inspect
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.margin import teacher_forced
from support.shapes import changed
from support.two_models import EOS, LARGE, LETTERS, PROMPTS, SMALL, written

import specjax
from specjax import cli, models
from specjax import decoder as decoding
from specjax.models import LlamaLM
from specjax.search import SpecReason, writer
from specjax.search.spec_reason import mean_digit

QUESTION = "nnm"
METHOD = SpecReason(SMALL, 0.00025, "likelihood", QUESTION, separator=(4, 5, 6), step_tokens=6)
NEW = 24


def scored(method, before, step):
    """What the large model makes of a step, by one whole pass."""
    question = [LETTERS.index(letter) for letter in QUESTION]
    ids = [*before, *step, *question]
    dists = np.asarray(jax.nn.log_softmax(teacher_forced(LARGE.lm, LARGE.params, ids), axis=-1), np.float64)
    if method.score == "likelihood":
        at = range(len(before), len(before) + len(step))
        return float(np.exp(np.mean([dists[i - 1, ids[i]] for i in at])))
    if method.score == "digit":
        top = LETTERS[int(np.argmax(dists[-1]))]
        return float(top) if top.isdigit() else 0.0
    mass = np.exp(dists[-1, 14:])
    return float(mass @ np.arange(10) / mass.sum())


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
        stuck = len(steps) > 1 and tuple(step) == steps[-1][0]
        small += not taken and len(text) < NEW and text[-1] not in EOS and not stuck
        steps.append(
            (
                tuple(step),
                "small" if taken else "large",
                None if score is None else pytest.approx(score, rel=1e-3, abs=1e-6),
            )
        )
        if stuck:
            break
    return steps, large, small


def said(record):
    return [(step.tokens, step.by, step.score) for step in record.steps], record.passes, record.small_passes


METHODS = (
    METHOD,
    dataclasses.replace(METHOD, score="digit", threshold=3.0),
    dataclasses.replace(METHOD, score="mean_digit", threshold=4.0, first=1),
)


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.score)
def test_between_the_ends_it_is_the_oracle(method):
    records = method(LARGE, PROMPTS, max_new_tokens=NEW, batch_size=4, temperature=0.0)
    wanted = [oracle(method, prompt) for prompt in PROMPTS]
    assert [said(record) for record in records] == wanted
    assert len({by for steps, *_ in wanted for _, by, _ in steps}) == 2
    assert all(record.text == LARGE.tokenizer.decode(record.tokens, True) for record in records)


DRAWN = {"temperature": 1.0, "top_k": 6, "seed": 3}


@pytest.mark.slow
@pytest.mark.parametrize("options", ({"temperature": 0.0}, DRAWN), ids=("greedy", "drawn"))
def test_drafts_change_no_text(options):
    """Texts, steps and scores are those without drafts, and the large model makes fewer passes where drafts are right."""
    how = {"max_new_tokens": NEW, "batch_size": 3, **options}
    plain = METHOD(LARGE, PROMPTS, **how)
    drafted = dataclasses.replace(METHOD, drafts=3)(LARGE, PROMPTS, **how)
    for one, other in zip(plain, drafted, strict=True):
        assert (one.tokens, one.text, one.finish_reason) == (other.tokens, other.text, other.finish_reason)
        assert said(one)[0] == [
            (tokens, by, None if score is None else pytest.approx(score, rel=1e-3))
            for tokens, by, score in said(other)[0]
        ]
        assert other.passes <= one.passes and other.small_passes >= one.small_passes
    assert {step.by for record in drafted for step in record.steps} == {"small", "large"}


SAME = dataclasses.replace(METHOD, small=LARGE, threshold=2.0, drafts=2)


@pytest.mark.parametrize("options", ({"temperature": 0.0}, pytest.param(DRAWN, marks=pytest.mark.slow)))
def test_drafts_of_the_same_model_are_all_kept(options):
    """So what was read and taken back leaves the drafter's cache right."""
    records = SAME(LARGE, PROMPTS, max_new_tokens=NEW, batch_size=4, **options)
    wanted = lambda record: sum(1 - (-len(step.tokens) // 3) for step in record.steps)
    assert [record.passes for record in records] == [wanted(record) for record in records]
    assert all(step.by == "large" for record in records for step in record.steps)
    assert any(len(record.steps) > 2 for record in records)


@pytest.mark.slow
def test_a_drafter_that_has_not_read_the_small_models_steps_is_seen(monkeypatch):
    turns = lambda asked: [float(len(own.text.strip("efg")) % 2) for own in asked]
    run = lambda: dataclasses.replace(SAME, threshold=0.5, score=turns)(
        LARGE, PROMPTS, max_new_tokens=NEW, batch_size=4, **DRAWN
    )
    good = run()
    assert any(("small", "large") in itertools.pairwise(step.by for step in record.steps) for record in good)
    late = lambda decoder, params, state, live, length: (state, jnp.zeros(len(live), jnp.int32))
    monkeypatch.setattr("specjax.search.spec_reason._caught_up", late)
    assert sum(own.passes for own in good) < sum(own.passes for own in run())


def test_a_cache_that_lacks_what_was_read_is_seen(monkeypatch):
    read = writer._read

    def forgetful(decoder, params, state, *args):
        cache = jax.tree.map(jnp.copy, state.cache)
        state, *heard = read(decoder, params, state, *args)
        return dataclasses.replace(state, cache=cache), *heard

    monkeypatch.setattr(writer, "_read", forgetful)
    records = METHOD(LARGE, PROMPTS, max_new_tokens=NEW, batch_size=4, temperature=0.0)
    assert [said(record) for record in records] != [oracle(METHOD, prompt) for prompt in PROMPTS]


@pytest.mark.parametrize(
    "options", ({"temperature": 0.0}, {"temperature": 1.0, "top_k": 6, "seed": 3}), ids=("greedy", "sampled")
)
def test_at_the_ends_of_the_threshold_it_is_one_model(options):
    """Token for token what `generate` writes, up to a repeated step: above the highest score the base model's, at 0 the small
    one's."""
    texts = []
    for threshold, own in ((1.1, LARGE), (0.0, SMALL)):
        got = dataclasses.replace(METHOD, threshold=threshold)(
            LARGE, PROMPTS, max_new_tokens=NEW, batch_size=4, **options
        )
        wanted = specjax.generate(own, PROMPTS, drafter="none", max_new_tokens=NEW, progress=False, **options)
        texts.append([record.tokens for record in got])
        for mine, whole in zip(got, wanted, strict=True):
            if mine.finish_reason == "stop":  # a repeated step
                assert mine.tokens == whole.tokens[: len(mine.tokens)]
            else:
                assert (mine.tokens, mine.finish_reason) == (whole.tokens, whole.finish_reason)
        assert sum(record.finish_reason != "stop" for record in got) >= 2
        assert {step.by for record in got for step in record.steps} == {"large" if own is LARGE else "small"}
    assert texts[0] != texts[1]


@pytest.mark.slow
def test_nothing_is_traced_twice_and_lists_are_options():
    """Other prompts of the same number run the same programs; a token that must not be written is not."""
    options = {"max_new_tokens": NEW, "batch_size": 4, "suppress_tokens": [2, 3]}
    first = METHOD(LARGE, PROMPTS, **options)
    assert not {2, 3} & {token for record in first for token in record.tokens}
    before = [program._cache_size() for program in (writer._read, decoding.run_program, decoding.insert_program)]
    METHOD(LARGE, PROMPTS[::-1], **options)
    assert [
        program._cache_size() for program in (writer._read, decoding.run_program, decoding.insert_program)
    ] == before


@pytest.mark.slow
def test_a_users_own_score_in_rows_that_follow_each_other():
    """It sees the whole text; and two prompts at a time write what four do."""
    seen = []

    def score(steps):
        seen.extend(steps)
        return [len(step.text) % 2 for step in steps]

    method, greedy = (
        dataclasses.replace(METHOD, score=score, threshold=1.0),
        {"max_new_tokens": NEW, "temperature": 0.0},
    )
    records = method(LARGE, PROMPTS, batch_size=4, **greedy)
    assert all(step.text.endswith(step.step.text) and len(step.logprobs) == len(step.step.tokens) for step in seen)
    for record in records:
        text = ""
        for step in record.steps:
            text += step.text if step.by == "small" else ""
            assert step.by == "large" or len(text) % 2 == 1 or 7 in step.tokens
            text += step.text if step.by == "large" else ""
    assert [said(r) for r in method(LARGE, PROMPTS, batch_size=3, **greedy)] == [said(r) for r in records]
    with pytest.raises(ValueError, match="the score must be one number per step"):
        dataclasses.replace(method, score=lambda steps: [])(LARGE, PROMPTS[:1], max_new_tokens=NEW)


@pytest.mark.parametrize(
    ("likely", "score"),
    [
        ({7: -0.5, 8: -1.2, 6: -2.0, 9: -3.0}, 7.242882),
        ({8: -6.5, 3: -7.0}, 6.112297),
        ({0: -9.1, 9: -9.1, 4: -np.inf}, 4.5),
    ],
)
def test_the_mean_is_over_the_digits_alone(likely, score):
    """The first two are what the authors' program says of these log-probabilities, beside which it has other tokens'."""
    assert mean_digit(np.asarray([*likely.values()]), [*likely]) == pytest.approx(score, abs=1e-6)


STUCK = {"logit_bias": {1: 100}, "temperature": 0.0, "max_new_tokens": 40}


@pytest.mark.parametrize(
    ("fields", "steps"),
    [
        ({"separator": (4,)}, [(1, 1, 1)] * 3),  # the third step says what the second said
        ({"separator": "e"}, [(1, 1, 1, 4)] * 3),  # a cut step has a separator after it
        ({"separator": "e", "answers": ("d", "bb")}, [(1, 1, 1, 4)]),
    ],
    ids=str,
)
@pytest.mark.parametrize("threshold", [0.0, 1.1])
def test_a_step_that_is_repeated_or_answers_is_the_last(fields, steps, threshold):
    method = dataclasses.replace(METHOD, threshold=threshold, step_tokens=3, **fields)
    (record,) = method(LARGE, PROMPTS[3:], batch_size=4, **STUCK)
    assert [step.tokens for step in record.steps] == steps and record.finish_reason == "stop"
    assert record.tokens == [token for step in steps for token in step]


def test_the_defaults_are_the_authors():
    """512 tokens per step, 8,192 in all, from 7 on, drawn at 0.6 with a top-p of 0.95 where no temperature is said."""
    method, call = SpecReason(), inspect.signature(SpecReason.__call__).parameters
    assert (method.threshold, method.score, method.step_tokens, method.first) == (7.0, "digit", 512, 0)
    assert method.separator == "\n\n" and call["max_new_tokens"].default == 8192
    run = lambda **options: [r.tokens for r in METHOD(LARGE, PROMPTS, max_new_tokens=NEW, batch_size=4, **options)]
    drawn = run()
    assert drawn == run(temperature=0.6, top_p=0.95) and drawn != run(temperature=0.0)


@pytest.mark.slow
def test_a_chat_is_asked_in_a_users_turn():
    """The score is of the conversation as the template writes it: the steps as a closed turn, the question, an open reply."""
    large, small = (models.load(name, dtype="float32") for name in ("tiny", "tiny-draft"))
    user = {"role": "user", "content": "A counter shows 24. Subtract 17. What does the counter show? Show each step."}
    method = SpecReason(small, 0.0, "mean_digit", separator=".")
    (record,) = method(large, [[user]], temperature=0.0, max_new_tokens=32)
    said = ""
    for step in record.steps:
        said += step.text
        turns = [user, {"role": "assistant", "content": said}, {"role": "user", "content": method.question.strip()}]
        text = large.tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False) + method.reply
        ids = large.tokenizer.encode(text, add_special_tokens=False)
        dist = np.asarray(jax.nn.softmax(teacher_forced(large.lm, large.params, ids)[-1]), np.float64)
        digits = {
            t: int(word)
            for t in range(len(dist))
            if (word := large.tokenizer.decode([t]).strip()) in "0123456789" and word
        }
        wanted = sum(dist[t] * digit for t, digit in digits.items()) / sum(dist[t] for t in digits)
        assert step.score == pytest.approx(wanted, rel=1e-3)
    assert len(record.steps) > 1 and {step.by for step in record.steps} == {"small"}


REFUSED = (
    ({"score": "grade"}, "unknown score 'grade'; choose digit, mean_digit, likelihood"),
    ({"threshold": float("nan")}, "threshold must be a number, got nan"),
    ({"step_tokens": 0}, "step_tokens must be at least 1"),
    ({"drafts": -1}, "drafts must be a whole number from 0 on, got -1"),
)


@pytest.mark.parametrize(("fields", "message"), REFUSED, ids=lambda case: str(case)[:40])
def test_what_it_does_not_take(fields, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(METHOD, **fields)
    wider = dataclasses.replace(SMALL, lm=LlamaLM(changed(SMALL.lm.config, vocab_size=25)))
    with pytest.raises(ValueError, match="small and large have different vocabularies"):
        dataclasses.replace(METHOD, small=wider)(LARGE, PROMPTS)
    with pytest.raises(ValueError, match="tiny-diffusion is a diffusion model"):
        dataclasses.replace(METHOD, small="tiny-diffusion")(LARGE, PROMPTS)
    blind = dataclasses.replace(LARGE, tokenizer=None)
    with pytest.raises(ValueError, match="has no tokenizer to read a text with"):
        SpecReason(SMALL, separator=(4,))(blind, PROMPTS)


def test_it_is_listed(capsys):
    assert cli.main(["searches"]) == 0 and "\nspec_reason" in capsys.readouterr().out
