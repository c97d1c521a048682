"""Classifier-free guidance: transformers' processor over the same logits, and one text whatever is drafted."""

import functools

import numpy as np
import pytest
from support.conformance import CAPACITY, DRAFTERS, MIXED, TARGET, params_of, same, texts
from support.margin import teacher_forced

import specjax
from specjax.decode import Guidance, Plain
from specjax.draft import NoDrafter
from specjax.models.guided import Guided
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


BAD = {
    "negative_prompt is what guidance leads away from": {"scale": 1.0, "negative_prompt": [1]},
    "negative_prompt is empty": {"scale": 2.0, "negative_prompt": []},
    "negative_prompt has a token": {"scale": 2.0, "negative_prompt": [96]},
    "negative_prompt is a string or": {"scale": 2.0, "negative_prompt": [0.5]},
    "has no tokenizer: give negative_prompt": {"scale": 2.0, "negative_prompt": "a"},
    "guidance_scale must be a finite number": {"scale": float("nan")},
}


@pytest.mark.parametrize("message", BAD)
def test_refused(message):
    with pytest.raises(ValueError, match=message):
        Engine((TARGET, params_of(NoDrafter())["target"]), Plain(steer=Guidance(**BAD[message])))
