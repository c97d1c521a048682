"""One of several completions of a prompt: `--select`, over the turns of an engine."""

import dataclasses
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from specjax.assembly.registry import make_selection
from specjax.search.selection import Candidate, Selection, answer_of
from specjax.serve.options import DecodeOptions
from specjax.serve.race import ENDED
from specjax.serve.request import Record, Request, rows_of
from specjax.serve.slots import Turn

Options = TypeVar("Options", bound=DecodeOptions)
Choose = Callable[[Sequence[Record]], Record]
"""From the completions of a prompt to the one that is taken."""


@dataclasses.dataclass(frozen=True)
class Chooser:
    """What `select` and `answer` of a run say.

    Attributes:
      selection: from the registry's line.
      answer: a regular expression, or None: all of a text is its answer.
      count: completions of a prompt.
      logprobs: whether records are to keep the log-probabilities of their tokens.
    """

    selection: Selection
    answer: str | None
    count: int
    logprobs: bool

    @classmethod
    def of(cls, options: Any, logprobs: bool) -> "Chooser | None":
        """Of a run; None where it takes all completions.

        Args:
          options: that have `select`, `answer` and `num_return_sequences` of `specjax.serve.options.RunOptions`.
          logprobs: see above.

        Raises:
          ValueError: on a line or an expression that says nothing, an answer without a selection, or a single completion.
        """
        if options.select is None:
            if options.answer is not None:
                raise ValueError("answer says what completions are compared by: give select too, or leave it out")
            return None
        selection = make_selection(options.select)
        if options.num_return_sequences < 2:
            raise ValueError("select takes one of several completions: set num_return_sequences to 2 or more")
        try:
            re.compile(options.answer or "")
        except re.error as error:
            raise ValueError(f"answer must be a regular expression, got {options.answer!r}: {error}") from error
        return cls(selection, options.answer, options.num_return_sequences, logprobs)

    @property
    def races(self) -> bool:
        """Whether the shortest completion is taken, see `specjax.serve.race`."""
        return self.selection.stops_others

    def kept_by(self, options: Options) -> Options:
        """The options of a decoder that keeps what completions are judged by."""
        return dataclasses.replace(options, logprobs=self.logprobs or self.selection.reads_certainty)

    def check(self, engine: Any, requests: Sequence[Request]) -> None:
        """Raises ValueError where there is nothing to choose from: of a search, or of completions that are all alike."""
        if engine.searches:
            how = engine.decoder
            raise ValueError(f"{how.called} ranks its texts itself: leave select out, or {how.off}")
        if self.races and engine.model.masked:
            raise ValueError(f"{engine.model.name} is a diffusion model, whose texts do not end one after the other")
        if engine.model.tokenizer is None and not self.races:
            raise ValueError(
                f"{engine.model.name} has no tokenizer, and answers are compared as texts: leave select out"
            )
        if any(not request.temperature for request in requests):
            raise ValueError("completions of a greedy prompt are all the same: set a temperature, or leave select out")

    def __call__(self, records: Sequence[Record]) -> Record:
        """The record that is taken, with what it is worth as its score."""
        said = [None if record.error is not None else answer_of(record.text or "", self.answer) for record in records]
        pairs = zip(said, records, strict=True)
        at, score = self.selection.choose([_candidate(*pair) for pair in pairs])
        taken = dataclasses.replace(records[at], score=score, sample=None, chosen=at)
        if self.logprobs:
            return taken
        return dataclasses.replace(taken, logprobs=None, warped_logprobs=None, nll=None, self_certainty=None)


def _candidate(answer: str | None, record: Record) -> Candidate:
    return Candidate(answer, record.self_certainty, record.new_tokens, record.finish_reason in ENDED)


def selected(turns: Iterator[Turn], requests: Sequence[Request], choose: Choose) -> Iterator[Turn]:
    """The turns with one record a prompt, under the prompt's index, once all of its completions are there.

    Args:
      turns: of these requests.
      requests: completions of a prompt stand next to each other.
      choose: takes one of them.
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
