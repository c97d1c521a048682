"""Diffusion of a model of both kinds against plain passes over the whole text, and what is refused."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.small_diffusion import LIMITS, LM, MASK, PROMPTS, begin, params, texts

import specjax
from specjax import models
from specjax.decode import Diffusion
from specjax.diffusion import CausalContext, Fixed, FreeDave, Prefix, Threshold, Wino, diffusion
from specjax.lm import Block, Wants
from specjax.models import Masked
from specjax.reference import diffusion as oracle
from specjax.serve.engine import Engine

ORACLES = {
    "threshold": (Threshold(0.4), lambda: oracle.threshold(0.4)),
    "fixed": (Fixed(2), lambda: oracle.fixed(2, "low_confidence")),
}
HOW = Masked(MASK, shift=False, block=5, align="prompt_end", causal_context=True)


def make(policy, block_length=5, **settings):
    return diffusion(
        LM,
        MASK,
        policy,
        block_length=block_length,
        align="prompt_end",
        causal_context=True,
        causal_blocks=True,
        **settings,
    )


@functools.partial(jax.jit, static_argnums=1)
def passed(tokens, known):
    """Logits `[T, V]` of a text whose tokens see those before, and from `known` on all."""
    size = tokens.shape[0]
    visible = jnp.tril(jnp.ones((size, size), bool)).at[known:, known:].set(True)
    block = Block(tokens[None], jnp.arange(size)[None], jnp.zeros(1, jnp.int32), visible[None])
    return LM(params()["target"], block, None, wants=Wants(logits=True)).logits[0]


def wanted(row, pick, length):
    """The text that whole passes write block after block, and how many they are but for the prompt's."""
    text, passes = list(PROMPTS[row]), 0
    while len(text) < LIMITS[row]:
        known = len(text)
        seed = int(np.argmax(passed(jnp.asarray(text), known)[-1, :MASK]))
        end = min(known + length, LIMITS[row])
        canvas, spare = [*text, seed, *[MASK] * (end - known - 1)], [MASK] * (known + length - end)
        passes += 1
        if MASK in canvas:
            logits_of = lambda canvas, spare=spare, known=known: passed(jnp.asarray([*canvas, *spare]), known)
            canvas, more = oracle.generate(logits_of, canvas, MASK, length, pick())
            passes += more
        text = canvas
    return text, passes


@pytest.mark.slow
@pytest.mark.parametrize("name", ORACLES)
def test_equal_to_passes_over_everything(name):
    """Ragged prompts and limits, so that last blocks are parts; each pass counts, the seeds' too."""
    policy, pick = ORACLES[name]
    decoder = make(policy)
    state = specjax.run(decoder, params(), begin(decoder, rows=range(3)))
    for row, text in enumerate(texts(state)[:3]):
        assert (text, int(state.stats.steps[row])) == wanted(row, pick, 5)


def test_what_is_refused():
    for settings, said in (
        ({"policy": FreeDave()}, "reads one per pass: leave the policy FreeDave out"),
        ({"policy": Wino()}, "leave the policy Wino out"),
        ({"policy": Threshold(), "cache": Prefix()}, "keeps an exact cache of finished blocks: choose the cache none"),
    ):
        with pytest.raises(ValueError, match=said):
            make(**settings)
    with pytest.raises(ValueError, match="counts blocks from the prompt's end and reads one per pass: leave align out"):
        diffusion(LM, MASK, causal_context=True)


def test_the_mode_follows_from_the_way():
    """One folder, two kinds of engines; scores are the autoregressive mode's."""
    model = models.Model(LM, params()["target"], name="both", dtype=jnp.float32, dual=HOW)
    plain, engine = Engine(model, "plain"), Engine(model, Diffusion("threshold:threshold=0.4"))
    assert plain.model.masked is None and engine.model.masked == HOW
    assert isinstance(engine.decoder, CausalContext) and engine.decoder.block_length == 5 and not engine.decoder.warped
    assert engine.decoder.policy == Threshold(0.4)
    with pytest.raises(ValueError, match="both is a model of both kinds, whose autoregressive mode has exact scores"):
        engine.score([[1, 2]], [[3]])
    with pytest.raises(ValueError, match="align"):
        Engine(model, Diffusion(align="text"))
