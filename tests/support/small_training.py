"""Small models and texts for the tests of training."""

import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from support.shapes import changed

from specjax import cli, models
from specjax.models import LlamaLM, Model, llama_config
from specjax.models.block_ffn import BlockFFNConfig
from specjax.models.layer import LayerConfig
from specjax.train.data import Rows

TARGET = LlamaLM(llama_config(32, 32, 48, 2, 4, 2, 8, max_position_embeddings=64))
DRAFT = LlamaLM(changed(TARGET.config, hidden_size=16, intermediate_size=24, num_hidden_layers=1))

BLOCKS = LlamaLM(llama_config(32, 16, 24, 2, 2, 2, 8, 64).every(LayerConfig, feed=BlockFFNConfig(6, 4)))
"""A model whose layers have experts in blocks."""


@functools.cache
def target_params():
    """Random weights, sharpened so that the text has structure."""
    return jax.tree.map(lambda leaf: 3 * leaf if leaf.ndim == 2 else leaf, jax.jit(TARGET.init)(jax.random.key(1)))


@functools.cache
def draft_params():
    return jax.jit(DRAFT.init)(jax.random.key(2))


def model(lm, params, **fields) -> Model:
    return Model(lm, params, None, (), "tiny", Path("tiny"), jnp.dtype("float32"), **fields)


@functools.cache
def rows(count: int = 24, length: int = 16, seed: int = 0) -> Rows:
    """Ragged texts of random tokens: some with a prompt, some padded."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(1, 32, (count, length)).astype(np.int32)
    slots = np.arange(length)[None]
    start = rng.integers(0, length // 3, (count, 1))
    end = rng.integers(length // 2, length + 1, (count, 1))
    return Rows(np.where(slots < end, tokens, 0), (slots >= start) & (slots < end))


def training(folder):
    """`specjax train` of a draft for the target, both of which it writes with texts; a function of the first words."""
    for name, lm, made in (("target", TARGET, target_params()), ("draft", DRAFT, draft_params())):
        models.save(folder / name, lm, made)
    lines = [{"tokens": row.tolist()} for row in np.random.default_rng(0).integers(1, 32, (8, 12))]
    (folder / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    words = ["--target", folder / "target", "--data", folder / "data.jsonl", "--steps", 2, "--batch-size", 4]
    words += ["--length", 12, "--output", folder / "out"]
    return lambda *more: cli.main([str(word) for word in ("train", *more, *words)])
