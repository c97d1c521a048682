"""A window of masks that slides over the text, beside whole passes over the reordered row, and what WeDLM's program wrote."""

import functools
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import diffusion_traces as traces
from support.diffusion_traces import needs_traces
from support.small_diffusion import LIMITS, LM, MASK, PROMPTS, L, V, begin, params, texts

import specjax
from specjax import models
from specjax.decode import Diffusion
from specjax.diffusion import Credit, JointThreshold, LongestPrefix, Prefix, Threshold, diffusion
from specjax.diffusion.unmask import EntropyBound
from specjax.lm import Block, Wants
from specjax.models import ModelError
from specjax.serve.engine import Engine
from specjax.state import Finish

W = 6
ROWS = (0, 1, 2)


@jax.jit
def forward(tokens, positions, size, window):
    """Logits `[L, V]` of a causal pass over the first `size` tokens in the given order, of which the last `window` see
    each other."""
    own = jnp.arange(L)
    seen = (own[None] <= own[:, None]) | ((own >= size - window)[None] & (own >= size - window)[:, None])
    visible = ((seen & (own[None] < size)) | (own[None] == own[:, None]))[None]
    block = Block(tokens[None], positions[None], jnp.zeros(1, int), visible, causal=False)
    return LM(params()["target"], block, None, wants=Wants(logits=True)).logits[0]


def loop(row, bound, penalty):
    """A row's text and passes."""
    text, passes = [*PROMPTS[row], *[MASK] * (LIMITS[row] - len(PROMPTS[row]))], 0
    while MASK in text:
        first = text.index(MASK)
        masks = [i for i in range(first, min(first + W, len(text))) if text[i] == MASK]
        order = [*(i for i in range(min(first + W, len(text))) if text[i] != MASK), *masks]
        padded = [*order, *[0] * (L - len(order))]
        logits = np.array(
            forward(jnp.asarray([text[i] for i in padded]), jnp.asarray(padded), len(order), 0), np.float64
        )
        logits = logits[len(order) - len(masks) : len(order)]
        logits[:, MASK] = -np.inf
        dist = np.exp(logits - logits.max(axis=1, keepdims=True))
        dist /= dist.sum(axis=1, keepdims=True)
        entropy = -(dist * np.log(np.where(dist > 0, dist, 1))).sum(axis=1) + penalty * (np.asarray(masks) - first)
        chosen = np.flatnonzero(entropy <= bound) if (entropy <= bound).any() else [int(entropy.argmin())]
        for at in chosen:
            text[masks[at]] = int(dist[at].argmax())
        passes += 1
    return text, passes


def loop_of_prefixes(row, threshold):
    """The same of SDLM's program, which reads whole windows beyond a text's end."""
    text, passes = list(PROMPTS[row]), 0
    while len(text) < LIMITS[row]:
        tokens = [*text, *[MASK] * (W - 1)]
        padded = [*tokens, *[0] * (L - len(tokens))]
        logits = np.array(forward(jnp.asarray(padded), jnp.arange(L), len(tokens), W), np.float64)[len(text) - 1 :][:W]
        logits[:, MASK] = -np.inf
        dist = np.exp(logits - logits.max(axis=1, keepdims=True))
        sure = (dist / dist.sum(axis=1, keepdims=True)).max(axis=1) > threshold
        count = max(int(np.argmin([*sure, False])), 1)
        text, passes = [*text, *logits.argmax(axis=1)[:count].tolist()], passes + 1
    return text[: LIMITS[row]], passes


def make(policy, **fields):
    return diffusion(LM, MASK, policy, block_length=W, reordered=True, **fields)


@functools.cache
def written(policy, heats=0.0, rows=ROWS, eos=None):
    decoder = make(policy)
    return specjax.run(decoder, params(), begin(decoder, rows, heats, eos, slots=len(ROWS)))


@pytest.mark.parametrize(("bound", "penalty"), [(1.2, 0.05), pytest.param(0.7, 0.3, marks=pytest.mark.slow)])
def test_equal_to_whole_passes_over_the_reordered_row(bound, penalty):
    state = written(EntropyBound(bound, penalty))
    found = list(zip(texts(state), state.stats.steps.tolist(), strict=True))
    assert found == [loop(row, bound, penalty) for row in ROWS]
    assert max(state.stats.steps) < LIMITS[1] - len(PROMPTS[1])  # several tokens in one pass


@pytest.mark.parametrize("threshold", [0.3, pytest.param(0.6, marks=pytest.mark.slow)])
def test_equal_to_passes_over_text_and_a_window_that_sees_itself(threshold):
    decoder = make(LongestPrefix(threshold), shift=True)
    state = specjax.run(decoder, params(), begin(decoder, ROWS))
    found = list(zip(texts(state), state.stats.steps.tolist(), strict=True))
    assert found == [loop_of_prefixes(row, threshold) for row in ROWS]
    assert max(state.stats.steps) < LIMITS[1] - len(PROMPTS[1])


def test_a_row_alone_is_a_row_in_a_batch():
    policy = EntropyBound(1.2, 0.05)
    whole, alone = written(policy, 0.9), written(policy, 0.9, (2, 0))
    assert texts(alone)[:2] == [texts(whole)[2], texts(whole)[0]] and texts(whole) != texts(written(policy))


