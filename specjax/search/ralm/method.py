"""Retrieval while decoding: a retrieved document stands before the prompt, and is retrieved anew every few tokens."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np

from specjax.about import About
from specjax.search.ralm.documents import Corpus, read_documents
from specjax.search.ralm.retrievers import Bm25, Retriever
from specjax.search.ralm.rows import Retrieved, Rows
from specjax.search.ralm.strides import Pace
from specjax.search.stepwise import Asked, Stepwise
from specjax.search.writer import Writer

Critic = Callable[[Any, str | None, list[int | None]], bool]
"""From a prompt, the text so far and the documents of its strides: is that enough, so that no more is retrieved?"""


@dataclasses.dataclass(frozen=True)
class Ralm(Stepwise):
    """In-context retrieval, speculated as in RaLMSpec.

    Every `stride` tokens the last `query_tokens` tokens of prompt and text are the query, and the best document stands
    before the prompt while the next stride is written. With `ahead` above 1 each row guesses: the best of the documents
    that it has seen stands there meanwhile, and one batched retrieval checks several strides. At the first wrong guess the
    text goes back. So neither `ahead`, `prefetch` nor `overlap` changes a text; they change how long it takes.

    A row reads its prompt again whenever its document changes; otherwise its cache stays. A stride's noise depends on
    the row, the stride's number and the position.

    Attributes:
      documents: a list of texts or of token ids, or a file (`read_documents`).
      retriever: `bm25`, or any function from queries and k to lists of up to k ids, the best first (`Retriever`). A query is
        a text; for a model without a tokenizer, ids. A retriever that `Ranks` guesses better.
      stride: tokens between two retrievals.
      ahead: strides that one retrieval checks. 1 is plain retrieval; `os3` follows measured times and guesses.
      prefetch: how many documents a check adds to those that a row knows.
      overlap: whether a check runs in a thread beside the next stride.
      critic: if given, retrieval for a row ends as soon as it says yes (SIM-RAG, arXiv:2505.02811). It is asked before every
        retrieval, the first one included, and must depend on its arguments alone.
      query_tokens: tokens of a query.
      document_tokens: tokens of a document that are read.
      separator: the text between document and prompt.

    Raises:
      ValueError: for counts below 1 or unknown words.
    """

    about = About(
        "ralm", "retrieves a document every few tokens; guesses it, and checks several guesses at once",
        "arXiv:2401.14021, arXiv:2302.00083", "own text",
        fields=(
            "documents", "stride", "ahead", "prefetch", "overlap", "query_tokens", "document_tokens", "separator",
        ),
    )  # fmt: skip

    documents: str | Sequence[Any] | None = None
    retriever: str | Retriever = "bm25"
    stride: int = 4
    ahead: int | Literal["os3"] = 3
    prefetch: int = 20
    overlap: bool = False
    critic: Critic | None = None
    query_tokens: int = 32
    document_tokens: int = 256
    separator: str = "\n"

    def __post_init__(self):
        for name in ("stride", "ahead", "prefetch", "query_tokens", "document_tokens"):
            value = getattr(self, name)
            if name == "ahead" and value == "os3":
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                also = ", or os3" if name == "ahead" else ""
                raise ValueError(f"{name} must be a whole number from 1 on{also}, got {value!r}")
        if not callable(self.retriever) and self.retriever != "bm25":
            raise ValueError(
                f"retriever must be bm25 or a function from queries and k to ids, got {self.retriever!r:.60}"
            )
        if self.critic is not None and not callable(self.critic):
            raise ValueError(f"critic must be a function, got {self.critic!r:.60}")

    def _ready(self) -> "Ralm":
        """The method with documents and a retriever.

        Raises:
          ValueError: without documents; also see `read_documents` and `Bm25`.
        """
        if self.documents is None:
            raise ValueError("ralm retrieves documents, and there are none: give documents=FILE, or a list in Python")
        documents = read_documents(self.documents) if isinstance(self.documents, str) else self.documents
        retriever = Bm25(documents) if isinstance(self.retriever, str) else self.retriever
        return dataclasses.replace(self, documents=documents, retriever=retriever)

    def bind(self, model: Any, *, mesh: Any = None, rows: int = 1, logprobs: bool = False) -> tuple["Ralm", Any]:
        """See `Decode.bind`; reads the documents once."""
        bound, params = super().bind(model, mesh=mesh, rows=rows, logprobs=logprobs)
        return bound._ready(), params  # type: ignore[attr-defined]

    def __call__(
        self,
        model: Any,
        prompts: Sequence[Any],
        *,
        max_new_tokens: int = 128,
        seed: int = 0,
        batch_size: int = 8,
        keys: np.ndarray | None = None,
        **sampling: Any,
    ) -> list[Retrieved]:
        """A text for every prompt, in order; its `steps` are strides, and `documents` says what was before each.

        Args:
          model: from `specjax.load`.
          prompts: a list of texts, lists of token ids or chats.
          max_new_tokens: the most new tokens for each.
          seed: determines the noise, together with a prompt.
          batch_size: prompts side by side; one retrieval serves all of them.
          keys: see `Asked.of`.
          **sampling: as in `specjax.generate`.

        Raises:
          ValueError: see `Asked.of`; also without documents, for a prompt that leaves no room for one, or for a retriever's
            answer that is no list of ids for each query.
        """
        super().bind(model)
        method = self._ready()
        assert method.documents is not None
        corpus = Corpus(model, method.documents, self.document_tokens, self.separator)
        asked = Asked.of([model], prompts, max_new_tokens, seed, sampling, keys)
        parts = asked.parts(batch_size)
        if not parts:
            return []
        needed = asked.longest + corpus.room + max_new_tokens
        if needed > model.max_length:
            raise ValueError(
                f"a prompt of {asked.longest} tokens, a document and {max_new_tokens} new tokens may take {needed} positions, "
                f"and {model.name} has {model.max_length}: lower document_tokens or max_new_tokens"
            )
        writer = Writer(model, len(parts[0].ids), asked, (), room=corpus.room)
        pace = Pace(self.ahead, self.overlap)
        return [found for part in parts for found in Rows(method, writer, corpus, part, pace).run()]
