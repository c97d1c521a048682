"""A job's loop: finished records go to the output file, to stdout, or both."""

import collections
import dataclasses
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from specjax.about import abouts
from specjax.assembly.companions import Stored
from specjax.assembly.registry import make_old, make_verifier
from specjax.jobs import jsonl
from specjax.jobs.completer import Completer
from specjax.jobs.options import JobOptions
from specjax.jobs.output import Item, Output, OutputError
from specjax.jobs.page import watched
from specjax.jobs.progress import interruptible, progress
from specjax.models.text import text_before
from specjax.search import ScorerError, SearchSettings
from specjax.serve.record_bar import bar_fits
from specjax.serve.request import Record, Request
from specjax.serve.slots import Turn
from specjax.serve.watch import OnText
from specjax.sharding.distributed import from_first, largest
from specjax.terminal import ENDS, BadInput, complain, note, write


@dataclasses.dataclass
class Totals:
    """The totals of this run's records; `failed` includes earlier runs."""

    tokens: int = 0
    steps: int = 0
    decoded: float = 0.0  # including tokens after a stop string
    failed: int = 0

    def add(self, record: Record) -> None:
        """Counts one more record."""
        self.failed += record.finish_reason == "error"
        self.tokens += record.new_tokens
        self.steps += record.steps
        self.decoded += record.tokens_per_step * record.steps


def complete(options: JobOptions, completer: Completer, items: Sequence[Item], output: Output | None) -> int:
    """Completes the items without a record; returns the exit status.

    Args:
      options: of the job.
      completer: completes its requests.
      items: requests, and failed records of lines that could not become one, in the order of the input.
      output: an open output, or None.

    Raises:
      BadInput: if the output can no longer be written, or the user's scorer of completions fails.
    """
    done = {} if output is None else output.done
    from_first(_mask(done, items))
    count = len(done)
    if output is not None and done:
        note(f"{count} of {len(items)} records are in {output.path} already")
    totals = Totals(failed=sum(done.values()))
    show = _Show(options, completer, items, output)
    failed, asked = _left(items, done)
    ready: dict[int, Record | None] = dict.fromkeys(failed)  # None: the item itself is the record
    left = collections.deque(i for i in range(len(items)) if i not in done)
    ended = 0
    quiet = show.texts and sys.stdout.isatty()
    bar = len(items) > 1 and not quiet and bar_fits()
    title = " to ".join(name for name in (options.input, options.output) if name) or "specjax generate"
    with (
        interruptible(options.ends_softly) as pressed,
        watched(options.page, options.metrics, title, len(items), count, totals.failed) as watch,
        progress(len(items), count, completer.timing, bar, options.progress) as advance,
    ):
        try:
            for turn in _turns(completer, asked, show.on_text):
                ready.update(turn.finished)
                due = list(_due(ready, None if options.unordered else left))
                for index in due:
                    record = ready.pop(index) or items[index]
                    assert isinstance(record, Record)
                    show(index, record)
                    totals.add(record)
                    count += 1
                advance(turn, len(due))
                watch(turn, len(due), totals.failed)
                if output is not None:
                    output.tick()
                ended = largest(pressed())
                if ended:
                    break
            if output is not None:
                output.sync()
        except (OutputError, ScorerError) as error:
            raise BadInput(f"{error}; {_stand(output, count, len(items))}") from error
    if ended and count < len(items):
        note(f"{ENDS[signal.Signals(ended)]}; {_stand(output, count, len(items))}")
        return 128 + ended
    _summary(options, completer, totals)
    return 1 if totals.failed else 0


def follow(options: JobOptions, completer: Completer, items: Sequence[Item]) -> int:
    """`complete` for the other processes of a job: the same calls on the devices, without output.

    Only the first process knows the result of the job.

    Args:
      options: see `complete`.
      completer: see `complete`.
      items: see `complete`.
    """
    done = dict.fromkeys(np.flatnonzero(from_first(_mask({}, items))).tolist(), False)
    watched = _alone(options, completer, items)
    with interruptible(options.ends_softly) as pressed:
        for _ in _turns(completer, _left(items, done)[1], (lambda index, text: None) if watched else None):
            if largest(pressed()):
                break
    return 0


def _mask(done: dict[int, bool], items: Sequence[Item]) -> np.ndarray:
    return np.isin(np.arange(len(items)), list(done))


def _alone(options: JobOptions, completer: Completer, items: Sequence[Item]) -> bool:
    """Whether the job is one prompt whose text is shown as it comes."""
    shown = not options.prints_json and options.file is None and options.select is None
    return shown and len(items) == 1 and completer.tokenizer is not None


def _stand(output: Output | None, count: int, total: int) -> str:
    if output is None or not output.resumable:
        return f"{count} of {total} records were written"
    return f"{output.path} holds {count} of {total} records, and the same command goes on from there"


