"""A target and a draft model whose tokenizers cut the same text in other pieces."""

import functools

import jax
import numpy as np
import pytest
from support.conformance import CONFIG
from support.shapes import changed

from specjax import models
from specjax.models.llama import LlamaLM

LETTERS = "abcdefghijklmnopqrstuvwxyz"
PAIRS = {"target": ("ab", "cd", "xy", "Ġt", "the"), "draft": ("ef", "ab", "Ġt", "hi")}


def tokenizer(which, special="<end>"):
    """A byte-level tokenizer that merges letters into some pairs; the draft model's letters stand in another order."""
    transformers, tokenizers = pytest.importorskip("transformers"), pytest.importorskip("tokenizers")
    letters = [*LETTERS, "Ġ", "Ã", "©"]
    letters = letters if which == "target" else letters[::-1]
    words = [special, *letters, *PAIRS[which]] if which == "target" else [*letters, *PAIRS[which], special]
    merges = [(pair[:1], pair[1:]) for pair in PAIRS[which] if len(pair) == 2]
    core = tokenizers.Tokenizer(tokenizers.models.BPE({word: i for i, word in enumerate(words)}, merges))
    core.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = tokenizers.decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=core, eos_token=special)


@functools.cache
def pair():
    """A target and a draft model with these tokenizers."""
    made = []
    for which, layers, seed in (("target", 2, 3), ("draft", 1, 4)):
        own = tokenizer(which)
        lm = LlamaLM(changed(CONFIG, num_hidden_layers=layers, vocab_size=len(own.get_vocab())))
        weights = jax.tree.map(lambda x: x * 2 if x.ndim > 1 else x, jax.jit(lm.init)(jax.random.key(seed)))
        made.append(models.Model(lm, weights, own, (own.eos_token_id,), which, None, np.dtype("float32")))
    return made
