"""Log-probabilities of prompts in a run: prefill makes no logits, so prompts are read once more."""

import collections
import dataclasses
from collections.abc import Iterator, Sequence

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
    places: dict[tuple[int, ...], int] = {}
    for request in requests:
        places.setdefault(request.ids, len(places))
    prompts = list(places)
    left = collections.Counter(places[request.ids] // rows for request in requests)
    known: dict[int, list[list[float | None]]] = {}

    def of(index: int) -> list[float | None]:
        part, at = divmod(places[requests[index].ids], rows)
        if part not in known:
            texts = [Text(ids) for ids in prompts[part * rows : (part + 1) * rows]]
            known[part] = [[None, *found.logprobs] for found in reader.run(texts, batch_size=rows)]
        left[part] -= 1
        return list((known[part] if left[part] else known.pop(part))[at])

    for turn in turns:
        finished = [(index, dataclasses.replace(record, prompt_logprobs=of(index))) for index, record in turn.finished]
        yield dataclasses.replace(turn, finished=finished)
