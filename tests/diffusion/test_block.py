"""Block diffusion against plain passes over the whole text, and what its cache holds."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.conformance import but_slow
from support.shapes import changed
from support.small_diffusion import LIMITS, LM, MASK, PROMPTS, begin, params, texts

import specjax
from specjax import models
from specjax.decode import Diffusion
from specjax.diffusion import (
    Fixed,
    FreeDave,
    JointThreshold,
    Prefix,
    RunningConfidence,
    Sequential,
    Threshold,
    Wino,
    diffusion,
)
from specjax.diffusion.unmask.base import scheduled_in
from specjax.lm import Block, Wants
from specjax.models import LlamaLM, Masked, ModelError
from specjax.prompts import Prompts
from specjax.reference import diffusion as oracle
from specjax.sampling import SamplingArrays
from specjax.serve.engine import Engine
from specjax.state import Finish

ORACLES = {
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
        *((4, False, name) for name in ORACLES),
        *(pytest.param(7, True, name, marks=pytest.mark.slow) for name in ORACLES),
        *(pytest.param(*pair, "threshold", marks=pytest.mark.slow) for pair in ((4, True), (7, False))),
    ],
)
def test_equal_to_passes_over_everything(name, block_length, shift):
    policy, pick = ORACLES[name]
    decoder = make(policy, block_length, shift)
    state = specjax.run(decoder, params(), begin(decoder))
    for row, (text, steps) in enumerate(zip(texts(state), state.stats.steps.tolist(), strict=True)):
        assert (text, steps) == wanted(row, block_length, pick, shift)


def counted(table):
    """A picker of the surest, as many in each pass as a table says by the block's open positions."""
    chosen = lambda guesses, count: sorted(guesses, key=lambda at: -guesses[at][1][guesses[at][0]])[:count]
    return lambda guesses, step, entry: set(chosen(guesses, table[entry][step]))


# What dLLM's `get_num_transfer_tokens` gives for so many positions in three steps.
ROUNDED = {4: [1, 1, 2], 5: [2, 1, 2], 7: [2, 2, 3], 8: [3, 2, 3]}


@pytest.mark.parametrize("total", ROUNDED)
def test_a_schedule_that_is_rounded_pass_by_pass(total):
    counts = [int(scheduled_in(3, jnp.asarray([step]), jnp.asarray([total]), rounded=8)[0]) for step in range(4)]
    assert counts == [*ROUNDED[total], 0]


