"""Log-probabilities of prompts in a run: prefill makes no logits, so prompts are read once more."""

import collections
import dataclasses
import hashlib
from collections.abc import Iterator, Sequence

import numpy as np

from specjax.serve.request import Request
from specjax.serve.slots import Turn
from specjax.serve.text_reader import Reader, Text


def with_prompt_logprobs(
    turns: Iterator[Turn], reader: Reader, requests: Sequence[Request], rows: int
) -> Iterator[Turn]:
    """The turns with `prompt_logprobs` in every record.

    As many distinct prompts as there are decoding rows are read together, in the order of the requests. They are read
    when the first of their records is finished, and dropped after the last.

    Args:
      turns: of these requests.
      reader: reads texts with their model.
      requests: all requests.
      rows: the number of prompts read together.
    """
    seen: dict[bytes, int] = {}
    place: list[int] = []  # of every request: the number of its prompt
    first: list[int] = []  # of every prompt: a request that has it
    for index, request in enumerate(requests):
        place.append(seen.setdefault(_digest(request.ids), len(seen)))
        if place[-1] == len(first):
            first.append(index)
    left = collections.Counter(own // rows for own in place)
    known: dict[int, list[list[float | None]]] = {}

    def of(index: int) -> list[float | None]:
        part, at = divmod(place[index], rows)
        if part not in known:
            texts = [Text(requests[own].ids) for own in first[part * rows : (part + 1) * rows]]
            known[part] = [[None, *found.logprobs] for found in reader.run(texts, batch_size=rows)]
        left[part] -= 1
        return list((known[part] if left[part] else known.pop(part))[at])

    for turn in turns:
        finished = [(index, dataclasses.replace(record, prompt_logprobs=of(index))) for index, record in turn.finished]
        yield dataclasses.replace(turn, finished=finished)


def _digest(ids: Sequence[int]) -> bytes:
    return hashlib.blake2b(np.asarray(ids, np.int64).tobytes(), digest_size=16).digest()
