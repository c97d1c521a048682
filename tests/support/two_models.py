"""A large and a small model of random weights over 24 tokens, each of which is a letter: `a` to `n`, and ten digits."""

import dataclasses

import jax
import numpy as np

import specjax
from specjax.models import LlamaLM, Model, llama_config

LETTERS = "abcdefghijklmn0123456789"
EOS = (7,)
STOPS = (4, 5, 6)
PROMPTS = [[3, 8, 13], [1, 2, 3, 4, 5], [20] * 18, [11, 12]]


class Letters:
    """A tokenizer of one letter a token."""

    chat_template = None

    def encode(self, text, add_special_tokens=True, **options):
        return [LETTERS.index(letter) for letter in text]

    def decode(self, ids, skip_special_tokens=False, **options):
        return "".join(LETTERS[token] for token in ids if not (skip_special_tokens and token in EOS))


def model(seed, name, layers=1, scale=2.0):
    """A model whose texts and steps end after a few tokens."""
    lm = LlamaLM(llama_config(24, 16, 24, layers, 2, 1, 8, max_position_embeddings=512))
    params = jax.tree.map(lambda x: scale * x, lm.init(jax.random.key(seed)))
    return Model(lm, params, Letters(), EOS, name, None, np.dtype("float32"))


LARGE, SMALL = model(0, "large"), model(5, "small", scale=2.5)


def written(own, before, most, stops=STOPS, **options):
    """What a model writes greedily after some tokens when it reads them all anew, up to a step's end; nothing is reused."""
    free = dataclasses.replace(own, eos_ids=tuple({*EOS, *stops}))
    return specjax.generate(free, [list(before)], drafter="none", max_new_tokens=most, progress=False, **options)[
        0
    ].tokens
