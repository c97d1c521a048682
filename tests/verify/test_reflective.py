"""Reflective verification: what it mixes by hand, a step against one long text, and with no weight plain decoding's text."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.conformance import CAPACITY, DRAFTERS, MIXED, TARGET, but_slow, complete, params, plain, same, start

import specjax
from specjax import models
from specjax.assembly import registry
from specjax.lm import Block, Wants
from specjax.verify import Reflective
from specjax.verify.reflective import mixed

PROMPT = (5, 17, 3)
GREEDY = dataclasses.replace(MIXED, options=({"temperature": 0.0},) * 8)
softmax = lambda z: np.exp(z - z.max(-1, keepdims=True)) / np.exp(z - z.max(-1, keepdims=True)).sum(-1, keepdims=True)


def test_what_is_mixed():
    first, again = 3 * np.random.default_rng(0).normal(size=(2, 5, 7))
    p, r = softmax(first), softmax(again)
    for weight in (0.0, 0.3, 1.0):
        got = softmax(np.asarray(mixed(jnp.asarray(first), jnp.asarray(again), weight, "probs")))
        np.testing.assert_allclose(got, (1 - weight) * p + weight * r, rtol=1e-4)
        got = softmax(np.asarray(mixed(jnp.asarray(first), jnp.asarray(again), weight, "logits")))
        np.testing.assert_allclose(got, softmax((1 - weight) * np.log(p) + weight * np.log(r)), rtol=1e-4)
    first = jnp.asarray(first, jnp.float32).at[:, 2].set(-jnp.inf)
    for mix in ("probs", "logits"):
        got = mixed(first, jnp.asarray(again), 0.0, mix)
        np.testing.assert_array_equal(got, first)  # to the last bit, and what is ruled out stays so
        assert mixed(first, jnp.asarray(again), 0.5, mix)[:, 2].max() == -jnp.inf


def by_hand(text, draft, weight, shift=0):
    """What a greedy row of `text` keeps of a draft, and the token that follows: all is read as one long text."""
    length, many = len(text), len(draft)
    row = [*text, *draft, *PROMPT, text[-1], *draft]
    tokens = np.zeros((1, CAPACITY + 16), np.int32)  # one program for all lengths
    tokens[0, : len(row)] = row
    logits = np.asarray(read(jnp.asarray(tokens)))[0]
    first, again = length - 1, length + many + len(PROMPT) + shift
    for at in range(many):
        dist = (1 - weight) * softmax(logits[first + at]) + weight * softmax(logits[again + at])
        own = logits[first + at].argmax()
        if draft[at] not in (own, dist.argmax()):
            return at, own
    return many, logits[first + many].argmax()


@jax.jit
def read(tokens):
    block = Block(tokens, jnp.arange(tokens.shape[1])[None], jnp.zeros((1,), jnp.int32))
    return TARGET(params()["target"], block, None, wants=Wants(logits=True)).logits


def test_a_step_by_hand():
    """Drafts of several lengths: what follows a short one stands right after it."""
    decoder = specjax.speculative(TARGET, DRAFTERS["draft-early_stop"], Reflective(PROMPT, 0.6))
    model = params("draft-early_stop")
    state = start(decoder, GREEDY, model=model)
    step = jax.jit(decoder.step)
    differ, lengths = [], set()
    for _ in range(9):
        before = jax.tree.map(np.asarray, (state.tokens, state.length))
        state, info = step(model, state)
        drafted, valid = np.asarray(info.tree.tokens), np.asarray(info.tree.valid)
        for row, length in enumerate(before[1]):
            text, draft = before[0][row, :length].tolist(), drafted[row, 1 : valid[row].sum()].tolist()
            wanted = by_hand(text, draft, 0.6)
            assert (info.verdict.accepted[row], info.verdict.next_token[row]) == wanted
            differ.append(wanted != by_hand(text, draft, 0.6, shift=-1))  # a copy that is off by a place is seen
            lengths.add(len(draft))
    assert sum(differ) >= 3 and len(lengths) >= 3


@pytest.mark.slow
@pytest.mark.parametrize("name", but_slow(["draft-chain", "prompt_lookup", "eagle3"], "prompt_lookup", "eagle3"))
def test_no_weight_is_plain_decoding(name):
    """In as many steps as `coupled` takes: drafters see and commit nothing of what is read besides."""
    _, strict = complete(DRAFTERS[name], MIXED)
    got, same_steps = complete(DRAFTERS[name], MIXED, Reflective(PROMPT, 0.0))
    same(got, plain())
    np.testing.assert_array_equal(same_steps.stats.accepted, strict.stats.accepted)


def test_it_takes_chains_with_nothing_beside_them():
    for name, what in (("draft-top_k", "a tree"), ("lookahead", "a tree"), ("kangaroo", "more than its tokens")):
        with pytest.raises(ValueError, match=f"the reflective verifier takes chains .* proposes {what}"):
            specjax.speculative(TARGET, DRAFTERS[name], Reflective(PROMPT))


def test_a_line_names_its_prompt_in_words():
    tiny = models.load("tiny", dtype="float32")
    verifier, own = registry.build_verifier("reflective:prompt=Is it right?,weight=0.2,mix=logits", tiny)
    assert own is None and verifier == Reflective(tuple(tiny.tokenizer.encode(" Is it right?")), 0.2, "logits")
    assert len(registry.build_verifier("reflective", tiny)[0].prompt) > 3
    with pytest.raises(
        ValueError, match="reflective reads a prompt, and tiny has no tokenizer: give Reflective its token"
    ):
        registry.build_verifier("reflective", dataclasses.replace(tiny, tokenizer=None))


def test_it_is_listed_as_lossy_and_bad_fields_are_refused():
    assert registry.VERIFIERS["reflective"].guarantee == "lossy" and not Reflective.keeps_greedy
    for fields in ({"weight": 1.5}, {"mix": "words"}):
        with pytest.raises(ValueError, match="reflective needs a weight in"):
            Reflective(PROMPT, **fields)
