"""Documents on disk and in front of prompts."""

import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from specjax.models.messages import content_text
from specjax.models.text import encoded

SPARE = 8
"""How many more tokens a document may have inside a chat than alone."""

Document = str | Sequence[int]
"""A text, or token ids."""


def read_documents(path: str) -> list[str]:
    """The texts of a file: a `.jsonl` of strings or of objects with `text` and perhaps `title`, or else one on each line.

    Raises:
      ValueError: if there is no such file, it has none, or a line is neither.
    """
    file = pathlib.Path(path)
    if not file.is_file():
        raise ValueError(f"there is no file of documents {path!r}: give a .jsonl, or a text with one on each line")
    lines = [line for line in file.read_text("utf-8").splitlines() if line.strip()]
    if not lines:
        raise ValueError(f"{path} holds no documents: give one on each line")
    return [_of_json(path, *each) for each in enumerate(lines, 1)] if file.suffix == ".jsonl" else lines


def _of_json(path, number, line):
    try:
        found = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}, document {number}: not JSON ({error})") from error
    parts = [found.get("title"), found.get("text")] if isinstance(found, Mapping) else [None, found]
    if not isinstance(parts[1], str):
        raise ValueError(f'{path}, document {number}: needs a string, or an object with the string "text"')
    return "\n".join(part for part in parts if part)


class Corpus:
    """Documents as a model reads them before prompts.

    Args:
      model: the model.
      documents: N of them.
      longest: tokens of a document, at most; the rest is cut.
      separator: the text between a document and a prompt.

    Raises:
      ValueError: if there are none, or texts without a tokenizer.
    """

    def __init__(self, model: Any, documents: Sequence[Document], longest: int, separator: str):
        if not len(documents):
            raise ValueError("there are no documents to retrieve: give at least one")
        self.model, self.documents, self.longest, self.separator = model, documents, longest, separator
        self.between = self._ids(separator) if model.tokenizer is not None else ()
        self.known: dict[int, tuple[int, ...]] = {}

    @property
    def room(self) -> int:
        """The most tokens that a document adds to a prompt."""
        return self.longest + len(self.between) + SPARE

    def _ids(self, text):
        return tuple(self.model.tokenizer.encode(text, add_special_tokens=False)) if text else ()

    def ids(self, document: int) -> tuple[int, ...]:
        """A document's first tokens."""
        if document not in self.known:
            own = self.documents[document]
            if isinstance(own, str) and self.model.tokenizer is None:
                raise ValueError(f"{self.model.name} has no tokenizer: give documents as lists of token ids")
            ids = self._ids(own) if isinstance(own, str) else tuple(int(token) for token in own)
            outside = [token for token in ids if not 0 <= token < self.model.lm.vocab_size]
            if outside:
                raise ValueError(
                    f"document {document} holds the token {outside[0]}, outside {self.model.name}'s vocabulary"
                )
            self.known[document] = ids[: self.longest]
        return self.known[document]

    def before(self, document: int | None, prompt: Any, ids: Sequence[int]) -> tuple[int, ...]:
        """The ids of a prompt with a document in front of it.

        It stands after the token that begins every text, if the prompt begins with that; and in a chat at the beginning of
        the last message.

        Args:
          document: its id, or None for the prompt alone.
          prompt: as given.
          ids: the prompt's.
        """
        if document is None:
            return tuple(ids)
        own, tokenizer = self.ids(document), self.model.tokenizer
        if not isinstance(prompt, str) and len(prompt) and isinstance(prompt[-1], Mapping):
            return self._in_chat(own, prompt, len(ids) + self.room)
        begin = int(bool(ids) and ids[0] == getattr(tokenizer, "bos_token_id", None))
        return (*ids[:begin], *own, *self.between, *ids[begin:])

    def _in_chat(self, own, prompt, room):
        """A chat with a document, cut until it fits: its end may be cut into other tokens than it was made of."""
        while True:
            text = self.model.tokenizer.decode(list(own), skip_special_tokens=True) + self.separator
            found = encoded(self.model, [*prompt[:-1], {**prompt[-1], "content": text + content_text(prompt[-1])}])
            if len(found) <= room or not own:
                return found
            own = own[: -(len(found) - room)]

    def query(self, ids: Sequence[int], longest: int) -> Any:
        """The query of a text: its last tokens, as words if there is a tokenizer."""
        last = [int(token) for token in ids[-longest:]]
        tokenizer = self.model.tokenizer
        return tuple(last) if tokenizer is None else tokenizer.decode(last, skip_special_tokens=True)


def answers(retriever: Any, queries: Sequence[Any], k: int, count: int) -> list[list[int]]:
    """A retriever's documents for queries.

    Raises:
      ValueError: if it does not give each query at least one id of the N = `count` documents.
    """
    found = [np.asarray(own).reshape(-1).tolist() for own in retriever(queries, k)]
    wrong = [one for own in found for one in own if not (isinstance(one, int) and 0 <= one < count)]
    if len(found) != len(queries) or not all(found) or wrong:
        said = f"the id {wrong[0]!r}" if wrong else f"{len(found)} lists, of which {found.count([])} are empty"
        raise ValueError(
            f"a retriever gives for each of {len(queries)} queries a list of ids below {count}, at least one; got {said}"
        )
    return found
