"""Every cache policy that is exported does what it declares: of diffusion models beside `fixed` without a cache, of
autoregressive ones beside plain decoding with a whole cache."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import small_diffusion
from support.conformance import texts
from support.guarantees import held
from support.small_diffusion import LIMITS, MASK, PROMPTS
from support.small_target import TARGET, weights

import specjax
from specjax import decoder as decoding
from specjax.assembly.registry import CACHES, OLDS
from specjax.diffusion import Fixed, NoCache
from specjax.lm import Block, Wants
from specjax.prompts import Prompts
from specjax.reference import diffusion as oracle
from specjax.sampling import SamplingArrays, row_keys

SHORT = {"vicinity": {"before": 1, "after": 1, "warmup": 1}}
"""Fields for canvases on which the defaults lose nothing."""
SMALL = {
    "ems": {"recent": 4, "chunk": 4, "budget": 8},
    "gear": {"recent": 4, "chunk": 4, "bits": 2, "rank": 0, "prefill_rank": 0, "outliers": 0.0},
    "spatten": {"recent": 4, "chunk": 4, "important": 8, "last": 4, "start": 2},
}
"""Fields for texts on which the defaults forget nothing."""

ROWS = (0, 1, 2)
GREEDY, MIXED = (0.0, 0.0, 0.0), (0.0, 1.0, 0.7)
NONE = NoCache()


@functools.cache
def of_diffusion(cache=NONE, heats=GREEDY):
    decoder = dataclasses.replace(small_diffusion.make(Fixed()), cache=cache)
    state = small_diffusion.begin(decoder, ROWS, list(heats))
    return small_diffusion.texts(specjax.run(decoder, small_diffusion.params(), state))


def slowly(row):
    """What the oracle writes, which computes everything in every pass."""
    canvas = [*PROMPTS[row], *[MASK] * (LIMITS[row] - len(PROMPTS[row]))]
    return oracle.generate(small_diffusion.forward, canvas, MASK, 8, oracle.fixed(0, "low_confidence"))[0]


def of_diffusion_same_text(cache):
    assert of_diffusion(cache) == [slowly(row) for row in ROWS]
    assert of_diffusion(cache, MIXED) == of_diffusion(heats=MIXED)


def of_diffusion_lossy(cache):
    assert of_diffusion(cache) != of_diffusion(), "it writes what no cache writes: say so, or give it fields in SHORT"


@pytest.mark.parametrize("name", CACHES)
def test_a_cache_of_a_diffusion_model_keeps_its_guarantee(name):
    tests = {"same text": of_diffusion_same_text, "lossy": of_diffusion_lossy}
    held("cache", name, CACHES[name], tests)(CACHES[name].make(**SHORT.get(name, {})))


@jax.jit
def first_keys(tokens):
    """Of the first layer, `[B, K, L, H]`: they depend on a position and its token alone."""
    block = Block(tokens, jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape), jnp.zeros(len(tokens), int))
    delta = small_diffusion.LM(small_diffusion.params()["target"], block, None, wants=Wants()).delta
    return delta.key[0].swapaxes(1, 2)


@pytest.mark.parametrize("name", [name for name, entry in CACHES.items() if entry.make().keeps])
def test_what_a_cache_reuses_is_of_the_tokens_that_are_there(name):
    """Pass by pass: no token that was written since is read as what stood there before."""
    cache, weights = CACHES[name].make(**SHORT.get(name, {})), small_diffusion.params()
    decoder = dataclasses.replace(small_diffusion.make(Fixed()), cache=cache)
    state, passes = small_diffusion.begin(decoder, ROWS, list(GREEDY)), 0
    while not np.asarray(state.done).all():
        going, tokens = ~np.asarray(state.done), np.asarray(state.tokens)
        state = specjax.run(decoder, weights, state, 1)
        used = (going[:, None] & (np.arange(tokens.shape[1]) < np.asarray(LIMITS)[list(ROWS), None]))[:, None, :, None]
        held, wanted = (np.where(used, keys, 0) for keys in (state.cache.key[0], first_keys(jnp.asarray(tokens))))
        np.testing.assert_allclose(held, wanted, atol=1e-4)
        passes += 1
    assert passes > 10


TEXTS = np.random.default_rng(0).integers(0, TARGET.config.vocab_size, (3, 21))
LENGTHS = np.asarray((21, 17, 20), np.int32)


@functools.cache
def of_a_text(old=None):
    """Plain decoding's texts, greedy and drawn."""
    lm = dataclasses.replace(TARGET, old=old)
    decoder, model = specjax.speculative(lm), {"target": weights(TARGET), "draft": None}
    decoder = decoder if old is None else decoder.with_rings()
    given, sampling = (
        jax.device_put((TEXTS, LENGTHS, LENGTHS + 16)),
        SamplingArrays({"temperature": jnp.asarray(MIXED)}),
    )
    prompts = Prompts(*given[:2], row_keys(0, "abc"), given[2], sampling, width=8)
    state = decoder.init(model, prompts, capacity=40, cache_dtype=jnp.float32)
    return texts(decoding.run(decoder, model, state))


def of_a_text_same_text(old):
    assert of_a_text(old) == of_a_text()


def of_a_text_lossy(old):
    assert of_a_text(old) != of_a_text(), "it writes what a whole cache writes: say so, or give it fields in SMALL"


@pytest.mark.parametrize("name", OLDS)
def test_a_cache_of_an_autoregressive_model_keeps_its_guarantee(name):
    tests = {"same text": of_a_text_same_text, "lossy": of_a_text_lossy}
    held("cache", name, OLDS[name], tests)(OLDS[name].make(**SMALL.get(name, {})))