def test_an_end_of_text_cuts_the_same_text():
    policy = EntropyBound(1.2, 0.05)
    whole = texts(written(policy))[1]
    eos = whole[len(PROMPTS[1]) + 3]
    cut = written(policy, eos=eos)
    assert texts(cut)[1] == whole[: whole.index(eos, len(PROMPTS[1])) + 1] and cut.finish[1] == Finish.EOS


@pytest.mark.parametrize(
    ("make_one", "why"),
    [
        (lambda: make(JointThreshold()), "JointThreshold decides over more than one pass or one block"),
        (lambda: make(Credit()), "Credit decides over more than one pass or one block"),
        (lambda: make(Threshold(steps=3)), "Threshold decides over more .* and no steps"),
        (lambda: make(Threshold(), cache=Prefix()), "keeps an exact cache: choose the cache none"),
        (lambda: LongestPrefix(rule="margin"), "longest_prefix needs threshold >= 0 and rule"),
        (lambda: make(Threshold(), sub_block=2), "sub_block is for models whose blocks do not see later ones"),
        (lambda: EntropyBound(penalty=-1.0), "entropy needs bound and penalty of at least 0 nats"),
    ],
    ids=["edits", "memory", "steps", "cache", "rule", "parts", "penalty"],
)
def test_what_does_not_go_together(make_one, why):
    with pytest.raises(ValueError, match=why):
        make_one()


SHAPE = {
    "architectures": ["WeDLMForCausalLM"], "model_type": "wedlm", "vocab_size": V, "hidden_size": 16, "intermediate_size": 16,
    "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "mask_token_id": MASK,
    "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "rope_theta": 1e4, "hidden_act": "silu", "tie_word_embeddings": False,
}  # fmt: skip


@pytest.mark.parametrize(("normed", "bias"), [(True, False), (False, True)], ids=["qwen3", "qwen2"])
def test_its_folders_are_read_and_written(normed, bias):
    config, masked = models.masked.from_hf(SHAPE | {"qk_norm": normed, "attention_bias": bias})
    assert masked == models.Masked(MASK, False, 16, reordered=True)
    again = models.masked.to_hf(config, masked)
    assert {name: again[name] for name in ("qk_norm", "attention_bias")} == {"qk_norm": normed, "attention_bias": bias}
    assert models.masked.from_hf(again) == (config, masked)
    plain = models.masked.from_hf(
        SHAPE | {"qk_norm": normed, "attention_bias": bias, "mask_token_id": None, "vocab_size": 151936}
    )
    assert plain[1].mask_id == 151665


def test_folders_of_sdlm_are_read_and_written():
    plain = SHAPE | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
    config, masked = models.masked.from_hf(plain | {"text_mask_token_id": 7, "block_size": 8})
    assert masked == models.Masked(7, True, 8, reordered=True) and masked.usual_sub_block == 0
    assert models.masked.from_hf(models.masked.to_hf(config, masked)) == (config, masked)
    assert models.masked.from_hf(plain | {"text_mask_token_id": 7})[1].block == 4
    with pytest.raises(ModelError, match="causal_attn"):
        models.masked.from_hf(plain | {"text_mask_token_id": 7, "causal_attn": True})


def test_another_models_layers_are_not_written_as_it():
    config, _ = models.masked.from_hf(SHAPE | {"qk_norm": True, "attention_bias": False})
    other, _ = models.masked.from_hf(SHAPE | {"architectures": ["A2DLlamaLMHeadModel"], "model_type": "a2d-llama"})
    with pytest.raises(ModelError, match="written as WeDLM, which has layers of Qwen2 or Qwen3"):
        models.masked.to_hf(other, models.Masked(MASK, False, 16, reordered=True))
    assert config.layers


OF_WEDLM = {"architectures": ["WeDLMForCausalLM"], "model_type": "wedlm", "qk_norm": True}
OF_SDLM = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "text_mask_token_id": 63}


@needs_traces
@pytest.mark.slow
@pytest.mark.parametrize(
    ("setting", "named"),
    [("wedlm-1", OF_WEDLM), ("wedlm-3", OF_WEDLM), ("sdlm-1", OF_SDLM), ("sdlm-3", OF_SDLM)],
    ids=["wedlm-1", "wedlm-3", "sdlm-1", "sdlm-3"],
)
def test_equal_to_what_the_published_program_wrote(tmp_path, setting, named):
    lines = traces.lines_of(setting)
    for file in (traces.FOLDER / lines[0]["model"]).iterdir():
        shutil.copy(file, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | named))
    model, how = models.load(tmp_path, dtype="float32"), lines[0]["settings"]
    if named is OF_WEDLM:
        line = f"entropy:bound={how['wedlm_entropy_threshold']},penalty={how['wedlm_pos_penalty_factor']}"
        width = how["wedlm_window_size"]
    else:
        rule = "entropy" if how["entropy_conf"] else "low_confidence"
        line, width = f"longest_prefix:threshold={how['threshold']},rule={rule}", how["n_future_tokens"]
    engine = Engine(model, Diffusion(line, block_length=width))
    requests = [engine.request(one["prompt"], max_new_tokens=one["gen_length"], ignore_eos=True) for one in lines]
    state, seen = engine.start(requests), []
    step = jax.jit(engine.decoder.step)
    while not state.done.all():
        seen.append(np.asarray(state.tokens))
        state, _ = step(engine.params, state)
    seen.append(np.asarray(state.tokens))
    for row, one in enumerate(lines):
        assert traces.differences(one, np.stack(seen), state, row) == []
