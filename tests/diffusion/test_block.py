"""Block diffusion against plain passes over the whole text, and what its cache holds."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.small_diffusion import LIMITS, LM, MASK, PROMPTS, begin, params, texts

import specjax
from specjax import models
from specjax.diffusion import Fixed, FreeDave, Prefix, RunningConfidence, Threshold, Wino, diffusion
from specjax.lm import Block, Wants
from specjax.models import LlamaLM, Masked, ModelError
from specjax.reference import diffusion as oracle
from specjax.sampling import Sampling
from specjax.serve.engine import Engine
from specjax.state import Finish

POLICIES = {
    "fixed": (Fixed(), lambda: oracle.fixed(0, "low_confidence")),
    "threshold": (Threshold(0.4), lambda: oracle.threshold(0.4)),
    "rcr": (RunningConfidence(2), lambda: oracle.running_confidence(2)),
}


def make(policy, block_length, shift=False, **settings):
    return diffusion(LM, MASK, policy, block_length=block_length, shift=shift, causal_blocks=True, **settings)


@functools.cache
def _forward(size, block_length):
    """One pass over a whole text, every position in view of its own block and those before it."""
    of = jnp.arange(size) // block_length
    visible = (of[None, :] <= of[:, None])[None]

    def read(tokens):
        block = Block(tokens[None], jnp.arange(size)[None], jnp.zeros(1, int), visible, causal=False)
        output = LM(params()["target"], block, None, wants=Wants(logits=True))
        return output.logits[0], output.delta

    return jax.jit(read)


def wanted(row, block_length, pick, shift):
    """The oracle's text, from passes over everything, in blocks that begin at position 0; its passes, with those that store."""
    canvas = [*PROMPTS[row], *[MASK] * (LIMITS[row] - len(PROMPTS[row]))]
    first = canvas.index(MASK)
    passes = int(
        shift and first >= block_length
    )  # the prompt's last whole block is stored by a pass that may commit a seed
    for low in range(first // block_length * block_length, len(canvas), block_length):
        text = canvas[: low + block_length]
        whole = low + block_length  # the last block is read whole
        logits_of = lambda text, whole=whole: _forward(whole, block_length)(
            jnp.asarray([*text, *[MASK] * (whole - len(text))])
        )[0]
        if shift and text[low] == MASK:  # the seed: what the pass over all blocks before says
            text[low] = int(np.argmax(_forward(low, block_length)(jnp.asarray(text[:low]))[0][-1, :MASK]))
        if MASK in text[low:]:
            begin = text.index(MASK)
            text, more = oracle.generate(logits_of, text, MASK, block_length - (begin - low), pick(), shift=shift)
            passes += more
        canvas[: len(text)] = text
        passes += low + block_length < len(canvas)  # it is stored, but for the last one
    return canvas, passes


@pytest.mark.parametrize(
    ("block_length", "shift", "name"),
    [
        *((4, False, name) for name in POLICIES),
        *(pytest.param(7, True, name, marks=pytest.mark.slow) for name in POLICIES),
        *(pytest.param(*pair, "threshold", marks=pytest.mark.slow) for pair in ((4, True), (7, False))),
    ],
)
def test_equal_to_passes_over_everything(name, block_length, shift):
    policy, pick = POLICIES[name]
    decoder = make(policy, block_length, shift)
    state = specjax.run(decoder, params(), begin(decoder))
    for row, (text, steps) in enumerate(zip(texts(state), state.stats.steps.tolist(), strict=True)):
        assert (text, steps) == wanted(row, block_length, pick, shift)


def test_the_cache_is_that_of_one_pass_over_the_text():
    """Only what is final is stored: the passes that saw masks leave nothing behind."""
    decoder = make(Threshold(0.4), 4)
    state = specjax.run(decoder, params(), begin(decoder))
    for row, text in enumerate(texts(state)):
        stored = int(state.stored[row])
        assert stored >= len(text) - 4 and stored % 4 == 0
        delta = _forward(len(text), 4)(jnp.asarray(text))[1]
        blank = LM.init_cache(1, len(text), jnp.float32)
        fresh = LM.commit(blank, delta, None, jnp.zeros(1, jnp.int32))
        for got, want in zip(jax.tree.leaves(state.cache), jax.tree.leaves(fresh), strict=True):
            np.testing.assert_allclose(got[row][:, :stored], want[0][:, :stored], atol=5e-5)


@pytest.mark.parametrize("temperature", (0.0, 0.8))
def test_rows_do_not_see_each_other(temperature):
    decoder = make(Threshold(0.4), 4)
    together = texts(specjax.run(decoder, params(), begin(decoder, temperature=temperature)))
    apart = specjax.run(decoder, params(), begin(decoder, rows=(2, 0), temperature=temperature, slots=4))
    assert texts(apart)[:2] == [together[2], together[0]]


def test_a_failed_row_can_be_refilled():
    decoder = make(Threshold(0.4), 4)
    spoilt = jax.tree.map(lambda x: x * jnp.nan, params())
    state = specjax.run(decoder, spoilt, begin(decoder, (0, 1, 2)))
    assert (state.finish == Finish.ERROR).all()
    fresh = begin(decoder, (0, 1, 2))
    again = specjax.decoder.insert(
        decoder, params(), state, jnp.arange(3), fresh.tokens[:, :8], fresh.prompt_length, fresh.key, limit=fresh.limit,
        sampling=Sampling.make(3), width=None,
    )  # fmt: skip
    assert texts(specjax.run(decoder, params(), again)) == texts(
        specjax.run(decoder, params(), begin(decoder, (0, 1, 2)))
    )


def test_parts_of_a_block_are_finished_from_left_to_right():
    decoder = make(Fixed(), 8, sub_block=2)
    state = begin(decoder)
    step = jax.jit(decoder.step)
    while not bool(state.done.all()):
        state, _ = step(params(), state)
        for row, limit in enumerate(LIMITS[:3]):
            open_at = np.flatnonzero(np.asarray(state.tokens[row, :limit]) == MASK)
            later = open_at[open_at // 2 > open_at[:1] // 2] if len(open_at) else open_at
            assert (
                later.tolist() == list(range(limit))[limit - len(later) :]
            )  # all that lies behind the first open part


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny SDAR folder."""
    path = tmp_path_factory.mktemp("block") / "sdar"
    lm = LlamaLM(dataclasses.replace(LM.config, qk_norm=True, tie_word_embeddings=False))
    models.save(path, lm, lm.init(jax.random.key(0)), eos_ids=(3,), diffusion=Masked(MASK, shift=False, block=4))
    return path


def test_a_folder_says_how_it_is_decoded(folder):
    model = models.load(folder, dtype="float32")
    engine = Engine(model)
    assert model.masked == Masked(MASK, False, 4)
    assert (type(engine.decoder).__name__, engine.decoder.block_length) == ("BlockDiffusion", 4)
    together = list(engine.run([engine.request([1, 2, 5], max_new_tokens=9), engine.request([7], max_new_tokens=6)]))
    assert [r.new_tokens for r in engine.run([engine.request([1, 2, 5], max_new_tokens=9)], ignore_eos=True)] == [9]
    (alone,) = engine.run([engine.request([7], max_new_tokens=6)])
    assert alone.tokens == together[1].tokens


def test_fast_dllm_v2_is_read_and_written(tmp_path):
    lm = LlamaLM(dataclasses.replace(LM.config, qkv_bias=True))
    how = Masked(MASK, shift=True, block=8)
    models.save(tmp_path / "fast", lm, lm.init(jax.random.key(0)), diffusion=how)
    model = models.load(tmp_path / "fast", dtype="float32")
    assert model.masked == how and model.lm.config == lm.config
    with pytest.raises(ModelError, match="written as Fast_dLLM_Qwen, which has biases"):
        models.save(tmp_path / "x", LM, model.params, diffusion=how)


def test_sdar_1_7b_has_its_published_size():
    """The fields of the hub's config, and the count of parameters that they give."""
    config = {
        "architectures": ["SDARForCausalLM"], "model_type": "sdar", "attention_bias": False, "block_size": 4,
        "mask_token_id": 151669, "head_dim": 128, "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 6144,
        "max_position_embeddings": 32768, "num_attention_heads": 16, "num_hidden_layers": 28, "num_key_value_heads": 8,
        "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000000, "sliding_window": None,
        "tie_word_embeddings": False, "use_sliding_window": False, "vocab_size": 151936,
    }  # fmt: skip
    shape, how = models.masked.from_hf(config)
    assert how == Masked(151669, False, 4) and shape.qk_norm and not shape.qkv_bias
    layer = 2048 * 128 * (16 + 8 + 8 + 16) + 3 * 2048 * 6144 + 2 * 2048 + 2 * 128
    count = sum(int(np.prod(x.shape)) for x in jax.tree.leaves(LlamaLM(shape).abstract()))
    assert count == 28 * layer + 2048 + 2 * 151936 * 2048


@pytest.mark.parametrize(
    ("build", "said"),
    (
        (lambda: make(Fixed(), 4, cache=Prefix()), "exact cache of finished blocks"),
        (lambda: make(Fixed(), 4, cfg_scale=1.0), "exact cache of finished blocks"),
        (lambda: make(Wino(), 4), "reads whole canvases"),
        (lambda: make(FreeDave(eager=True), 4), "leave eager out"),
        (lambda: make(Fixed(), 4, sub_block=3), "must divide the block length 4"),
        (lambda: diffusion(LM, MASK, sub_block=8), "sub_block is for models"),
        (lambda: models.masked.from_hf({"model_type": "sdar", "block_size": 0}), "block_size of at least 1"),
    ),
)
def test_bad_settings(build, said):
    with pytest.raises(ValueError, match=said):
        build()


def test_a_suffix_is_refused(folder):
    engine = Engine(models.load(folder, dtype="float32"))
    with pytest.raises(ValueError, match="writes from left to right"):
        engine.request([1, 2], suffix=[3], max_new_tokens=4)
