"""A draft model whose tokens are others than its target's: letters in another order, some pairs that both have, and some
that only one has."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
from support.random_weights import whole_numbers
from support.shapes import changed

from specjax.draft.vocabularies import SharedLM
from specjax.draft.vocabularies.pieces import piece_arrays
from specjax.draft.vocabularies.tables import Tables, Words, tables
from specjax.models import LlamaLM


def words(size: int) -> tuple[Words, Words]:
    """A target's vocabulary of that size, three of five tokens letters and the rest pairs, and a draft model's: every second
    pair, and others."""
    letters = [bytes([97 + i]) for i in range(-(-3 * size // 5))]
    pairs = [a + b for a, b in zip(letters, letters[1:] + letters[:1], strict=True)][: size - len(letters)]
    strange = [a + a for a in letters[:2]]
    return Words([*letters, *pairs]), Words([*strange, *reversed(letters), *pairs[::2]])


def toy_tables(size: int) -> Tables:
    """Of these two."""
    return tables(*words(size))


def other_tokens(lm: LlamaLM) -> SharedLM:
    """A draft model of a target's shape, for the target's vocabulary."""
    made = toy_tables(lm.vocab_size)
    own = LlamaLM(changed(lm.config, vocab_size=len(words(lm.vocab_size)[1].texts)))
    return SharedLM.of(own, made)


def other_params(lm: LlamaLM, draft: Any) -> dict[str, Any]:
    """Its parameters: those of a draft model of the target's tokens, the rows of its table in another order.

    Args:
      lm: the target.
      draft: the parameters of a model of its vocabulary with a tied table.
    """
    made, (target, own) = toy_tables(lm.vocab_size), words(lm.vocab_size)
    table = np.asarray(draft["embed"]["embedding"])
    rows = np.array(whole_numbers((len(own.texts), table.shape[1]), 3), table.dtype)
    rows[made.columns] = table[made.ids]
    arrays = made.arrays | piece_arrays(target.texts, own.texts)
    of_draft = {**draft, "embed": {**draft["embed"], "embedding": jnp.asarray(rows)}}
    return {"lm": of_draft, **{name: jnp.asarray(array) for name, array in arrays.items()}}


def with_other(drafter: Any, lm: LlamaLM) -> Any:
    """A drafter with a draft model of a target's shape and of other tokens."""
    return dataclasses.replace(drafter, lm=other_tokens(lm))
