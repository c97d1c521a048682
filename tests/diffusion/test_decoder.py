"""Masked-diffusion decoding against a slow oracle, and the laws every policy obeys."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax import decoder as decoding
from specjax.diffusion import EntropyBound, Factor, Fixed, LocalLeap, Threshold, diffusion
from specjax.diffusion.decoder import CHOOSE
from specjax.lm import Block, Wants
from specjax.models import LlamaConfig, LlamaLM
from specjax.reference import diffusion as oracle
from specjax.sampling import Sampling, row_keys
from specjax.sampling.noise import uniform
from specjax.state import Finish

MASK, V, L = 23, 24, 32
LM = LlamaLM(LlamaConfig(V, 32, 48, 2, 4, 2, 8, max_position_embeddings=64, tie_word_embeddings=True))
PROMPTS = ((3, 1, 4), (1, 5), (9, 2, 6, 5, 3), (5, MASK, MASK, 8, 9, 7, MASK, 2))  # the last one has open spans
LIMITS = (19, 22, 17, 14)
POLICIES = {
    "fixed": (Fixed(), oracle.fixed(0, "low_confidence")),
    "fixed-3": (Fixed(3), oracle.fixed(3, "low_confidence")),
    "margin": (Fixed(4, "margin"), oracle.fixed(4, "margin")),
    "entropy": (Fixed(0, "entropy"), oracle.fixed(0, "entropy")),
    "random": (Fixed(3, "random"), oracle.fixed(3, "random")),
    "threshold": (Threshold(0.5), oracle.threshold(0.5)),
    "factor": (Factor(1.2), oracle.factor(1.2)),
    "entropy_bound": (EntropyBound(1.2), oracle.entropy_bound(1.2)),
    "local_leap": (LocalLeap(0.6, 0.35, 2), oracle.local_leap(0.6, 0.35, 2)),
}


@functools.cache
def params():
    """Random weights, sharpened so that some predictions are sure and others are not."""
    return {"target": jax.tree.map(lambda x: 4 * x if x.ndim == 2 else x, jax.jit(LM.init)(jax.random.key(3)))}


def make(policy=None, block_length=8, shift=False):
    return diffusion(LM, MASK, policy, block_length=block_length, shift=shift)


def begin(decoder, rows=range(4), temperature=0.0, eos=None, limits=LIMITS):
    prompts = np.full((len(rows), 8), 0, np.int32)
    for i, row in enumerate(rows):
        prompts[i, : len(PROMPTS[row])] = PROMPTS[row]
    state = decoding.empty(decoder, params(), len(rows), L, None, 1)
    return decoding.insert(
        decoder, params(), state, jnp.arange(len(rows)), jnp.asarray(prompts),
        jnp.asarray([len(PROMPTS[row]) for row in rows]), row_keys(0, [str(row) for row in rows]),
        limit=jnp.asarray([limits[row] for row in rows]), sampling=Sampling.make(len(rows), temperature=temperature),
        eos=None if eos is None else jnp.full((len(rows), 1), eos), width=None,
    )  # fmt: skip


def texts(state):
    return [np.asarray(state.tokens)[i, : int(n)].tolist() for i, n in enumerate(state.length)]


@functools.cache
def _forward(size):
    positions = jnp.arange(size)[None]
    return jax.jit(
        lambda tokens: LM(
            params()["target"], Block(tokens[None], positions, jnp.zeros(1, int), causal=False), None,
            wants=Wants(logits=True),
        ).logits[0]
    )  # fmt: skip


def logits_of(canvas):
    return _forward(len(canvas))(jnp.asarray(canvas))


def wanted(row, block_length, pick, shift=False, eos=()):
    canvas = [*PROMPTS[row], *[MASK] * (LIMITS[row] - len(PROMPTS[row]))]
    key = row_keys(0, [str(i) for i in range(4)])[row : row + 1]
    draw = lambda at, step: float(uniform(key, jnp.asarray([[at + L * (1 + step)]]), CHOOSE)[0, 0])
    return oracle.generate(logits_of, canvas, MASK, block_length, pick, shift=shift, uniforms=draw, eos=eos)


@pytest.mark.parametrize("shift", [False, True], ids=["same", "shifted"])
@pytest.mark.parametrize("name", POLICIES)
def test_equal_to_the_oracle(name, shift):
    """Ragged rows, an infilled one, several block lengths: the same tokens in as many passes."""
    policy, pick = POLICIES[name]
    for block_length in (8, 5) if name != "random" else (8,):
        decoder = make(policy, block_length, shift)
        state = specjax.run(decoder, params(), begin(decoder))
        for row, (text, steps) in enumerate(zip(texts(state), state.stats.steps.tolist(), strict=True)):
            assert (text, steps) == wanted(row, block_length, pick, shift)


def test_policies_save_passes_and_count_them():
    one = specjax.run(make(Fixed()), params(), begin(make(Fixed())))
    open_positions = [limit - len(p) + p.count(MASK) for p, limit in zip(PROMPTS, LIMITS, strict=True)]
    assert one.stats.steps.tolist() == open_positions
    many = make(Threshold(0.4))
    state = specjax.run(many, params(), begin(many))
    counts = np.asarray(state.stats.accepted)
    assert counts.sum(axis=1).tolist() == state.stats.steps.tolist()
    assert (counts * np.arange(9)).sum(axis=1).tolist() == open_positions
    assert (np.asarray(state.stats.steps) < open_positions).any() and (counts[:, 0] == 0).all()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_does_not_depend_on_its_batch(temperature):
    decoder = make(Threshold(0.3))
    together = texts(specjax.run(decoder, params(), begin(decoder, temperature=temperature)))
    assert texts(specjax.run(decoder, params(), begin(decoder, (3, 1), temperature))) == [together[3], together[1]]
    assert texts(specjax.run(decoder, params(), begin(decoder, (2,), temperature))) == [together[2]]
    greedy = texts(specjax.run(decoder, params(), begin(decoder)))
    assert (together == greedy) == (temperature == 0)


def test_known_tokens_stay_and_no_mask_is_left():
    decoder = make(Factor())
    for text, prompt, limit in zip(texts(specjax.run(decoder, params(), begin(decoder))), PROMPTS, LIMITS, strict=True):
        assert len(text) == limit and MASK not in text
        assert all(got == given for got, given in zip(text, prompt, strict=False) if given != MASK)


def test_the_text_ends_at_the_first_eos_and_decoding_with_it():
    """Of each row's own text some token is made the end."""
    decoder = make(Threshold(0.5))
    whole = specjax.run(decoder, params(), begin(decoder))
    for row in range(3):
        eos = texts(whole)[row][len(PROMPTS[row]) + 3]
        state = specjax.run(decoder, params(), begin(decoder, (row,), eos=eos))
        text, steps = wanted(row, 8, oracle.threshold(0.5), eos=(eos,))
        assert texts(state) == [text] and text[-1] == eos
        assert int(state.finish[0]) == Finish.EOS and int(state.stats.steps[0]) <= steps


