"""What the tests of constraints share: the shipped vocabulary and a small model of it, texts that a table allows, and the
language of an automaton."""

import functools
from pathlib import Path

import jax
import numpy as np

import specjax
from specjax.constrain import Vocabulary
from specjax.models import LlamaLM, Model, llama_config
from specjax.models.plain_tokenizer import plain

CONFIG = llama_config(
    vocab_size=1536,
    hidden_size=16,
    intermediate_size=16,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
    max_position_embeddings=128,
    tie_word_embeddings=True,
)
SHIPPED = Path(specjax.__file__).parent / "models/pretrained/tiny"


@functools.cache
def vocabulary():
    tokenizer = plain(SHIPPED, lambda: None)
    return Vocabulary(tokenizer, len(tokenizer.get_vocab()), (tokenizer.get_vocab()["<|end|>"],))


@functools.cache
def model():
    lm = LlamaLM(CONFIG)
    params = jax.tree.map(lambda x: x * 3, lm.init(jax.random.key(0)))
    return Model(lm, params, vocabulary().tokenizer, vocabulary().eos, "small", None, np.dtype("float32"))


def random_text(table, rng, room):
    """A text of tokens that the table allows, drawn by class so that letters do not crowd the others out."""
    own, state, written = vocabulary(), 0, b""
    for left in range(room, 0, -1):
        allowed = np.flatnonzero(table.allowed(state, left))
        kind = rng.choice(np.unique(table.classes[allowed]))
        token = int(rng.choice(allowed[table.classes[allowed] == kind]))
        if token in own.eos:
            break
        state, written = table.next(state, token), written + own.tokens[token]
    assert table.distance[state] == 0
    return written.decode()


def accepts(automaton, text):
    """Whether a text is in an automaton's language."""
    state = 0
    for byte in text.encode():
        state = automaton.following[state, byte] if state >= 0 else state
    return bool(state >= 0 and automaton.accepts[state])
