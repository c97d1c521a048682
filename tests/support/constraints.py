"""What the tests of constraints share: the shipped vocabulary, texts that a table allows, and the language of an automaton."""

import functools
from pathlib import Path

import numpy as np

import specjax
from specjax.constrain import Vocabulary
from specjax.models.plain_tokenizer import plain

SHIPPED = Path(specjax.__file__).parent / "models/pretrained/tiny"


@functools.cache
def vocabulary():
    tokenizer = plain(SHIPPED, lambda: None)
    return Vocabulary(tokenizer, len(tokenizer.get_vocab()), (tokenizer.get_vocab()["<|end|>"],))


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
