"""Masked-diffusion decoding against a slow oracle, and the properties of every policy."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.conformance import but_slow
from support.shapes import changed
from support.small_diffusion import LIMITS, LM, MASK, PROMPTS, L, V, begin, forward, make, params, texts, uniform_of

import specjax
from specjax import decoder as decoding
from specjax.diffusion import Dual, EntropyBound, Factor, Fixed, LocalLeap, Threshold, diffusion
from specjax.kernels import chunks
from specjax.kernels.tree_attention import api
from specjax.models import LlamaLM
from specjax.prompts import Prompts
from specjax.reference import diffusion as oracle
from specjax.sampling import SamplingArrays, row_keys
from specjax.state import Finish

ORACLES = {
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


def wanted(row, block_length, pick, shift=False, **options):
    canvas = [*PROMPTS[row], *[MASK] * (LIMITS[row] - len(PROMPTS[row]))]
    return oracle.generate(forward, canvas, MASK, block_length, pick, shift=shift, uniforms=uniform_of(row), **options)


@pytest.mark.parametrize("shift", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["same", "shifted"])
@pytest.mark.parametrize(
    "name", but_slow(ORACLES, "fixed-3", "entropy", "random", "factor", "entropy_bound", "local_leap")
)
def test_equal_to_the_oracle(name, shift):
    """Ragged rows, an infilled one, two block lengths, in all pairs for two policies: the same tokens in as many passes."""
    policy, pick = ORACLES[name]
    for block_length in (8, 5) if name in ("fixed", "threshold") else (8,) if name == "random" or not shift else (5,):
        decoder = make(policy, block_length, shift)
        state = specjax.run(decoder, params(), begin(decoder))
        for row, (text, steps) in enumerate(zip(texts(state), state.stats.steps.tolist(), strict=True)):
            assert (text, steps) == wanted(row, block_length, pick, shift)


@pytest.mark.parametrize("shift", (False, pytest.param(True, marks=pytest.mark.slow)), ids=("same", "shifted"))
def test_guidance_is_the_oracles(shift):
    decoder = dataclasses.replace(make(Threshold(0.6), shift=shift), cfg_scale=0.8)
    state = specjax.run(decoder, params(), begin(decoder))
    for row, (text, steps) in enumerate(zip(texts(state), state.stats.steps.tolist(), strict=True)):
        assert (text, steps) == wanted(row, 8, oracle.threshold(0.6), shift, cfg_scale=0.8)
    assert texts(state) != texts(specjax.run(make(Threshold(0.6), shift=shift), params(), begin(decoder)))


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


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_does_not_depend_on_its_batch(temperature):
    decoder = make(Threshold(0.3))
    together = texts(specjax.run(decoder, params(), begin(decoder, temperature=temperature)))
    assert texts(specjax.run(decoder, params(), begin(decoder, (3, 1), temperature))) == [together[3], together[1]]
    assert texts(specjax.run(decoder, params(), begin(decoder, (2,), temperature))) == [together[2]]
    greedy = texts(specjax.run(decoder, params(), begin(decoder)))
    assert (together == greedy) == (temperature == 0)


@pytest.mark.parametrize("policy", (Threshold(0.3), Fixed(3, "random")), ids=str)
def test_the_capacity_does_not_change_a_text(policy):
    decoder = make(policy)
    small, large = begin(decoder, temperature=1.0), begin(decoder, temperature=1.0, capacity=2 * L)
    assert texts(specjax.run(decoder, params(), small)) == texts(specjax.run(decoder, params(), large))


@pytest.mark.parametrize("size", (600, pytest.param(1100, marks=pytest.mark.slow)))
def test_a_canvas_whose_queries_are_met_some_at_a_time(monkeypatch, size):
    """Three rows of different length, of which one is filled in: the text of passes that meet all queries at once. The last
    block of a row is a part of one."""
    prompts = np.random.default_rng(0).integers(0, MASK, (3, size), dtype=np.int32)
    prompts[1, 40:52] = MASK
    lengths = jnp.asarray([size - 20, size - 40, 130])
    decoder, found = make(Threshold(0.3)), []
    for queries, capacity in ((chunks.QUERIES, size), (2 * size, size + 32)):  # another capacity is another program
        monkeypatch.setattr(api, "QUERIES", queries)
        keys, limit = row_keys(0, ["0", "1", "2"]), jnp.asarray([size, size - 40, 151])
        given = Prompts(jnp.asarray(prompts), lengths, keys, limit, SamplingArrays.make(3))
        state = decoder.init(params(), given, capacity=capacity)
        found.append(texts(specjax.run(decoder, params(), state)))
    assert found[0] == found[1] and [len(text) for text in found[0]] == [size, size - 40, 151]
    assert not any(MASK in text for text in found[0])


def test_an_eos_that_was_given_ends_nothing():
    """The last prompt holds 9 between its open spans."""
    decoder = make(Threshold(0.5))
    state = specjax.run(decoder, params(), begin(decoder, (3,), eos=9))
    before = [i for i, token in enumerate(PROMPTS[3]) if token == MASK]
    written = [texts(specjax.run(decoder, params(), begin(decoder, (3,))))[0][i] for i in before]
    assert 9 not in written and len(texts(state)[0]) > before[-1]


@pytest.mark.slow
def test_a_row_can_be_refilled_after_it_failed():
    """What a failed row left in its cache is not seen by the next prompt, while the other row is in the middle of a block."""
    decoder = dataclasses.replace(make(Fixed()), cache=Dual())
    table = params()["target"]["embed"]["embedding"]
    lm = LlamaLM(changed(LM.config, tie_word_embeddings=False))
    decoder = dataclasses.replace(decoder, target=lm)
    weights = {
        "target": {**params()["target"], "head": {"kernel": table.T}, "embed": {"embedding": table.at[4].set(jnp.nan)}}
    }
    step = jax.jit(decoder.step)
    state = step(weights, step(weights, begin(decoder, (0, 1)))[0])[0]
    assert state.finish.tolist() == [Finish.ERROR, Finish.RUNNING]
    fresh = Prompts.of([[9, 2, 6]], 19, keys=row_keys(0, ["2"]))
    state = decoding.insert(decoder, weights, state, jnp.asarray([0]), fresh)
    assert specjax.run(decoder, weights, state).finish.tolist() == [Finish.LENGTH] * 2


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


@pytest.mark.slow
def test_extremes():
    """A threshold no prediction reaches is one token per pass; log V of entropy, a threshold of 0, are one pass per
    block."""
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
    """The embedding of a token that only rows 0 and 2 hold is NaN: they stop, row 1's text stays."""
    decoder = dataclasses.replace(make(Fixed()), target=LlamaLM(changed(LM.config, tie_word_embeddings=False)))
    table = params()["target"]["embed"]["embedding"]
    clean = {"target": {**params()["target"], "head": {"kernel": table.T}}}
    spoilt = {"target": {**clean["target"], "embed": {"embedding": table.at[3].set(jnp.nan)}}}
    want, got = (specjax.run(decoder, weights, begin(decoder)) for weights in (clean, spoilt))
    assert [3 in prompt for prompt in PROMPTS[:3]] == [True, False, True] and 3 not in texts(want)[1]
    assert got.finish.tolist()[0] == got.finish.tolist()[2] == Finish.ERROR
    assert got.length.tolist()[0] == len(PROMPTS[0])
    assert texts(got)[1] == texts(want)[1]


@pytest.mark.parametrize(
    ("make_it", "said"),
    [
        (lambda: diffusion(LM, V), "outside the vocabulary of 24"),
        (lambda: make(block_length=0), "block_length must be at least 1"),
        (lambda: diffusion(LM, MASK, cfg_scale=-1.0), "cfg_scale must be at least 0"),
        (lambda: diffusion(LM, MASK, cache=Dual(), cfg_scale=1.0), "choose the cache none"),
        (lambda: Fixed(-1), "steps must be at least 0"),
        (lambda: Fixed(rule="frob"), "low_confidence, margin, entropy, random"),
        (lambda: Factor(0.0), "above 0"),
        (lambda: LocalLeap(0.5, 0.6), "relaxed <= anchor"),
    ],
)
def test_bad_settings(make_it, said):
    with pytest.raises(ValueError, match=said):
        make_it()