def test_what_lies_beyond_the_limit_is_never_seen():
    decoder = make(Threshold(0.5))
    state = begin(decoder)
    want = texts(specjax.run(decoder, params(), begin(decoder)))
    beyond = jnp.arange(L)[None] >= state.limit[:, None]
    state = dataclasses.replace(state, tokens=jnp.where(beyond, 7, state.tokens))
    assert texts(specjax.run(decoder, params(), state)) == want


def test_nothing_is_compiled_again():
    decoder = make(Threshold(0.5))
    specjax.run(decoder, params(), begin(decoder))
    compiled = decoding.run_program._cache_size()
    specjax.run(make(Threshold(0.5)), params(), begin(decoder, temperature=0.7, limits=(12, 13, 14, 15)))
    assert decoding.run_program._cache_size() == compiled


def test_extremes():
    """A threshold no prediction reaches is one token a pass; log V of entropy, a threshold of 0, are one pass a block."""
    slow, fast = (specjax.run(make(p), params(), begin(make(p))) for p in (Threshold(1.1), Threshold(0.0)))
    assert texts(slow) == texts(specjax.run(make(Fixed()), params(), begin(make(Fixed()))))
    assert fast.stats.steps.tolist() == [
        -(-(limit - len(p)) // 8) for p, limit in zip(PROMPTS[:3], LIMITS, strict=False)
    ] + [2]
    entropy = make(EntropyBound(float(np.log(V))))
    assert texts(specjax.run(entropy, params(), begin(entropy))) == texts(fast)
    leap, plain = make(LocalLeap(0.5, 0.5)), make(Threshold(0.5))
    assert texts(specjax.run(leap, params(), begin(leap))) == texts(specjax.run(plain, params(), begin(plain)))


def test_logits_that_are_not_finite_end_the_row_alone():
    spoilt = {"target": {**params()["target"], "norm": {"scale": jnp.full((32,), jnp.nan)}}}
    state = specjax.run(make(), spoilt, begin(make()))
    assert state.finish.tolist() == [Finish.ERROR] * 4


@pytest.mark.parametrize(
    ("make_it", "said"),
    [
        (lambda: diffusion(LM, V), "outside the vocabulary of 24"),
        (lambda: make(block_length=0), "block_length must be at least 1"),
        (lambda: Fixed(-1), "steps >= 0"),
        (lambda: Fixed(rule="frob"), "low_confidence, margin, entropy, random"),
        (lambda: Factor(0.0), "above 0"),
        (lambda: LocalLeap(0.5, 0.6), "relaxed <= anchor"),
    ],
)
def test_bad_settings(make_it, said):
    with pytest.raises(ValueError, match=said):
        make_it()
