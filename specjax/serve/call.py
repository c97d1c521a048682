"""One call of `generate` or `stream`: its prompts and options, checked before any work is done."""

import dataclasses
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from specjax.models.text import Chat
from specjax.names import check_keywords
from specjax.search import Selection
from specjax.serve.prompts import read_prompts
from specjax.serve.record_bar import Speed, bar_fits, in_notebook, record_bar
from specjax.serve.request import Record, Request, needs_of, several
from specjax.serve.sampling import Sampling, check_stop
from specjax.serve.selecting import Chooser, selected
from specjax.serve.slots import Timing, Turn, in_order
from specjax.serve.text import user_turn

_LOG = logging.getLogger("specjax")


@dataclasses.dataclass(frozen=True)
class Call:
    """A call of an engine, checked.

    Attributes:
      prompts: each with its options, which are fields of a `Request`.
      common: the options that the user gave for all.
      chat: see `specjax.generate`.
      count: the number of completions of each.
      chooser: takes one of them; None: all are returned.
      logprobs: whether records keep log-probabilities.
    """

    prompts: list[tuple[Any, dict[str, Any]]]
    common: dict[str, Any]
    chat: bool | Chat = False
    count: int = 1
    chooser: Chooser | None = None
    logprobs: bool = False

    @classmethod
    def of(
        cls,
        prompts: Any,
        *,
        sampling: Sampling | Sequence[Sampling] | None,
        options: Mapping[str, Any],
        num_return_sequences: int = 1,
        select: str | Selection | None = None,
        chat: bool | Chat = False,
    ) -> "Call":
        """Makes a call from the arguments of `specjax.generate`; `options` take precedence over `sampling`.

        Raises:
          ValueError: one line that says what cannot be used.
        """
        if (
            isinstance(num_return_sequences, bool)
            or not isinstance(num_return_sequences, int)
            or num_return_sequences < 1
        ):
            raise ValueError(f"num_return_sequences must be at least 1, got {num_return_sequences}")
        check_keywords("Engine.stream", options, [field.name for field in dataclasses.fields(Sampling)])
        common = Sampling(**{name: value for name, value in options.items() if value is not None}).given
        found = read_prompts(prompts)
        each = sampling if isinstance(sampling, Sequence) else [sampling] * len(found)
        if len(each) != len(found):
            raise ValueError(
                f"there are {len(found)} prompts and {len(each)} samplings: give one sampling, or one per prompt"
            )
        if wrong := [own for own in each if not isinstance(own, (Sampling, type(None)))]:
            raise ValueError(f"sampling is a specjax.Sampling, or one per prompt, not {wrong[0]!r:.60}")
        asked = [
            (prompt, joined({**({} if own is None else own.given), **common}, fields))
            for (prompt, fields), own in zip(found, each, strict=True)
        ]
        chooser = Chooser.of(select, num_return_sequences)
        shared = sampling.given if isinstance(sampling, Sampling) else {}
        return cls(asked, {**shared, **common}, chat, num_return_sequences, chooser)

    def keeps(self, logprobs: bool) -> bool:
        """Whether an engine must keep log-probabilities, given whether the user asks for them."""
        return logprobs or self.chooser is not None and self.chooser.selection.reads_certainty

    def requests(self, engine: Any) -> list[Request]:
        """Checked requests of an engine; completions of a prompt are adjacent.

        Raises:
          ValueError: one line that says what cannot be used with this engine.
        """
        engine.check_completions(self.count)
        found: list[Any] = [
            one
            for prompt, own in self.prompts
            for one in several(engine.request(user_turn(prompt, self.chat), chat=self.chat, **own), self.count)
        ]
        if self.chooser is not None:
            self.chooser.check(engine, found)
        if line := engine.left_out(self.common, found):
            _LOG.warning(line)
        return found

    def records(self, engine: Any, *, batch_size: int, prompt_logprobs: bool, progress: bool | None) -> list[Record]:
        """The records that an engine makes for the call; see `specjax.generate`."""
        if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        requests, chooser = self.requests(engine), self.chooser
        turns = engine.turns(
            requests,
            slots=engine.slots(requests, batch_size),
            prompt_logprobs=prompt_logprobs,
            needs=needs_of(requests),
            race=chooser is not None and chooser.races,
        )
        count = len(requests)
        if chooser is not None:
            turns, count = selected(turns, requests, chooser.shown(self.logprobs)), len(self.prompts)
        if progress is None:
            progress = count > 1 and (bar_fits() or in_notebook())
        return list(in_order(_with_bar(turns, count, engine.timing) if progress else turns))


def joined(common: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a prompt: its own take precedence over the common ones, but stop strings are combined.

    Raises:
      ValueError: on invalid stop strings.
    """
    every = {**common, **own}
    if common.get("stop") and own.get("stop"):
        check_stop(own["stop"])
        every["stop"] = (*common["stop"], *((own["stop"],) if isinstance(own["stop"], str) else own["stop"]))
    return every


def _with_bar(turns: Iterator[Turn], total: int, timing: Timing) -> Iterator[Turn]:
    speed = Speed(timing)
    with record_bar(total) as advance:
        for turn in turns:
            advance(len(turn.finished), speed(turn))
            yield turn
