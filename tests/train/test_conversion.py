"""Diffusion models made of autoregressive ones: the loss beside passes block by block, the mask token, and the command."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
import transformers
from support.shapes import changed

from specjax import cli, models
from specjax.decode import Diffusion
from specjax.lm import Block, Wants
from specjax.models import LlamaLM, Masked, Model, llama_config
from specjax.objectives.base import Batch
from specjax.objectives.masked import Conversion, surprise
from specjax.serve.engine import Engine
from specjax.train.conversion import a2d_task, with_mask
from specjax.train.options import TrainOptions

V, T, MASK, BLOCK = 9, 12, 8, 4
LM = LlamaLM(llama_config(V, 16, 24, 2, 2, 2, 8, max_position_embeddings=64))
ANSWER = np.asarray([[0] * 2 + [1] * 10, [0] * 5 + [1] * 5 + [0] * 2], bool)
TOKENS = np.random.default_rng(0).integers(0, MASK, (2, T))


@pytest.fixture(scope="module")
def params():
    return jax.jit(LM.init)(jax.random.key(1))


def block_by_block(params, tokens, noisy, begin, stop, before):
    """Logits `[W, V]` of one block, read after the clean text before it: what decoding reads. Blocks count from `before`
    positions ahead of the text."""
    canvas = [*tokens[:begin], *noisy[begin:stop], *[MASK] * (T - stop)]
    return canvas_logits(params, jnp.asarray(canvas), before, stop)[begin:stop]


@jax.jit
def canvas_logits(params, canvas, before, stop):
    at = jnp.arange(T)
    of = (at + before) // BLOCK
    visible = ((of[None] <= of[:, None]) & (at < stop)[None])[None]
    block = Block(canvas[None], at[None], jnp.zeros(1, int), visible, causal=False)
    return LM(params, block, None, wants=Wants(logits=True)).logits[0].at[:, MASK].set(-jnp.inf)


@pytest.mark.parametrize("align", ["prompt_end", "text"])
def test_the_loss_of_blocks_is_that_of_passes_over_one_block_after_clean_text(params, align):
    key = jax.random.key(3)
    objective = Conversion(LM, MASK, False, block=BLOCK, align=align)
    loss, metrics = jax.jit(lambda params: objective.loss(params, None, Batch(TOKENS, ANSWER), key))(params)
    total = 0.0
    for row, own in enumerate(jax.random.split(key, 2)):
        drawn = np.asarray(jax.random.uniform(own, (T + 1,)))
        rate = 1e-3 + (1 - 1e-3) * drawn[0]
        masked = ANSWER[row] & (drawn[1:] < rate)
        noisy = np.where(masked, MASK, TOKENS[row])
        end = int(np.flatnonzero(ANSWER[row])[-1]) + 1
        before = -int(np.argmax(ANSWER[row])) % BLOCK if align == "prompt_end" else 0
        for first in range(-before, end, BLOCK):
            begin, stop = max(first, 0), min(first + BLOCK, end)
            logits = block_by_block(params, TOKENS[row], noisy, begin, stop, before)
            each = surprise(logits[None], jnp.asarray(TOKENS[row, begin:stop])[None])[0]
            total += float(jnp.sum(jnp.where(masked[begin:stop], each, 0.0))) / rate
    assert total > 0
    np.testing.assert_allclose(loss, total / ANSWER.sum(), rtol=1e-5)
    assert int(metrics["weight"]) == ANSWER.sum()


def words(count, mask=None):
    """A tokenizer of so many words."""
    vocabulary = {f"w{i}": i for i in range(count)}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="w0"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="w0", mask_token=mask)


@pytest.mark.parametrize("tied", [True, False])
def test_a_model_without_a_mask_gets_one(tied):
    lm = LlamaLM(changed(LM.config, tie_word_embeddings=tied))
    params = jax.jit(lm.init)(jax.random.key(2))
    model = Model(lm, params, words(V))
    made, mask_id = with_mask(model)
    assert mask_id == V and made.lm.vocab_size == V + 1 and model.tokenizer.mask_token_id is None
    block = Block(jnp.asarray([[1, 2, 3]]), jnp.arange(3)[None], jnp.zeros(1, int))
    before, after = (
        np.asarray(one.lm(one.params, block, None, wants=Wants(logits=True)).logits) for one in (model, made)
    )
    np.testing.assert_allclose(after[..., :V], before, atol=1e-6)
    np.testing.assert_allclose(after[..., V], before.mean(axis=-1), atol=1e-5)
    spare = Model(lm, params, words(V - 2))
    assert with_mask(spare)[1] == V - 2 and with_mask(spare)[0].params is params
    assert with_mask(Model(lm, params, words(V, "w3")))[1] == 3


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """An autoregressive model, two that are not to be converted, and data that repeats itself."""
    folder = tmp_path_factory.mktemp("files")
    lm = LlamaLM(llama_config(V - 1, 16, 24, 1, 2, 2, 8, max_position_embeddings=64))
    params = jax.jit(lm.init)(jax.random.key(0))
    models.save(folder / "plain", lm, params, tokenizer=words(V - 1))
    models.save(folder / "bare", lm, params)
    models.save(folder / "masked", lm, params, tokenizer=words(V - 1), diffusion=Masked(7, False))
    lines = [{"prompt": [1, 2], "tokens": [3, 4, 5, 6, 3, 4, 5, 6]}] * 16
    (folder / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def train(files, out, name, target, *more):
    words = ["train", name, "--target", files / target, "--data", files / "data.jsonl", "--output", out]
    return cli.main([str(word) for word in [*words, "--length", 10, *more]])


@pytest.mark.slow
@pytest.mark.parametrize("block", [0, 4])
def test_training_makes_a_diffusion_model(files, tmp_path, capsys, block):
    options = ["--steps", 250, "--batch-size", 4, "--learning-rate", 0.02, "--checkpoint-every", 250]
    assert train(files, tmp_path / "out", f"a2d:block={block}", "plain", *options) == 0
    engine = Engine(str(tmp_path / "out"), decode=Diffusion(unmask="fixed", block_length=4))
    assert engine.model.masked == Masked(8, False, block, align="prompt_end" if block else "text")
    (record,) = engine.run([engine.request([1, 2], max_new_tokens=8)])
    assert record.tokens == [3, 4, 5, 6, 3, 4, 5, 6]
    capsys.readouterr()


BIASED = changed(LM.config, qkv_bias=True)
KINDS = {
    "llama": (LM.config, "a2d", Masked(7, False)),
    "llama-blocks": (LM.config, "a2d:block=4", Masked(7, False, 4, align="prompt_end")),
    "llama-text": (LM.config, "a2d:block=4,align=text", Masked(7, False, 4)),
    "qwen2": (BIASED, "a2d", Masked(7, False)),
    "qwen2-shift": (BIASED, "a2d:shift=true", Masked(7, True)),
    "qwen2-shifted-blocks": (BIASED, "a2d:block=8,shift=true", Masked(7, True, 8)),
    "qwen3": (changed(LM.config, qk_norm=True), "a2d:block=4", Masked(7, False, 4, align="prompt_end")),
    "qwen3-text": (changed(LM.config, qk_norm=True), "a2d:block=4,align=text", Masked(7, False, 4)),
}
"""A model's layers, a line, and how what it makes is decoded."""


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("tied", [False, True])
def test_what_was_made_is_read_back(tmp_path, name, tied):
    config, line, masked = KINDS[name]
    lm = LlamaLM(changed(config, tie_word_embeddings=tied))
    params = jax.jit(lm.init)(jax.random.key(0))
    target = Model(lm, params, words(V, "w7"), (2,), "plain", generation={"top_k": 7})
    task = a2d_task(target, TrainOptions(drafter=line, output="", length=16), lambda: None)
    task.save(tmp_path, jax.tree.map(np.asarray, task.params))
    model = models.load(tmp_path, dtype="float32")
    assert model.masked == masked and model.eos_ids == (2,) and model.generation["top_k"] == 7
    jax.tree.map(np.testing.assert_array_equal, model.params, params)


@pytest.mark.parametrize(
    ("name", "target", "more", "said"),
    [
        ("a2d", "masked", [], "a2d converts autoregressive models, and masked is a diffusion model"),
        ("a2d", "bare", [], "a2d needs a token for masks, and bare has no tokenizer"),
        ("a2d:block=-1", "plain", [], "a2d needs block >= 0"),
        ("a2d:shift=true", "plain", [], "a model with shifted logits is written as Dream"),
        ("a2d:block=4,shift=true,align=prompt_end", "plain", [], "blocks of a model with shifted logits count from"),
        ("a2d", "plain", ["--draft", "tiny-draft"], "--draft is not for a2d"),
        ("a2d", "plain", ["--weights", "int8"], "a2d trains plain's own weights, and they are int8"),
    ],
    ids=["masked", "bare", "block", "shift", "align", "draft", "weights"],
)
def test_what_is_not_converted(files, tmp_path, capsys, name, target, more, said):
    assert train(files, tmp_path / "out", name, target, "--steps", 1, *more) == 2
    assert said in capsys.readouterr().err
