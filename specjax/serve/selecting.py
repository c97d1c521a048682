"""Selection of one of several completions of a prompt (`--select`), over the turns of an engine."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from specjax.assembly.registry import make_selection
from specjax.search.selection import Candidate, Selection, answer_of, prompt_text
from specjax.serve.race import ENDED
from specjax.serve.request import Record, Request, rows_of
from specjax.serve.slots import Turn

Choose = Callable[[Sequence[Record]], Record]
"""Maps the completions of a prompt to the selected one."""


@dataclasses.dataclass(frozen=True)
class Chooser:
    """Takes one of several completions of a prompt.

    Attributes:
      selection: how to select.
      count: the number of completions of a prompt.
    """

    selection: Selection
    count: int

    @classmethod
    def of(cls, select: str | Selection | None, count: int) -> "Chooser | None":
        """The chooser of a run; None if it returns all completions.

        Args:
          select: a selection or its line.
          count: the number of completions of a prompt.

        Raises:
          ValueError: on an unknown line, if there is only one completion, or if the selection lacks something.
        """
        if select is None:
            return None
        selection = make_selection(select) if isinstance(select, str) else select
        if not isinstance(selection, Selection):
            raise ValueError(f"select is a selection (specjax.search.Selection) or its line, not {select!r:.60}")
        if count < 2:
            raise ValueError("select takes one of several completions: set num_return_sequences to 2 or more")
        return cls(selection.ready(), count)

    @property
    def races(self) -> bool:
        """Whether it selects the shortest completion; see `specjax.serve.race`."""
        return self.selection.stops_others

    def check(self, engine: Any, requests: Iterable[Request]) -> None:
        """Raises ValueError if there is nothing to choose from: for a search, for completions that are all alike, or for
        prompts without a text that a selection reads."""
        if engine.searches:
            how = engine.decoder
            raise ValueError(f"{how.called} ranks its texts itself: leave select out, or decode otherwise")
        if self.races and engine.model.masked:
            raise ValueError(f"{engine.model.name} is {engine.model.kind}, whose texts do not end one after the other")
        if engine.model.tokenizer is None and not self.races:
            raise ValueError(
                f"{engine.model.name} has no tokenizer, and answers are compared as texts: leave select out"
            )
        for request in requests:
            if not request.temperature:
                raise ValueError(
                    "completions of a greedy prompt are all the same: set a temperature, or leave select out"
                )
            if self.selection.reads_text and not _has_text(request):
                raise ValueError("a scorer reads prompts as texts: give texts or chats, or leave select out")

    def shown(self, logprobs: bool) -> Choose:
        """A function from completions to the selected record, with its value as `score`.

        Args:
          logprobs: whether the record keeps the log-probabilities of its tokens.
        """

        def choose(records: Sequence[Record]) -> Record:
            pattern = self.selection.answer or None
            said = [None if record.error is not None else answer_of(record.text or "", pattern) for record in records]
            pairs = zip(said, records, strict=True)
            at, score = self.selection.choose([_candidate(*pair) for pair in pairs])
            taken = dataclasses.replace(records[at], score=score, sample=None, chosen=at)
            if logprobs:
                return taken
            return dataclasses.replace(taken, logprobs=None, warped_logprobs=None, nll=None, self_certainty=None)

        return choose


def _candidate(answer: str | None, record: Record) -> Candidate:
    ended = record.finish_reason in ENDED
    text, prompt = record.text or "", prompt_text(record.prompt)
    return Candidate(answer, record.self_certainty, record.new_tokens, ended, text, prompt)


def _has_text(request: Request) -> bool:
    """Whether a prompt is a text or a chat."""
    is_chat = isinstance(request.prompt, Sequence) and bool(request.prompt) and isinstance(request.prompt[0], Mapping)
    return (request.is_text or is_chat) and not isinstance(request.source, np.ndarray)


def selected(turns: Iterator[Turn], requests: Sequence[Request], choose: Choose) -> Iterator[Turn]:
    """The turns with one record per prompt, by the prompt's index, once all of its completions have ended.

    Args:
      turns: of these requests.
      requests: completions of a prompt are adjacent.
      choose: selects one of them.
    """
    groups = rows_of(requests, len(requests))
    group_of = {index: group for group, indices in enumerate(groups) for index in indices}
    there: list[dict[int, Record]] = [{} for _ in groups]
    for turn in turns:
        finished = []
        for index, record in turn.finished:
            group = group_of[index]
            there[group][index] = record
            if len(there[group]) == len(groups[group]):
                finished.append((group, choose([there[group][i] for i in groups[group]])))
                there[group] = {}
        yield dataclasses.replace(turn, finished=finished)
