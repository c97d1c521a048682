"""Rows of retrieval while decoding: rounds of strides with guessed documents, which one batched retrieval checks.

In the shape descriptions `B` denotes rows.
"""

import concurrent.futures
import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from specjax.models.text import new_text
from specjax.sampling.noise import keys_of
from specjax.search.ralm.documents import Corpus, answers
from specjax.search.ralm.retrievers import Ranks
from specjax.search.ralm.strides import Pace
from specjax.search.stepwise import Asked, Step, Written
from specjax.search.writer import Writer
from specjax.settings import settled

STRIDES = 2**31 - 1
"""Folded into a row's key before a stride's number; no position has it."""


@dataclasses.dataclass(frozen=True, repr=False)
class Retrieved(Written):
    """A text that was written with documents.

    Attributes:
      documents: the document of each step; -1 where there was none.
      retrievals: how many calls of the retriever this prompt had queries in.
      guesses: documents that were guessed and then checked.
      matches: how many of these the retriever gave too.
    """

    documents: tuple[int, ...] = ()
    retrievals: int = 0
    guesses: int = 0
    matches: int = 0


@dataclasses.dataclass(frozen=True)
class Guess:
    """A document that nothing has checked yet.

    Attributes:
      length: how many tokens of the text stand before its stride.
      query: what the retriever will be asked.
      document: its id.
    """

    length: int
    query: Any
    document: int


@dataclasses.dataclass
class Lane:
    """One prompt's text.

    Attributes:
      text: its new tokens.
      starts: where its strides begin, each with the stride's document.
      document: the document of the next stride; None before any is known.
      read: the document in front of the text that the cache holds.
      local: documents that the retriever gave for this prompt, in order.
      enough: whether the critic has ended retrieval.
      early: whether the next round's first stride is written already.
    """

    text: list[int] = dataclasses.field(default_factory=list)
    starts: list[tuple[int, int | None]] = dataclasses.field(default_factory=list)
    document: int | None = None
    read: int | None = -1
    local: dict[int, None] = dataclasses.field(default_factory=dict)
    enough: bool = False
    early: bool = False
    retrievals: int = 0
    guesses: int = 0
    matches: int = 0


