"""Guided diffusion against a plain loop, and its two ends."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.small_diffusion import LIMITS, LM, MASK, PROMPTS, begin, forward, params, texts

import specjax
from specjax import models
from specjax.diffusion import Guided, Prefix, diffusion
from specjax.lm import Block, Wants
from specjax.models import LlamaLM, Masked
from specjax.serve.engine import Engine
from specjax.spec import registry
from specjax.state import Finish

GUIDE = LlamaLM(dataclasses.replace(LM.config, num_hidden_layers=1))
ROWS = (0, 1, 2)  # a guide does not fill in


@functools.cache
def both():
    """The guide has the model's first layer: now and then they agree."""
    target = params()["target"]
    return {"target": target, "guide": {**target, "layers": {0: target["layers"][0]}}}


def make(top=1, block_length=8, **settings):
    return diffusion(LM, MASK, Guided(GUIDE, top), block_length=block_length, **settings)


@functools.cache
def _guide(size):
    block = lambda tokens: Block(tokens[None], jnp.arange(size)[None], jnp.zeros(1, int))
    return jax.jit(lambda tokens: GUIDE(both()["guide"], block(tokens), None, wants=Wants(logits=True)).logits[0])


def slow(row, block_length, top):
    """Plain Python: both models read everything anew."""
    text, canvas = list(PROMPTS[row]), [*PROMPTS[row], *[MASK] * (LIMITS[row] - len(PROMPTS[row]))]
    start, passes = len(text), 0
    while len(text) < LIMITS[row]:
        logits = np.array(forward(canvas))
        logits[:, MASK] = -np.inf
        end = min(start + ((len(text) - start) // block_length + 1) * block_length, LIMITS[row])
        drafts = logits[len(text) : end].argmax(axis=1).tolist()
        says = np.asarray(_guide(len(text) + len(drafts))(jnp.asarray([*text, *drafts])))
        count = 0
        for i, token in enumerate(drafts):
            law = says[len(text) + i - 1]
            if (law > law[token]).sum() >= top:
                break
            count += 1
        text += drafts[: max(count, 1)]
        canvas[: len(text)] = text
        passes += 1
    return text, passes


@pytest.mark.parametrize("top", (1, 4))
def test_equal_to_a_plain_loop(top):
    decoder = make(top)
    state = specjax.run(decoder, both(), begin(decoder, ROWS, model=both()))
    results = [slow(row, 8, top) for row in ROWS]
    assert [(t, n) for t, n in zip(texts(state), state.stats.steps.tolist(), strict=True)] == results
    saved = [len(t) - len(PROMPTS[row]) - n for row, (t, n) in zip(ROWS, results, strict=True)]
    assert any(saved) if top > 1 else not any(saved)  # these two never agree on the likeliest token


def test_a_guide_that_agrees_with_all_takes_a_pass_a_block():
    decoder = make(top=MASK + 1)
    state = specjax.run(decoder, both(), begin(decoder, ROWS, model=both()))
    assert state.stats.steps.tolist() == [-(-(LIMITS[row] - len(PROMPTS[row])) // 8) for row in ROWS]


@pytest.mark.slow
def test_rows_and_caches():
    """A row alone is a row in a batch, with a cache of the diffusion model too."""
    decoder = make(4, cache=Prefix())
    together = texts(specjax.run(decoder, both(), begin(decoder, ROWS, model=both())))
    alone = texts(specjax.run(decoder, both(), begin(decoder, (2,), model=both())))
    assert alone == [together[2]]


def test_a_broken_guide_ends_its_rows():
    decoder = make(4)
    spoilt = {**both(), "guide": jax.tree.map(lambda x: x * jnp.nan, both()["guide"])}
    state = specjax.run(decoder, spoilt, begin(decoder, ROWS, model=both()))
    assert (state.finish == Finish.ERROR).all() and texts(state) == [list(PROMPTS[row]) for row in ROWS]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    path = tmp_path_factory.mktemp("guided")
    models.save(path / "diffusion", LM, params()["target"], diffusion=Masked(MASK, False))
    models.save(path / "guide", GUIDE, both()["guide"])
    return path


def test_a_line_of_text_names_the_guide(folders):
    model = models.load(folders / "diffusion", dtype="float32")
    engine = Engine(model, unmask=f"guided:model={folders / 'guide'},top=4", block_length=8)
    assert isinstance(engine.decoder.policy, Guided) and engine.decoder.policy.top == 4
    (record,) = engine.run([engine.request(list(PROMPTS[0]), max_new_tokens=16)], ignore_eos=True)
    assert [*PROMPTS[0], *record.tokens] == slow(0, 8, 4)[0]
    given = Engine(model, unmask=(Guided(GUIDE, 4), {"guide": both()["guide"]}), block_length=8)
    (again,) = given.run([given.request(list(PROMPTS[0]), max_new_tokens=16)], ignore_eos=True)
    assert again.tokens == record.tokens
    with pytest.raises(ValueError, match="Guided needs parameters of its own"):
        Engine(model, unmask=Guided(GUIDE))
    with pytest.raises(ValueError, match="writes from left to right"):
        engine.request([1, 2], suffix=[3], max_new_tokens=8)
    with pytest.raises(ValueError, match="is a diffusion model: pick an autoregressive one"):
        Engine(model, unmask=f"guided:model={folders / 'diffusion'}")
    with pytest.raises(ValueError, match="nothing stands before"):
        registry.make_unmask("credit+guided")


def test_bad_settings():
    with pytest.raises(ValueError, match="top >= 1"):
        Guided(GUIDE, 0)
    other = LlamaLM(dataclasses.replace(LM.config, vocab_size=9))
    with pytest.raises(ValueError, match="the guide has 9 tokens and the model 24"):
        diffusion(LM, MASK, Guided(other))
