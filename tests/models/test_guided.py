"""Classifier-free guidance, also by another model: transformers' processor or a loop over the same logits, and one text
whatever is drafted."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest
from support.conformance import CAPACITY, DRAFT, DRAFTERS, MIXED, TARGET, draft_model, params_of, same, texts
from support.margin import teacher_forced

import specjax
from specjax.decode import Guidance, Plain
from specjax.draft import NoDrafter
from specjax.models.guided import LEAST, Guided, GuidedBy
from specjax.models.tabular import TabularLM
from specjax.prompts import Prompts
from specjax.sampling import row_keys
from specjax.serve.engine import Engine

NEGATIVE, SCALE, NEW = (7, 30, 2, 41), 1.5, 12


def written(drafter, negative):
    heats = [0.0, 0.8] * (len(MIXED.prompts) // 2)
    prompts = Prompts.of(MIXED.prompts, NEW, keys=row_keys(0, MIXED.names), temperature=heats)
    decoder = specjax.speculative(Guided(TARGET, SCALE, negative), drafter)
    state = decoder.init(params_of(drafter), prompts, capacity=CAPACITY)
    return texts(specjax.run(decoder, params_of(drafter), state))


@functools.cache
def plain(negative):
    return written(NoDrafter(), negative)


def stub(params):
    """What the processor calls a model: logits of the ids so far, which it keeps as `cache` (`past_key_values` below 5.24)."""
    torch = pytest.importorskip("torch")

    def model(input_ids, attention_mask, use_cache, **kept):
        [before] = kept.values()
        ids = input_ids if before is None else torch.cat([before, input_ids], dim=1)
        assert attention_mask.shape == ids.shape and use_cache
        logits = torch.tensor(teacher_forced(TARGET, params, ids[0].tolist()))[None]
        return type("Out", (dict,), {"logits": logits})(dict.fromkeys(kept, ids))

    return model


@pytest.mark.parametrize("negative", [NEGATIVE, pytest.param((), marks=pytest.mark.slow)])
def test_equal_to_transformers(negative):
    torch = pytest.importorskip("torch")
    process = pytest.importorskip("transformers.generation.logits_process")
    params = params_of(NoDrafter())["target"]
    bare = 0
    for row in (0, 2):  # a prompt of one token, and one of 17
        ids = list(MIXED.prompts[row])
        unconditional = torch.tensor([negative]) if negative else None
        guide = process.UnbatchedClassifierFreeGuidanceLogitsProcessor(SCALE, stub(params), unconditional)
        for token in plain(negative)[row]:
            own = torch.tensor(teacher_forced(TARGET, params, ids)[-1:])
            scores = guide(torch.tensor([ids]), own)[0].numpy()
            top = np.sort(scores)[-2:]
            assert int(scores.argmax()) == token or top[1] - top[0] < 1e-4
            bare += int(own[0].argmax()) != token
            ids.append(token)
    assert bare > 2  # guidance changes what is written


@pytest.mark.parametrize("name", ["token_recycling", pytest.param("kangaroo", marks=pytest.mark.slow)])
def test_same_text_as_plain(name):
    same(written(DRAFTERS[name], NEGATIVE), plain(NEGATIVE))


SIDES = {"away": (1.2, NEGATIVE, 0.7), "as guidance": (2.0, (), None)}
"""Scale, negative prompt and weight of guidance by another model."""


def by_another(drafter, name):
    """The state of rows that the draft model guides, with log-probabilities."""
    scale, negative, away = SIDES[name]
    heats = [0.0, 0.8] * (len(MIXED.prompts) // 2)
    prompts = Prompts.of(MIXED.prompts, NEW, keys=row_keys(0, MIXED.names), temperature=heats)
    own = params_of(drafter)
    params = {**own, "target": {"lm": own["target"], "guide": draft_model(own["target"])}}
    lm = GuidedBy(TARGET, scale, negative, DRAFT, away)
    decoder = specjax.speculative(lm, drafter, logprobs=True)
    return specjax.run(decoder, params, decoder.init(params, prompts, capacity=CAPACITY))


@functools.cache
def alone(name):
    return by_another(NoDrafter(), name)


def log_softmax(logits):
    logits = logits.astype(float)
    return logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)


@pytest.mark.parametrize("name", [pytest.param("away", marks=pytest.mark.slow), "as guidance"])
def test_another_models_side_is_a_loop_over_both(name):
    """Log-probabilities of every new token, and the greedy rows' choices: the two texts are read apart, token by token."""
    scale, negative, away = SIDES[name]
    params, state, changed = params_of(NoDrafter())["target"], alone(name), 0
    for row in (0, 1, 2):
        prompt, new = list(MIXED.prompts[row]), texts(state)[row]
        begin = [*(negative or prompt[-1:])]
        for at, token in enumerate(new):
            own = log_softmax(teacher_forced(TARGET, params, [*prompt, *new[:at]])[-1])
            other = log_softmax(teacher_forced(DRAFT, draft_model(params), [*begin, *new[:at]])[-1])
            want = log_softmax(scale * own - (scale - 1 if away is None else away) * other)
            assert abs(float(state.logprobs.raw[row, len(prompt) + at]) - want[token]) < 1e-3
            best = np.sort(want)[-2:]
            assert row == 1 or token == want.argmax() or best[1] - best[0] < 1e-4
            changed += own.argmax() != want.argmax()
    assert changed > 2