@pytest.mark.parametrize("shift", (False, True), ids=("same", "shifted"))
@pytest.mark.parametrize(
    "policy",
    but_slow([Threshold(0.4), Fixed(3), FreeDave(3)], Fixed(3), FreeDave(3)),
    ids=lambda policy: type(policy).__name__,
)
def test_blocks_that_are_counted_from_the_prompts_end(policy, shift):
    """As if the prompt were padded on the left to whole blocks and nobody saw the padding; the last block is the rest."""
    decoder = make(policy, 8, shift, align="prompt_end")
    state = specjax.run(decoder, params(), begin(decoder))
    pick = counted(ROUNDED) if policy.steps else oracle.threshold(0.4)
    for row, (text, steps) in enumerate(zip(texts(state), state.stats.steps.tolist(), strict=True)):
        canvas = [*PROMPTS[row], *[MASK] * (LIMITS[row] - len(PROMPTS[row]))]
        first, size = canvas.index(MASK), len(canvas)
        of = (np.arange(size) + -first % 8) // 8
        read = functools.partial(plain_pass(size), jnp.asarray(of[None, :] <= of[:, None]))
        want, passes = oracle.generate(
            lambda text, read=read: read(jnp.asarray(text)), canvas, MASK, 8, pick, shift=shift
        )
        assert text == want
        blocks = -(-(size - first) // 8)
        assert steps == passes + blocks - 1 if type(policy) is not FreeDave else steps <= passes + blocks - 1


@functools.cache
def plain_pass(size):
    """Logits of one pass over a text under a mask `[L, L]`."""

    @jax.jit
    def read(visible, tokens):
        block = Block(tokens[None], jnp.arange(size)[None], jnp.zeros(1, int), visible[None], causal=False)
        return LM(params()["target"], block, None, wants=Wants(logits=True)).logits[0]

    return read


@pytest.mark.slow
@pytest.mark.parametrize(
    "policy", (Threshold(0.4, published=True), JointThreshold(0.4, 0.0, 4, published=True)), ids=str
)
def test_a_last_block_is_filled_and_cut(policy):
    """The text is that of a canvas of whole blocks, up to its end; only tokens of the text are counted."""
    decoder, whole = make(policy, 8), make(dataclasses.replace(policy, published=False), 8)
    state = specjax.run(decoder, params(), begin(decoder, capacity=40))
    limits = [-(-limit // 8) * 8 for limit in LIMITS]
    filled = specjax.run(whole, params(), begin(whole, limits=limits))
    assert texts(state) == [text[:limit] for text, limit in zip(texts(filled), LIMITS, strict=True)]
    assert state.stats.steps.tolist() == filled.stats.steps.tolist()
    if not policy.edits:  # which counts what it writes anew as well
        assert (np.asarray(state.stats.accepted) * np.arange(9)).sum(axis=1).tolist() == [
            limit - len(prompt) + prompt.count(MASK) for limit, prompt in zip(LIMITS, PROMPTS, strict=True)
        ]
    masked = specjax.run(whole, params(), begin(whole))
    assert not policy.edits or texts(masked) != texts(state)  # tokens after the end say something else than masks
    with pytest.raises(ValueError, match="writes up to 7 beyond it"):
        begin(decoder, capacity=24)


@pytest.mark.slow
def test_an_end_of_text_behind_the_cut_ends_nothing():
    """The token that a filled block has after the text's end is made the end of texts."""
    decoder = make(Threshold(0.4, published=True), 8)
    whole = make(Threshold(0.4), 8)
    row = specjax.run(whole, params(), begin(whole, (0,), limits=(24,) * 4))
    text, behind = texts(row)[0][:19], texts(row)[0][19:]
    eos = next(token for token in behind if token not in text[3:])
    state = specjax.run(decoder, params(), begin(decoder, (0,), eos=eos))
    assert texts(state) == [text] and int(state.finish[0]) == Finish.LENGTH


@pytest.mark.slow
def test_one_sure_token_a_position_is_one_pass_a_block():
    """With top-k 1 the distribution after filters leaves one token, so that every prediction is certain, as in SDAR's
    sampler: a pass per block, and one more that stores it. By the model's own distribution they are as unsure as
      ever."""
    steps, found = [], []
    for warped in (True, False):
        decoder = make(Threshold(0.85), 4, warped=warped)
        state = begin(decoder)
        state = dataclasses.replace(state, sampling=SamplingArrays.make(4, temperature=1.0, top_k=1))
        state = specjax.run(decoder, params(), state)
        steps.append(state.stats.steps.tolist())
        found.append(texts(state))
    first = [prompt.index(MASK) if MASK in prompt else len(prompt) for prompt in PROMPTS]
    blocks = [-(-limit // 4) - at // 4 for limit, at in zip(LIMITS, first, strict=True)]
    assert steps[0] == [2 * count - 1 for count in blocks]
    assert all(slow > fast for slow, fast in zip(steps[1], steps[0], strict=True))
    greedy = make(Threshold(0.0), 4)
    assert found[0] == texts(specjax.run(greedy, params(), begin(greedy)))


@pytest.mark.slow
def test_a_threshold_that_certainty_equals_is_not_passed():
    """A threshold of 1 is one token per pass where all is certain, as in the samplers of SDAR and Fast-dLLM v2; not of
    A2D."""
    for align, passes in (("text", 19 - 3), ("prompt_end", 4)):
        decoder = make(Threshold(1.0), 4, warped=True, align=align)
        state = begin(decoder, (0,))
        state = dataclasses.replace(state, sampling=SamplingArrays.make(1, temperature=1.0, top_k=1))
        blocks = -(-19 // 4) if align == "text" else 4
        assert specjax.run(decoder, params(), state).stats.steps.tolist() == [passes + blocks - 1]


def test_greedy_rows_are_not_filtered():
    """Top-k 1 makes nothing certain in a greedy row, as in LLaDA 2's sampler."""
    decoder = make(Threshold(0.4), 4, warped=True)
    state = begin(decoder)
    filtered = dataclasses.replace(state, sampling=SamplingArrays.make(4, top_k=1))
    found = specjax.run(decoder, params(), filtered).stats.steps.tolist()
    assert found == specjax.run(decoder, params(), begin(decoder)).stats.steps.tolist()


@pytest.mark.slow
def test_a_seed_is_the_likeliest_token():
    """Of a row that draws at a high temperature, the first token of every later block is what a plain pass finds likeliest."""
    decoder = make(Threshold(0.0), 4, True)
    (text,) = texts(specjax.run(decoder, params(), begin(decoder, (2,), temperature=5.0, limits=(32,) * 4)))
    seeds = [int(np.argmax(_forward(low, 4)(jnp.asarray(text[:low]))[0][-1, :MASK])) for low in range(8, 32, 4)]
    assert seeds == text[8::4]


def test_sequential_goes_from_left_to_right():
    decoder = make(Sequential(3), 8)
    state, step = begin(decoder), jax.jit(decoder.step)
    counts = []
    while not bool(state.done.all()):
        before = np.asarray(state.tokens[0])
        state, _ = step(params(), state)
        written = np.flatnonzero(np.asarray(state.tokens[0]) != before)
        counts += [len(written)] if len(written) else []
        assert len(written) == 0 or written.tolist() == list(range(written[0], written[0] + len(written)))
    assert counts == [
        3,
        2,
        3,
        3,
        2,
        3,
    ]  # 3, 3, 2 of a whole block, of which the prompt has three tokens and the limit leaves three


def test_the_cache_is_that_of_one_pass_over_the_text():
    """Only what is final is stored: the passes that saw masks leave nothing after."""
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


@pytest.mark.slow
def test_a_failed_row_can_be_refilled():
    decoder = make(Threshold(0.4), 4)
    spoilt = jax.tree.map(lambda x: x * jnp.nan, params())
    state = specjax.run(decoder, spoilt, begin(decoder, (0, 1, 2)))
    assert (state.finish == Finish.ERROR).all()
    fresh = begin(decoder, (0, 1, 2))
    again = Prompts(fresh.tokens[:, :8], fresh.prompt_length, fresh.key, fresh.limit, SamplingArrays.make(3))
    again = specjax.decoder.insert(decoder, params(), state, jnp.arange(3), again)
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
            assert later.tolist() == list(range(limit))[limit - len(later) :]  # all that lies after the first open part


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny SDAR folder."""
    path = tmp_path_factory.mktemp("block") / "sdar"
    lm = LlamaLM(changed(LM.config, qk_norm=True, tie_word_embeddings=False))
    models.save(path, lm, lm.init(jax.random.key(0)), eos_ids=(3,), diffusion=Masked(MASK, shift=False, block=4))
    return path


@pytest.mark.slow
def test_a_folder_says_how_it_is_decoded(folder):
    model = models.load(folder, dtype="float32")
    engine = Engine(model)
    assert model.masked == Masked(MASK, False, 4)
    assert engine.decoder.policy == Threshold(0.85) and engine.decoder.warped  # SDAR's own threshold and distribution
    from_prompt = dataclasses.replace(model, masked=Masked(MASK, False, 4, align="prompt_end"))
    for other in (Engine(from_prompt), Engine(model, decode=Diffusion(unmask="threshold", align="prompt_end"))):
        assert (other.decoder.align, other.decoder.policy) == ("prompt_end", Threshold(0.9))
    assert (type(engine.decoder).__name__, engine.decoder.block_length) == ("BlockDiffusion", 4)
    together = list(engine.run([engine.request([1, 2, 5], max_new_tokens=9), engine.request([7], max_new_tokens=6)]))
    assert [r.new_tokens for r in engine.run([engine.request([1, 2, 5], max_new_tokens=9, ignore_eos=True)])] == [9]
    (alone,) = engine.run([engine.request([7], max_new_tokens=6)])
    assert alone.tokens == together[1].tokens


def test_fast_dllm_v2_is_read_and_written(tmp_path):
    lm = LlamaLM(changed(LM.config, qkv_bias=True))
    how = Masked(MASK, shift=True, block=8)
    models.save(tmp_path / "fast", lm, lm.init(jax.random.key(0)), diffusion=how)
    model = models.load(tmp_path / "fast", dtype="float32")
    assert model.masked == how and model.lm.config == lm.config
    engine = Engine(model)
    assert engine.decoder.policy == Threshold(0.9) and engine.decoder.warped
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
    assert how == Masked(151669, False, 4) and shape.near.qk_norm and not shape.near.qkv_bias
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
        (lambda: diffusion(LM, MASK, align="prompt_end"), "align is for models"),
        (lambda: make(Fixed(), 4, align="middle"), "align must be text or prompt_end, got 'middle'"),
        (lambda: Sequential(-1), "steps >= 0"),
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