def _left(items: Sequence[Item], done: dict[int, bool]) -> tuple[list[int], list[int]]:
    """The items without a record: those that could not become a request, and the requests."""
    failed: list[int] = []
    asked: list[int] = []
    for index, item in enumerate(items):
        if index not in done:
            (asked if isinstance(item, Request) else failed).append(index)
    return failed, asked


def _turns(completer: Completer, asked: list[int], on_text: OnText | None) -> Iterator[Turn]:
    """The turns of the requests; the first turn is empty, so that failed lines need not wait."""
    yield Turn([], 0, 0, 0)
    yield from completer.turns(asked, on_text)


def _due(ready: Mapping[int, Record | None], left: collections.deque[int] | None) -> Iterator[int]:
    """The records that may be shown now: all, or those whose predecessors have been shown."""
    if left is None:
        yield from sorted(ready)
        return
    while left and left[0] in ready:
        yield left.popleft()


class _Show:
    """Shows a record: in the output file, on stdout as JSON or as text, and on stderr if it failed."""

    def __init__(self, options: JobOptions, completer: Completer, items: Sequence[Item], output: Output | None):
        self.options, self.completer, self.items, self.output = options, completer, items, output
        self.texts = not options.prints_json and output is None
        self.alone = _alone(options, completer, items)
        self.on_text: OnText | None = (lambda _, text: write(text)) if self.alone else None
        if self.alone:
            write(_prompt_text(completer, items[0]))

    def __call__(self, index: int, record: Record) -> None:
        item = self.items[index]
        if self.output is not None:
            self.output.append(record)
        if self.options.prints_json:
            write(jsonl.dumps(record.to_json()) + "\n")
        elif self.alone:
            write(_suffix_text(self.completer, item) + "\n")
        elif self.texts and not (record.finish_reason == "error" and not record.steps):
            text = _prompt_text(self.completer, item) + (record.text or "") + _suffix_text(self.completer, item)
            if record.text is None:
                text = " ".join(map(str, record.tokens))
            name = f" {record.id}" if record.id is not None else ""
            write(f"==> {index + 1}/{len(self.items)}{name} <==\n{text}\n\n")
        if record.error is not None:
            where = f"{self.options.input}, line {record.line}: " if record.line else f"prompt {index + 1}: "
            complain(where + record.error)


def _prompt_text(completer: Completer, item: Item) -> str:
    if isinstance(item, Record) or item.source is not None:
        return ""
    if isinstance(item.prompt, str) and not item.gaps:
        return item.prompt
    if completer.tokenizer is None or not item.ids or isinstance(item.prompt[0], dict):
        return ""
    return text_before(completer.tokenizer.decode(list(item.ids)), whole=False)


def _suffix_text(completer: Completer, item: Item) -> str:
    if isinstance(item, Record) or isinstance(item.suffix, str):
        return item.suffix or ""
    return completer.tokenizer.decode(list(item.suffix_ids)) if completer.tokenizer and item.suffix_ids else ""


def _summary(options: JobOptions, completer: Completer, totals: Totals) -> None:
    tokens, steps = totals.tokens, totals.steps
    if not steps:
        return
    known = completer.timing.known
    speed = f"{completer.timing.tokens_per_second:.0f} tokens/s" + (f", {known}" if known else "")
    way = options.way
    cache = "" if completer.decoding == "masked" else _lossy("cache", getattr(way, "cache", None), make_old)
    if completer.decoding == "masked":
        note(f"{tokens} new tokens in {steps} forward passes: {tokens / steps:.2f} tokens per pass, {speed}")
    elif completer.decoding == "searched":
        note(f"{tokens} new tokens{way.per_token if isinstance(way, SearchSettings) else ''}, {speed}")
    elif completer.decoding == "soft":
        note(f"{tokens} new tokens in {steps} steps: soft thinking, 1.00 tokens per step, {speed}")
    elif completer.decoding == "plain":
        note(f"{tokens} new tokens in {steps} steps: plain decoding, 1.00 tokens per step, {speed}{cache}")
    else:
        gain = f"{totals.decoded / steps:.2f} tokens per step against 1.00 of plain decoding"
        verifier = _lossy("verifier", getattr(way, "verifier", None), make_verifier)
        parts = f"drafter {getattr(way, 'drafter', None) or completer.decoding}{verifier}{cache}"
        note(f"{tokens} new tokens in {steps} steps: {gain}, {speed}, {parts}")


def _lossy(what: str, part: Any, make: Callable[[str], Any]) -> str:
    """A note on a verifier or cache with which the text may differ from plain decoding."""
    made = make(part) if isinstance(part, str) else part
    made = made[0] if isinstance(made, tuple) else made
    kind = made.kind if isinstance(made, Stored) else type(made)
    lossy = any(about.guarantee == "lossy" for about in abouts(kind))
    return f", {what} {part} (lossy)" if lossy else ""
