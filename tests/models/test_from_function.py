"""A model that is one function writes the text of the same model with a cache."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from support import small_target

import specjax
from specjax.lm import Block, Wants
from specjax.models import FunctionLM
from specjax.testing import check_lm

LM = small_target.TARGET
PARAMS = LM.init(jax.random.key(0))


def whole(params, tokens):
    """A pass over whole rows, as other libraries have it."""
    slots = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32)[None], tokens.shape)
    block = Block(tokens, slots, jnp.zeros((len(tokens),), jnp.int32))
    return LM(params, block, None, wants=Wants(logits=True)).logits


OWN = FunctionLM(whole, LM.vocab_size)
PROMPTS = [[3, 1, 4, 1, 5], [2, 7], [1, 1, 1, 2]]


def texts(lm, drafter, temperature=0.0):
    how = {"drafter": drafter, "temperature": temperature, "max_new_tokens": 8, "batch_size": 4, "seed": 3}
    return [record.tokens for record in specjax.generate((lm, PARAMS), PROMPTS, **how)]


@pytest.mark.slow
@pytest.mark.covers("from_function", "testing")
def test_it_keeps_the_contract():
    found = check_lm(OWN, PARAMS, length=12)
    assert list(found.lacks) == ["heads that read features", "drafters that run some of its layers"]


def test_its_texts_are_those_of_a_model_with_a_cache():
    assert texts(OWN, "prompt_lookup") == texts(LM, "none")


@pytest.mark.slow
@pytest.mark.covers("from_function", "speculative")
@pytest.mark.parametrize("drafter", ["token_recycling", "lookahead", "suffix:tree=true"])
def test_and_with_every_kind_of_tree(drafter):
    assert texts(OWN, drafter) == texts(LM, "none")
    assert texts(OWN, drafter, 1.0) == texts(LM, "none", 1.0)


def test_what_it_does_not_read():
    block = Block(jnp.asarray([[1]]), jnp.asarray([[0]]), jnp.asarray([0]))
    with pytest.raises(ValueError, match="reads tokens from left to right"):
        OWN(PARAMS, dataclasses.replace(block, causal=False), None, wants=Wants(logits=True))
    short = FunctionLM(lambda params, tokens: jnp.zeros((*tokens.shape, 5)), 6)
    with pytest.raises(ValueError, match=r"\[B, T, V\] = \(1, 1, 6\), and these have the shape \(1, 1, 5\)"):
        short(PARAMS, block, None, wants=Wants(logits=True))
