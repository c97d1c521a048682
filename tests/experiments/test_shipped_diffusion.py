"""The shipped diffusion model: what it knows of gaps, what it answers, on its own by the commands' defaults, and as a draft."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax import models, tasks
from specjax.bench.prompts import questions
from specjax.lm import Block, Wants
from specjax.serve.engine import Engine


@pytest.fixture(scope="module")
def model():
    return models.load("tiny-diffusion", dtype="float32")


def test_it_is_the_targets_sibling(model):
    """4M to 8M parameters, 16 MB at most, and the target's vocabulary."""
    count = sum(x.size for x in jax.tree.leaves(model.params))
    assert 4e6 < count < 8e6 and sum(file.stat().st_size for file in model.path.iterdir()) <= 16e6
    assert model.tokenizer.get_vocab() == models.load("tiny").tokenizer.get_vocab()
    assert model.masked.mask_id == model.tokenizer.mask_token_id
    assert not model.masked.shift and not model.masked.block


def nats(model, gaps, sides):
    """Mean nats a token of whole masked gaps, of which the first, or both, sides are known."""
    mask, total, count = model.masked.mask_id, 0.0, 0
    read = jax.jit(
        lambda tokens: model.lm(
            model.params,
            Block(tokens, jnp.arange(tokens.shape[1])[None], jnp.zeros(1, jnp.int32), causal=False),
            None,
            wants=Wants(logits=True),
        ).logits[0]
    )
    for before, gap, after in gaps:
        ids = [*before, *[mask] * len(gap), *(after if sides == 2 else [mask] * len(after))]
        ids += [model.tokenizer.pad_token_id] * (96 - len(ids))
        dist = np.array(jax.nn.log_softmax(read(jnp.asarray([ids])).at[:, mask].set(-jnp.inf)), np.float64)
        total -= dist[np.arange(len(gap)) + len(before), gap].sum()
        count += len(gap)
    return total / count


@pytest.mark.slow
def test_it_knows_more_of_a_gap_with_what_follows(model):
    asked = [question for question in tasks.generate("fill", 2, 99, 60) if question.infill][:16]
    encode = lambda text: model.tokenizer(text, add_special_tokens=False)["input_ids"]
    gaps = [(encode(q.infill[0]), encode(f" {q.answers[0]}"), encode(f" {q.infill[1]}")) for q in asked]
    assert len(gaps) == 16 and max(sum(map(len, gap)) for gap in gaps) <= 96
    both, before = nats(model, gaps, 2), nats(model, gaps, 1)
    assert both < 0.5 * before and both < 0.25 * np.log(1536)  # it was shown no text that breaks off


@pytest.mark.slow
def test_the_commands_defaults_fill_in(model):
    engine = Engine(model)
    request = engine.request("[ red, cup,", suffix=", green ]", max_new_tokens=4)
    (record,) = engine.run([request])
    assert record.new_tokens == 4 and record.steps <= 4 and model.masked.mask_id not in record.tokens


@pytest.mark.slow
def test_it_answers_questions_that_it_never_saw(model):
    """By the commands' defaults: a few of each family that it does best, where chance is right on none."""
    asked = [q for family in ("code", "lists", "translate", "fill") for q in tasks.generate(family, 2, 99, 8)]
    prompts = [question.prompt for question in asked]
    records = specjax.generate(model, prompts, chat=True, max_new_tokens=128, batch_size=16, progress=False)
    right = [tasks.check(question, record.text) for question, record in zip(asked, records, strict=True)]
    assert sum(right) >= 4


@pytest.mark.slow
def test_it_drafts_for_the_target():
    """The shipped pair: plain decoding's text, in fewer steps."""
    target = models.load("tiny", dtype="float32")
    plain, drafted = Engine(target, drafter="none"), Engine(target, drafter="diffusion_draft")
    for temperature in (0.0, 1.0):
        texts = [
            list(
                engine.run(
                    [
                        engine.request(p, max_new_tokens=48, temperature=temperature, ignore_eos=True)
                        for p in questions(4, list(tasks.FAMILIES))
                    ],
                    batch_size=4,
                )
            )
            for engine in (plain, drafted)
        ]
        assert [r.tokens for r in texts[0]] == [r.tokens for r in texts[1]]
        assert sum(r.steps for r in texts[1]) < sum(r.steps for r in texts[0])


def test_a_diffusion_model_is_no_autoregressive_draft():
    with pytest.raises(ValueError, match="is a diffusion model: pick an autoregressive one"):
        specjax.assembly.registry.build_drafter("draft:model=tiny-diffusion", models.load("tiny"))
