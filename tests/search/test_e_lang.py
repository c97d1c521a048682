"""E-LANG: energies beside whole passes, and texts of one model or the other."""

import math

import jax
import numpy as np
import pytest
from support.two_models import LARGE, PROMPTS, SMALL

import specjax
from specjax.lm import Block, Wants
from specjax.search import ELang

HOW = {"max_new_tokens": 80, "seed": 3, "temperature": 1.0}


def alone(model, how=HOW):
    return specjax.generate(model, PROMPTS, drafter="none", progress=False, **how)


def sureness(model, prompt, tokens, heat):
    """Minus the mean energy, from one pass over the whole text."""
    text = np.asarray([[*prompt, *tokens]], np.int32)
    block = Block(text, np.arange(text.shape[1])[None], np.zeros(1, np.int32))
    cache = model.lm.init_cache(1, text.shape[1])
    read = jax.jit(lambda params, block, cache: model.lm(params, block, cache, wants=Wants(logits=True)).logits)
    logits = read(model.params, block, cache)[0, len(prompt) - 1 : -1]
    return float(np.mean(heat * jax.nn.logsumexp(logits / heat, axis=-1)))


@pytest.mark.parametrize(("new", "heat"), [(6, 1.0), pytest.param(80, 3.0, marks=pytest.mark.slow)])
def test_the_large_model_writes_where_the_small_one_was_unsure(new, heat):
    """Of four prompts in two batches; among the slow ones is a text of more than one block."""
    how = HOW | {"max_new_tokens": new}
    small, large = alone(SMALL, how), alone(LARGE, how)
    wanted = [sureness(SMALL, *own, heat) for own in zip(PROMPTS, (one.tokens for one in small), strict=True)]
    threshold = sum(sorted(wanted)[1:3]) / 2
    found = ELang(SMALL, threshold, heat)(LARGE, PROMPTS, batch_size=2, **how)
    for row, own in enumerate(found):
        mine = small[row] if wanted[row] >= threshold else large[row]
        assert own.tokens == mine.tokens and own.finish_reason == mine.finish_reason
        assert own.steps[0].by == ("small" if wanted[row] >= threshold else "large")
        assert own.score == pytest.approx(wanted[row], abs=1e-4)
        assert own.passes == (0 if own.steps[0].by == "small" else len(own.tokens))
        again = math.ceil(len(small[row].tokens) / 64)
        assert own.small_passes == len(small[row].tokens) + again
    assert {own.steps[0].by for own in found} == {"small", "large"}
    assert new < 64 or max(len(own.tokens) for own in small) > 64


@pytest.mark.slow
def test_the_ends_of_the_threshold_are_one_models_texts():
    for threshold, own in ((-math.inf, SMALL), (math.inf, LARGE)):
        found = ELang(SMALL, threshold)(LARGE, PROMPTS, **HOW)
        assert [one.tokens for one in found] == [one.tokens for one in alone(own)]
        assert all(bool(one.passes) == (own is LARGE) for one in found)


@pytest.mark.slow
def test_a_threshold_is_calibrated_for_a_share():
    for share in (0.0, 0.5, 1.0):
        way = ELang(SMALL).calibrated(LARGE, PROMPTS, share, **HOW)
        found = way(LARGE, PROMPTS, **HOW)
        assert np.mean([own.steps[0].by == "small" for own in found]) == share


WRONG = {
    "heat must be above 0, got 0.0": lambda: ELang(SMALL, 1.0, 0.0),
    "give threshold=NUMBER": lambda: ELang(SMALL)(LARGE, PROMPTS),
    "e_lang needs two models": lambda: ELang(threshold=1.0).bind(LARGE),
    "a share from 0 to 1, got 0 and 0.5": lambda: ELang(SMALL).calibrated(LARGE, [], 0.5),
    "got 1 and 2": lambda: ELang(SMALL).calibrated(LARGE, [[1]], 2),
}


@pytest.mark.parametrize("said", list(WRONG))
def test_what_cannot_be_done(said):
    with pytest.raises(ValueError, match=said):
        WRONG[said]()