@pytest.mark.slow
@pytest.mark.parametrize("name", ["token_recycling", "kangaroo"])
def test_another_models_text_is_plain_decodings(name):
    same(texts(by_another(DRAFTERS[name], "as guidance")), texts(alone("as guidance")))


def test_known_figures_and_no_cut():
    """Those of the two distributions below, by hand; a token that is impossible for the guide stays possible."""
    own, other = jnp.log(jnp.asarray([[0.5, 0.3, 0.2], [0.6, 0.1, 0.3]]))
    by = lambda scale, away=None: GuidedBy(TabularLM(3), scale, guide=TabularLM(3), away=away)
    dist = lambda lm: np.exp(log_softmax(np.asarray(lm.blended(own, other))))
    np.testing.assert_allclose(dist(by(1.5)), [0.4006, 0.4561, 0.1433], atol=5e-5)
    np.testing.assert_allclose(dist(by(2.0)), [0.2874, 0.6207, 0.0920], atol=5e-5)
    np.testing.assert_allclose(dist(by(3.0)), [0.1107, 0.8609, 0.0283], atol=5e-5)
    np.testing.assert_allclose(dist(by(1.0, 0.0)), [0.5, 0.3, 0.2], atol=1e-6)
    np.testing.assert_allclose(by(2.0).blended(own, other), Guided(TabularLM(3), 2.0).blended(own, other), rtol=1e-5)
    scores = by(2.0).blended(own.at[0].set(-jnp.inf), other.at[1].set(-jnp.inf))
    assert scores[0] == -jnp.inf and np.isfinite(scores[1:]).all() and scores[1] > -LEAST / 2


BAD = {
    "negative_prompt is what guidance leads away from": {"scale": 1.0, "negative_prompt": [1]},
    "negative_prompt is empty": {"scale": 2.0, "negative_prompt": []},
    "negative_prompt has a token": {"scale": 2.0, "negative_prompt": [96]},
    "negative_prompt is a string or": {"scale": 2.0, "negative_prompt": [0.5]},
    "has no tokenizer: give negative_prompt": {"scale": 2.0, "negative_prompt": "a"},
    "guidance_scale must be a finite number": {"scale": float("nan")},
    "the guide has 1536 tokens and the model 96: take one": {"scale": 2.0, "model": "tiny-draft"},
    "the guide 'tiny-diffusion' is a diffusion model: pick an autoregressive one": {
        "scale": 2.0,
        "model": "tiny-diffusion",
    },
    "away of guidance must be at least 0, or -1 for scale - 1, got -0.5": {
        "scale": 2.0,
        "model": "tiny-draft",
        "away": -0.5,
    },
    "away is the weight of another model: name it with model=MODEL": {"scale": 2.0, "away": 0.5},
}


@pytest.mark.parametrize("message", BAD)
def test_refused(message):
    with pytest.raises(ValueError, match=message):
        Engine((TARGET, params_of(NoDrafter())["target"]), Plain(steer=Guidance(**BAD[message])))


def test_a_guide_and_its_model_lie_on_one_device():
    with pytest.raises(ValueError, match="a model and its guide lie on one device: leave the mesh out, or the guide"):
        Guidance(2.0, model="tiny-draft").target(None, object())
    for wrong in (-1.0, float("inf")):
        with pytest.raises(ValueError, match="away of guidance must be a finite number >= 0"):
            GuidedBy(TARGET, 2.0, guide=DRAFT, away=wrong)
    with pytest.raises(ValueError, match="needs that model: give guide"):
        GuidedBy(TARGET, 2.0)


@pytest.mark.slow
def test_a_line_names_the_other_model():
    """With the model itself as the other one, text and log-probabilities are those of guidance; another one's are not."""
    line = "plain:steer=(guidance:scale=1.5{})"
    how = {"chat": True, "max_new_tokens": 8, "logprobs": True}
    written = lambda more: specjax.generate("tiny", "Count from 3 to 9.", decode=line.format(more), **how)[0]
    own, same_model, other = (written(more) for more in ("", ",model=tiny", ",model=tiny-draft,away=1.5"))
    assert own.tokens == same_model.tokens and len(own.tokens) > 1
    np.testing.assert_allclose(own.logprobs, same_model.logprobs, atol=1e-4)
    assert abs(own.logprobs[0] - other.logprobs[0]) > 1e-3 or own.tokens != other.tokens
