"""The shipped model that answers: rightly, with the text of transformers and of plain decoding, and the same in any batch."""

from pathlib import Path

import numpy as np
import pytest
from support.margin import Margin, teacher_forced

import specjax
from specjax import tasks
from specjax.bench.prompts import questions
from specjax.serve.engine import Engine
from specjax.tasks import FAMILIES

GREEDY = ("none", "token_recycling", "prompt_lookup:length=4+stand")
SAMPLED = ("token_recycling", "lookahead")  # the last one alone as well
NEW = 64


def test_shipped_weights_stay_small():
    """An install brings all of them; a head for another model must fit beside those that are there."""
    folder = Path(specjax.models.__file__).parent / "pretrained"
    sizes = [file.stat().st_size for file in folder.rglob("*") if file.is_file()]
    assert len(sizes) > 20 and sum(sizes) < 90e6


@pytest.fixture(scope="module")
def model():
    return specjax.models.load("tiny")


@pytest.fixture(scope="module")
def prompts():
    return questions(8, list(FAMILIES))


@pytest.fixture(scope="module")
def theirs(model, prompts):
    """transformers' greedy ids, its logits over them, and the margin between the two implementations."""
    import torch
    import transformers

    torch_model = transformers.AutoModelForCausalLM.from_pretrained(model.path, dtype=torch.float32).eval()
    wanted, logits, eps, spread = [], [], 0.0, 1.0
    engine = Engine(model, drafter="none")
    for prompt in prompts[:5]:
        ids = torch.as_tensor([engine.request(prompt, max_new_tokens=NEW).ids])
        out = torch_model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=NEW,
            min_new_tokens=NEW,
            eos_token_id=None,
            pad_token_id=0,
        )
        with torch.no_grad():
            forced = torch_model(out).logits[0].numpy()
        text = out[0].tolist()
        wanted.append(text[ids.shape[1] :])
        logits.append(forced)
        eps = max(eps, float(np.abs(forced - teacher_forced(model.lm, model.params, text)).max()))
        spread = max(spread, float(forced.std()))
    return wanted, logits, Margin(eps, spread)


def greedy(model, prompts, drafter, theirs):
    wanted, logits, margin = theirs
    engine = Engine(model, drafter=drafter)
    requests = [engine.request(p, max_new_tokens=NEW, ignore_eos=True) for p in prompts[:5]]
    for i, record in enumerate(engine.run(requests, batch_size=5)):
        margin.compare(record.tokens, wanted[i], logits[i], len(requests[i].ids))
    margin.close()


@pytest.mark.slow
@pytest.mark.parametrize("drafter", GREEDY)
def test_greedy_equals_transformers(model, prompts, theirs, drafter):
    greedy(model, prompts, drafter, theirs)


@pytest.fixture(scope="module")
def sampled(model, prompts):
    """Plain sampling at temperature 1, half of the rows with top-p, one row at a time."""
    engine = Engine(model, drafter="none")
    return [next(iter(engine.run([r]))).tokens for r in _requests(engine, prompts)]


def _requests(engine, prompts):
    return [
        engine.request(p, max_new_tokens=NEW, temperature=1.0, top_p=0.9 if i % 2 else 1.0, seed=11, ignore_eos=True)
        for i, p in enumerate(prompts)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("drafter", SAMPLED)
def test_sampled_text_is_the_same_in_any_batch(model, prompts, sampled, drafter):
    engine = Engine(model, drafter=drafter)
    requests = _requests(engine, prompts)
    together = [r.tokens for r in engine.run(requests, batch_size=8)]
    assert together == sampled
    if drafter == SAMPLED[-1]:
        assert [next(iter(engine.run(requests[:1]))).tokens] == sampled[:1]


@pytest.mark.slow
def test_the_target_answers_questions_that_it_never_saw(model):
    """Three of four in the families that it does best: far from chance, which is 0."""
    asked = [
        question for family in ("json", "code", "edit", "translate") for question in tasks.generate(family, 2, 99, 8)
    ]
    prompts = [question.prompt for question in asked]
    records = specjax.generate(model, prompts, chat=True, max_new_tokens=192, batch_size=16, progress=False)
    right = [tasks.check(question, record.text) for question, record in zip(asked, records, strict=True)]
    assert sum(right) >= 24