class Rows:
    """Some prompts side by side.

    Args:
      method: a `specjax.search.ralm.Ralm` with its retriever.
      writer: rows of the model.
      corpus: the documents.
      asked: the prompts.
      pace: how many strides are written ahead; it learns from part to part.
      clock: seconds.
    """

    def __init__(
        self, method: Any, writer: Writer, corpus: Corpus, asked: Asked, pace: Pace,
        clock: Callable[[], float] = time.perf_counter,
    ):  # fmt: skip
        self.method, self.writer, self.corpus, self.asked, self.pace, self.clock = (
            method, writer, corpus, asked, pace, clock,
        )  # fmt: skip
        self.lanes = [Lane() for _ in asked.ids]
        self.keys = np.zeros((writer.rows, 2), np.uint32)
        self.keys[: len(asked.ids)] = asked.keys
        self.plain = method.ahead == 1 and not method.overlap
        writer.clear()

    def run(self) -> list[Retrieved]:
        """Writes all texts to their end."""
        first = self._queries(range(len(self.lanes)))
        for row, found in self._retrieve(first)[0].items():
            self._learn(self.lanes[row], found)
            self.lanes[row].document = found[0]
        with concurrent.futures.ThreadPoolExecutor(1) as beside:
            while any(not self._over(row) for row in range(len(self.lanes))):
                self._round(beside)
        return [self._written(row) for row in range(len(self.lanes))]

    def _over(self, row):
        lane = self.lanes[row]
        ended = bool(lane.text) and lane.text[-1] in self.writer.model.eos_ids
        return ended or len(lane.text) >= self.asked.max_new_tokens or bool(self.writer.failed[row])

    # rounds

    def _round(self, beside):
        """Strides with guessed documents, their check, and the way back to the first wrong guess."""
        guesses: list[list[Guess]] = [[] for _ in self.lanes]
        spent = []
        for _ in range(self.pace.ahead):
            began = self.clock()
            self._stride()
            queries = self._queries([row for row in range(len(self.lanes)) if not self._over(row)])
            for row, document in self._guessed(queries).items():
                lane = self.lanes[row]
                guesses[row].append(Guess(len(lane.text), queries[row], document))
                lane.document = document
            spent.append(self.clock() - began)
            if not queries:
                break
        flat = [(row, guess) for row, own in enumerate(guesses) for guess in own]
        if not flat:
            return
        asked = [(row, guess.query) for row, guess in flat]
        if self.method.overlap:
            waiting = beside.submit(self._ask, asked)
            self._stride()
            found, seconds = waiting.result()
            for lane in self.lanes:
                lane.early = True
        else:
            found, seconds = self._ask(asked)
        answered: list[list[Sequence[int]]] = [[] for _ in self.lanes]
        for (row, _), own in zip(asked, found, strict=True):
            answered[row].append(own)
        rows = [row for row, own in enumerate(guesses) if own]
        matched = [self._checked(row, guesses[row], answered[row]) for row in rows]
        self.pace.heard([len(guesses[row]) for row in rows], matched, sum(spent) / len(spent), seconds)

    def _checked(self, row, guesses, found):
        """Keeps a row's text up to its first wrong guess, and returns how many were right before that."""
        lane, matched = self.lanes[row], 0
        lane.retrievals += 1
        for guess, own in zip(guesses, found, strict=True):
            self._learn(lane, own)
            lane.guesses += 1
            if guess.document != own[0]:
                self._back(row, guess.length, own[0])
                break
            matched += 1
        lane.matches += matched
        return matched

    def _back(self, row, length, document):
        """Takes a row's text back to a length, where it goes on with another document."""
        lane, writer = self.lanes[row], self.writer
        lane.text, lane.document, lane.enough, lane.early = lane.text[:length], document, False, False
        lane.starts = [start for start in lane.starts if start[0] < length]
        writer.failed[row] = False
        if lane.read == document:
            shorter = writer.length.copy()
            shorter[row] = writer.begin[row] + length
            writer.back(shorter)

    def _stride(self):
        """Writes a stride in every row that has none ahead; a row without further retrieval goes on to its end."""
        rows = [row for row, lane in enumerate(self.lanes) if not self._over(row) and not lane.early]
        for lane in self.lanes:
            lane.early = False
        if not rows:
            return
        self._place(rows)
        writer, count = self.writer, self.asked.max_new_tokens
        on, most, number = np.zeros(writer.rows, bool), np.zeros(writer.rows, np.int64), np.zeros(writer.rows, np.int32)
        for row in rows:
            lane = self.lanes[row]
            on[row], most[row] = True, count if lane.enough else self.method.stride
            number[row] = len(lane.text) // self.method.stride
            lane.starts.append((len(lane.text), lane.document))
        keys = _stride_keys(*jax.device_put((self.keys, number)))
        writer.state = dataclasses.replace(writer.state, key=keys)
        for row, tokens in enumerate(writer.write(on, most, step=False)):
            if on[row]:
                self.lanes[row].text += tokens

    def _place(self, rows):
        """Reads prompts with their documents, and what was written, where the cache has another document."""
        texts, new = {}, {}
        for row in rows:
            lane = self.lanes[row]
            if lane.read != lane.document:
                before = self.corpus.before(lane.document, self.asked.prompts[row], self.asked.ids[row])
                self.writer.most[row] = len(before) + self.asked.max_new_tokens
                texts[row], new[row] = (*before, *lane.text), len(lane.text)
                lane.read = lane.document
        if texts:
            self.writer.put(texts, self.keys, 1 if len(texts) == 1 else self.writer.rows, new)

    # documents

    def _queries(self, rows):
        """The queries of those rows that the critic lets go on, by row."""
        found = {}
        for row in rows:
            lane, critic = self.lanes[row], self.method.critic
            if critic is not None and not lane.enough:
                lane.enough = bool(critic(self.asked.prompts[row], self._text(row), [at for _, at in lane.starts]))
            if not lane.enough:
                found[row] = self.corpus.query((*self.asked.ids[row], *lane.text), self.method.query_tokens)
        return found

    def _guessed(self, queries):
        """The best of the documents that each row knows; without a retriever that can tell, the row's last one."""
        last = lambda row: next(reversed(self.lanes[row].local))
        if not queries or self.plain or not isinstance(self.method.retriever, Ranks):
            return {row: last(row) for row in queries}
        known = [list(self.lanes[row].local) for row in queries]
        return dict(zip(queries, self.method.retriever.among(list(queries.values()), known), strict=True))

    def _retrieve(self, queries):
        """The retriever's documents by row, and its seconds."""
        if not queries:
            return {}, 0.0
        found, seconds = self._ask(list(queries.items()))
        for row in queries:
            self.lanes[row].retrievals += 1
        return dict(zip(queries, found, strict=True)), seconds

    def _ask(self, asked):
        began = self.clock()
        k = 1 if self.plain else self.method.prefetch
        found = answers(self.method.retriever, [query for _, query in asked], k, len(self.corpus.documents))
        return found, self.clock() - began

    @staticmethod
    def _learn(lane, found):
        """Adds documents to a row's own; the best becomes its last."""
        lane.local |= dict.fromkeys(found)
        lane.local.pop(found[0])
        lane.local[found[0]] = None

    # results

    def _text(self, row):
        return new_text(self.writer.model.tokenizer, self.asked.ids[row], self.lanes[row].text)

    def _written(self, row):
        lane, ids, tokenizer = self.lanes[row], self.asked.ids[row], self.writer.model.tokenizer
        cuts = [at for at, _ in lane.starts]
        parts = [lane.text[begin:end] for begin, end in zip(cuts, [*cuts[1:], None], strict=True)]
        steps = tuple(
            Step(tuple(own), new_text(tokenizer, (*ids, *lane.text[:begin]), own))
            for begin, own in zip(cuts, parts, strict=True)
        )
        failed, ended = bool(self.writer.failed[row]), lane.text and lane.text[-1] in self.writer.model.eos_ids
        return Retrieved(
            self.asked.prompts[row], self._text(row), list(lane.text), "error" if failed else "eos" if ended else "length",
            int(self.writer.passes[row]), steps=steps,
            documents=tuple(-1 if own is None else own for _, own in lane.starts),
            retrievals=lane.retrievals, guesses=lane.guesses, matches=lane.matches,
        )  # fmt: skip


@jax.jit
@settled
def _stride_keys(data: jax.Array, number: jax.Array) -> jax.Array:
    """The keys `[B]` of rows' strides; the first one is the row's own.

    Two strides may write at the same absolute positions, since their documents differ in length; so each has noise of
    its own.
    """
    keys = keys_of(data)
    fold = jax.vmap(jax.random.fold_in)
    own = fold(fold(keys, jax.numpy.full(number.shape, STRIDES)), number)
    return jax.numpy.where(number > 0, own, keys)
