"""The method: tokens are written with guessed neighbours, and one retrieval checks several of them.

In the shape descriptions `B` denotes rows, `V` the vocabulary, `E` the model width, `K` neighbours.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from specjax.lm import encodes
from specjax.models.text import new_text
from specjax.search.knn_lm.rows import Lane, Rows
from specjax.search.knn_lm.store import Entries
from specjax.search.ralm.retrievers import Retriever
from specjax.search.stepwise import Asked, Written


@dataclasses.dataclass(frozen=True, repr=False)
class KnnWritten(Written):
    """A text that was written with neighbours.

    Attributes:
      retrievals: how many calls of the retriever this prompt had queries in.
      guesses: tokens that were guessed and then checked.
      matches: how many of these were right.
    """

    retrievals: int = 0
    guesses: int = 0
    matches: int = 0


@dataclasses.dataclass(frozen=True)
class KnnLm:
    """A kNN-LM (arXiv:1911.00172) whose neighbours are guessed as in RaLMSpec (arXiv:2401.14021).

    The next token's distribution is `weight` times that of the neighbours, `softmax(-d^2 / heat)` summed by their tokens,
    and the rest times the model's. The query is the hidden state before the head. With `ahead` above 1 a row writes on
    with the best entries that it knows, and one retrieval checks all these tokens. The text goes back to the first token
    that is another one; neighbours may differ. So neither `ahead` nor `following` changes a text.

    Attributes:
      entries: from `build_entries`, with the same model.
      retriever: from a list of vectors `[E]` and k to lists of entries, the nearest first. None: `entries.nearest`, which is
        exact.
      neighbours: K.
      weight: of the neighbours, from 0 to 1.
      heat: the temperature of their distances.
      ahead: tokens that one retrieval checks; 1 is the plain loop.
      following: how many entries after each neighbour a row remembers too.

    Raises:
      ValueError: for numbers out of range, or a retriever that is no function.
    """

    entries: Entries
    retriever: Retriever | None = None
    neighbours: int = 32
    weight: float = 0.25
    heat: float = 1.0
    ahead: int = 4
    following: int = 10

    def __post_init__(self):
        if not isinstance(self.entries, Entries):
            raise ValueError(
                f"entries must be Entries, got {type(self.entries).__name__}: make them with build_entries"
            )
        if self.retriever is not None and not callable(self.retriever):
            raise ValueError(f"retriever must be a function from queries and k to ids, got {self.retriever!r:.60}")
        for name, least in (("neighbours", 1), ("ahead", 1), ("following", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{name} must be a whole number from {least} on, got {value!r}")
        if not 0 <= self.weight <= 1:
            raise ValueError(f"weight must be from 0 to 1, got {self.weight!r}")
        if not 0 < self.heat < math.inf:
            raise ValueError(f"heat must be above 0, got {self.heat!r}")

    def __call__(
        self,
        model: Any,
        prompts: Sequence[Any],
        *,
        max_new_tokens: int = 128,
        temperature: float = 0.0,
        seed: int = 0,
        batch_size: int = 8,
    ) -> list[KnnWritten]:
        """A text for every prompt, in order.

        Args:
          model: from `specjax.load`; the entries must be its own.
          prompts: a list of texts, lists of token ids or chats.
          max_new_tokens: the most new tokens for each.
          temperature: of the mixed distribution; 0 is greedy.
          seed: determines the noise, together with a prompt.
          batch_size: prompts side by side; one retrieval serves all of them.

        Raises:
          ValueError: see `Asked.of`; for entries of another width or vocabulary, a model with running states or an encoder,
            or a retriever's answer that is no list of ids for each query.
        """
        asked = Asked.of([model], prompts, max_new_tokens, seed, {})
        if isinstance(temperature, bool) or not 0 <= temperature < math.inf:
            raise ValueError(f"temperature must be a number from 0 on, got {temperature!r}")
        self._check(model, asked)
        retriever = self.retriever or self.entries.nearest(max(64, 2 * self.neighbours))
        method = dataclasses.replace(self, retriever=retriever)
        found = []
        for part in asked.parts(batch_size):
            lanes = Rows(method, model, part, float(temperature)).run()
            found += [_written(model, part, row, lane) for row, lane in enumerate(lanes)]
        return found

    def _check(self, model, asked):
        if encodes(model.lm):
            raise ValueError(f"a kNN-LM goes back in one text, and {model.name} reads a source beside it: take another")
        if jax.tree.leaves(model.lm.states(jax.eval_shape(lambda: model.lm.init_cache(1, 8, jnp.float32)))):
            raise ValueError(f"a kNN-LM goes back in its text, and {model.name} has running states: take another")
        vectors, tokens = self.entries.vectors, self.entries.tokens
        if tokens.min() < 0 or tokens.max() >= model.lm.vocab_size:
            raise ValueError(f"entries have tokens that {model.name} lacks: build them with this model")
        width = _width(model)
        if vectors.shape[1] != width:
            raise ValueError(
                f"entries are {vectors.shape[1]} wide and {model.name} is {width}: build them with this model"
            )
        if asked.ids and asked.longest + asked.max_new_tokens > model.max_length:
            raise ValueError(
                f"a prompt of {asked.longest} tokens and {asked.max_new_tokens} new ones do not fit in the "
                f"{model.max_length} positions of {model.name}: lower max_new_tokens"
            )


def _width(model: Any) -> int:
    """E, from the form of an embedding, without computing one."""
    return jax.eval_shape(model.lm.embed, model.params, jnp.zeros((1, 1), jnp.int32)).shape[-1]


def _written(model: Any, asked: Asked, row: int, lane: Lane) -> KnnWritten:
    ended = bool(lane.text) and lane.text[-1] in model.eos_ids
    return KnnWritten(
        asked.prompts[row], new_text(model.tokenizer, asked.ids[row], lane.text), list(lane.text),
        "error" if lane.failed else "eos" if ended else "length", lane.passes,
        retrievals=lane.retrievals, guesses=lane.guesses, matches=lane.matches,
    )  # fmt: skip
