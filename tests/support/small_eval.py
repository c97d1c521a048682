"""A small model that answers questions, with the shipped tokenizer."""

import json
import shutil

import jax

from specjax import models
from specjax.models import LlamaLM, llama_config

PROMPTS = ("def add(a, b):", "import os\nfor name in", "class Stack:\n    def __init__(self", "while True")
FEW = 8


def save(folder, diffusion=None):
    """A model that writes anything, with the shipped tokenizer."""
    shipped = models.shipped()["tiny"]
    vocab = json.loads((shipped / "config.json").read_text())["vocab_size"]
    lm = LlamaLM(llama_config(vocab, 16, 16, 1, 2, 1, 8, max_position_embeddings=512, tie_word_embeddings=True))
    params = jax.tree.map(lambda leaf: 4 * leaf, lm.init(jax.random.key(0)))
    models.save(folder, lm, params, eos_ids=(0,), diffusion=diffusion)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(shipped / name, folder)
    return str(folder)
