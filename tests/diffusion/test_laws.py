"""What holds for every kind of diffusion decoder: drawn rows alone and in a batch, EOS, broken weights, and no retrace."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.compiled import optimised
from support.small_diffusion import LM, MASK, PROMPTS, begin, params, texts

import specjax
from specjax import decoder as decoding
from specjax.diffusion import Dual, FreeDave, Guided, Threshold, Wino, diffusion
from specjax.models import LlamaLM
from specjax.state import Finish

GUIDE = LlamaLM(dataclasses.replace(LM.config, num_hidden_layers=1))
ROWS = (0, 1, 2)
KINDS = {
    "plain": lambda: diffusion(LM, MASK, Threshold(0.4), block_length=8),
    "cached": lambda: diffusion(LM, MASK, Threshold(0.4), Dual(), block_length=8),
    "wino": lambda: diffusion(LM, MASK, Wino(0.3, 0.5, 0.7, 2, 4), block_length=8),
    "free_dave": lambda: diffusion(LM, MASK, FreeDave(drafts=2), block_length=8),
    "guided": lambda: diffusion(LM, MASK, Guided(GUIDE, 4), block_length=8),
    "blocks": lambda: diffusion(LM, MASK, Threshold(0.4), block_length=8, causal_blocks=True),
}


@pytest.fixture(scope="module", params=KINDS)
def decoder(request):
    return KINDS[request.param]()


@pytest.fixture(scope="module")
def model():
    target = params()["target"]
    return {"target": target, "guide": {**target, "layers": {0: target["layers"][0]}}}


def finished(decoder, model, **settings):
    rows = settings.pop("rows", ROWS)
    return specjax.run(decoder, model, begin(decoder, rows, model=model, **settings))


def test_a_drawn_row_alone_is_a_row_in_a_batch(decoder, model):
    together = texts(finished(decoder, model, temperature=0.8))
    greedy = texts(finished(decoder, model))
    assert together != greedy  # it is drawn
    assert texts(finished(decoder, model, rows=(2,), temperature=0.8)) == [together[2]]


@pytest.mark.slow
def test_the_optimised_program(decoder, model):
    """What users run says the same, of a row alone too."""
    steps = jnp.int32(decoding.NO_LIMIT), jnp.int32(1)
    state = begin(decoder, ROWS, model=model, temperature=0.8)
    program = optimised(decoding.run_program.lower(decoder, model, state, *steps))
    together = texts(program(model, state, *steps))
    assert together == texts(finished(decoder, model, temperature=0.8))
    alone = begin(decoder, (2,), model=model, temperature=0.8, slots=len(ROWS))
    assert texts(program(model, alone, *steps))[:1] == together[2:]


def test_eos_cuts_the_same_text(decoder, model):
    whole = texts(finished(decoder, model))
    eos = whole[0][len(PROMPTS[0]) + 2]
    cut = finished(decoder, model, eos=eos)
    assert cut.finish[0] == Finish.EOS
    for row, (text, full) in enumerate(zip(texts(cut), whole, strict=True)):
        new = full[len(PROMPTS[row]) :]
        end = new.index(eos) + 1 if eos in new else len(new)
        assert text == full[: len(PROMPTS[row]) + end]


def test_broken_weights_end_the_rows_and_nothing_is_traced_again(decoder, model):
    finished(decoder, model)
    compiled = decoding.run_program._cache_size()
    broken = finished(decoder, {**model, "target": jax.tree.map(lambda x: x * jnp.nan, model["target"])})
    assert (broken.finish == Finish.ERROR).all() and not np.isin(MASK, texts(broken)[0])
    finished(decoder, model, temperature=1.3, eos=3)
    assert decoding.run_program._cache_size() == compiled
