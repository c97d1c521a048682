"""Contrastive decoding: the formula over both models' own logits, and one text whatever is drafted."""

import functools

import numpy as np
import pytest
from support.conformance import CAPACITY, DRAFT, DRAFTERS, MIXED, TARGET, draft_model, params_of, same, texts
from support.margin import teacher_forced

import specjax
from specjax.decode import Plain
from specjax.draft import NoDrafter
from specjax.models.contrastive import Contrastive
from specjax.models.tabular import TabularLM
from specjax.prompts import Prompts
from specjax.sampling import row_keys
from specjax.serve.engine import Engine

ALPHA, BETA, NEW = 0.3, 0.8, 12
MODEL = Contrastive(TARGET, DRAFT, ALPHA, BETA)


def written(drafter):
    heats = [0.0, 0.8] * (len(MIXED.prompts) // 2)
    prompts = Prompts.of(MIXED.prompts, NEW, keys=row_keys(0, MIXED.names), temperature=heats)
    own = params_of(drafter)
    params = {**own, "target": {"lm": own["target"], "amateur": draft_model(own["target"])}}
    decoder = specjax.speculative(MODEL, drafter)
    state = decoder.init(params, prompts, capacity=CAPACITY)
    return texts(specjax.run(decoder, params, state))


@functools.cache
def plain():
    return written(NoDrafter())


@pytest.mark.slow
def test_the_formula():
    params, bare = params_of(NoDrafter())["target"], 0
    for row in (0, 2):
        ids = [*MIXED.prompts[row], *plain()[row]]
        dists = [teacher_forced(*each, ids) for each in ((TARGET, params), (DRAFT, draft_model(params)))]
        own, other = (dist.astype(float) - np.logaddexp.reduce(dist.astype(float), axis=1)[:, None] for dist in dists)
        for at in range(len(MIXED.prompts[row]), len(ids)):
            strong, weak = own[at - 1], other[at - 1]
            scores = np.where(np.exp(strong - strong.max()) < ALPHA, -np.inf, (1 + BETA) * strong - BETA * weak)
            best = np.sort(scores)
            assert ids[at] == scores.argmax() or best[-1] - best[-2] < 1e-4
            bare += ids[at] != strong.argmax()
    assert bare > 2


@pytest.mark.parametrize("name", ["token_recycling", pytest.param("kangaroo", marks=pytest.mark.slow)])
def test_same_text_as_plain(name):
    same(written(DRAFTERS[name]), plain())


def test_refused():
    model = TARGET, params_of(NoDrafter())["target"]
    with pytest.raises(
        ValueError, match="contrastive decoding needs an amateur, a weaker model: name it with amateur=MODEL"
    ):
        Engine(model, "plain:steer=(contrastive:beta=0.5)")
    with pytest.raises(ValueError, match="decode 'beam' has no field 'steer'"):
        Engine(model, "beam:num_beams=2,steer=(contrastive:amateur=tiny-draft)")
    with pytest.raises(ValueError, match="unknown steer 'contrast'; choose guidance, contrastive, dola"):
        Engine(model, Plain(steer="contrast"))
    for wrong, message in (({"alpha": 0}, "alpha of a contrast must be"), ({"beta": -1}, "beta of a contrast must be")):
        with pytest.raises(ValueError, match=message):
            Contrastive(TARGET, DRAFT, **wrong)
    with pytest.raises(ValueError, match="the amateur has 4 tokens and the model 96"):
        Contrastive(TARGET, TabularLM(4))
