"""A job's loop: what the engine finishes goes to the output file, to stdout, or both."""

import argparse
import collections
import dataclasses
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from specjax.jobs import jsonl
from specjax.jobs.output import Item, Output, OutputError
from specjax.jobs.progress import bar_fits, interruptible, progress
from specjax.serve.request import Record, Request
from specjax.serve.slots import Turn
from specjax.sharding.distributed import anywhere, from_first
from specjax.spec.assemble import DEFAULT_DRAFTER
from specjax.terminal import BadInput, complain, note, write


@dataclasses.dataclass
class Totals:
    """What the records of this run add up to; `failed` counts those of earlier runs too."""

    tokens: int = 0
    steps: int = 0
    decoded: float = 0.0  # tokens behind a stop string too
    failed: int = 0

    def add(self, record: Record) -> None:
        """Counts one more record."""
        self.failed += record.finish_reason == "error"
        self.tokens += record.new_tokens
        self.steps += record.steps
        self.decoded += record.tokens_per_step * record.steps


def complete(args: argparse.Namespace, engine: Any, items: list[Item], output: Output | None) -> int:
    """Completes what has no record yet; returns the exit status.

    Args:
      args: options of `specjax generate`.
      engine: a `specjax.serve.engine.Engine`.
      items: requests, and failed records of lines that could not become one, in the order of the input.
      output: an open output, or None.

    Raises:
      BadInput: where the output cannot be written any more.
    """
    done = {} if output is None else output.done
    from_first(_mask(done, items))
    count = len(done)
    if output is not None and done:
        note(f"{count} of {len(items)} records are in {output.path} already")
    totals = Totals(failed=sum(done.values()))
    show = _Show(args, engine, items, output)
    ready = {i: item for i, item in enumerate(items) if isinstance(item, Record) and i not in done}
    left = collections.deque(i for i in range(len(items)) if i not in done)
    quiet = show.texts and sys.stdout.isatty()
    bar = len(items) > 1 and not quiet and bar_fits()
    with (
        interruptible(output is not None) as pressed,
        progress(len(items), count, engine.timing, bar, args.progress) as advance,
    ):
        try:
            for turn in _turns(args, engine, items, done, show.on_text):
                ready.update(turn.finished)
                due = list(_due(ready, None if args.unordered else left))
                for index in due:
                    record = ready.pop(index)
                    show(index, record)
                    totals.add(record)
                    count += 1
                advance(turn, len(due))
                if output is not None:
                    output.tick()
                if anywhere(pressed()):
                    break
            if output is not None:
                output.sync()
        except OutputError as error:
            raise BadInput(f"{error}; {_stand(output, count, len(items))}") from error
    status = 130 if count < len(items) else 1 if totals.failed else 0
    if status == 130:
        note(f"interrupted; {_stand(output, count, len(items))}")
    else:
        _summary(args, engine, totals)
    return status


def follow(args: argparse.Namespace, engine: Any, items: list[Item]) -> int:
    """`complete` in the other processes of a job of several: the same calls on the devices, and nothing that is written. What
    became of the job, the first process knows.

    Args:
      args: see `complete`.
      engine: likewise.
      items: likewise.
    """
    done = dict.fromkeys(np.flatnonzero(from_first(_mask({}, items))).tolist(), False)
    watched = _alone(args, engine, items, args.output is not None)
    with interruptible(args.output is not None) as pressed:
        for _ in _turns(args, engine, items, done, (lambda index, text: None) if watched else None):
            if anywhere(pressed()):
                break
    return 0


def _mask(done: dict[int, bool], items: list[Item]) -> np.ndarray:
    return np.isin(np.arange(len(items)), list(done))


def _alone(args: argparse.Namespace, engine: Any, items: list[Item], written: bool) -> bool:
    """Whether the job is one prompt whose text is shown as it comes."""
    return not args.json and not written and len(items) == 1 and engine.model.tokenizer is not None


def _stand(output: Output | None, count: int, total: int) -> str:
    if output is None or not output.resumable:
        return f"{count} of {total} records were written"
    return f"{output.path} holds {count} of {total} records, and the same command goes on from there"


def _turns(args, engine, items, done, on_text) -> Iterator[Turn]:
    """Turns whose records have the index of their item; the first brings nothing, so that failed lines need not wait."""
    yield Turn([], 0, 0, 0)
    requests = {i: item for i, item in enumerate(items) if isinstance(item, Request)}
    # of the whole input, whatever is done: noise, shapes and so the text are those of a job that was never interrupted
    keys = engine.keys(list(requests.values()))
    capacity = engine.capacity(list(requests.values()))
    prefix = engine.shared_prefix(list(requests.values())) if args.shared_prefix else ()
    chosen = [(at, i) for at, i in enumerate(requests) if i not in done]
    turns = engine.turns(
        [requests[i] for _, i in chosen],
        slots=min(args.batch_size, len(requests)),
        stop=args.stop,
        ignore_eos=args.ignore_eos,
        on_text=on_text,
        capacity=capacity,
        keys=keys[[at for at, _ in chosen]],
        prefix=prefix,
    )
    for turn in turns:
        yield dataclasses.replace(turn, finished=[(chosen[at][1], record) for at, record in turn.finished])


def _due(ready: dict[int, Record], left: collections.deque[int] | None) -> Iterator[int]:
    """The records that may be shown now: all, or those that all before are shown of."""
    if left is None:
        yield from sorted(ready)
        return
    while left and left[0] in ready:
        yield left.popleft()


class _Show:
    """Where a record goes: the output file, stdout as JSON or as text, and stderr if it failed."""

    def __init__(self, args: argparse.Namespace, engine: Any, items: list[Item], output: Output | None):
        self.args, self.engine, self.items, self.output = args, engine, items, output
        self.texts = not args.json and output is None
        self.alone = _alone(args, engine, items, output is not None)
        self.on_text: Callable[[int, str], None] | None = (lambda _, text: write(text)) if self.alone else None
        if self.alone:
            write(_prompt_text(engine, items[0]))

    def __call__(self, index: int, record: Record) -> None:
        item = self.items[index]
        if self.output is not None:
            self.output.append(record)
        if self.args.json:
            write(jsonl.dumps(record.to_json()) + "\n")
        elif self.alone:
            write(_suffix_text(self.engine, item) + "\n")
        elif self.texts and not (record.finish_reason == "error" and not record.steps):
            text = _prompt_text(self.engine, item) + (record.text or "") + _suffix_text(self.engine, item)
            if record.text is None:
                text = " ".join(map(str, record.tokens))
            name = f" {record.id}" if record.id is not None else ""
            write(f"==> {index + 1}/{len(self.items)}{name} <==\n{text}\n\n")
        if record.error is not None:
            where = f"{self.args.input}, line {record.line}: " if record.line else f"prompt {index + 1}: "
            complain(where + record.error)


def _prompt_text(engine: Any, item: Item) -> str:
    if isinstance(item, Record):
        return ""
    if isinstance(item.prompt, str):
        return item.prompt
    if engine.model.tokenizer is None or isinstance(item.prompt[0], dict):
        return ""
    return engine.model.tokenizer.decode(list(item.ids))


def _suffix_text(engine: Any, item: Item) -> str:
    if isinstance(item, Record) or isinstance(item.suffix, str):
        return item.suffix or ""
    return engine.model.tokenizer.decode(list(item.suffix_ids)) if engine.model.tokenizer and item.suffix_ids else ""


def _summary(args: argparse.Namespace, engine: Any, totals: Totals) -> None:
    tokens, steps = totals.tokens, totals.steps
    if not steps:
        return
    speed = f"{engine.timing.tokens_per_second:.0f} tokens/s"
    if engine.model.masked:
        note(f"{tokens} new tokens in {steps} forward passes: {tokens / steps:.2f} tokens a pass, {speed}")
    elif engine.decoder.drafter.depth == 0:
        note(f"{tokens} new tokens in {steps} steps: plain decoding, 1.00 tokens a step, {speed}")
    else:
        gain = f"{totals.decoded / steps:.2f} tokens a step against 1.00 of plain decoding"
        note(f"{tokens} new tokens in {steps} steps: {gain}, {speed}, drafter {args.drafter or DEFAULT_DRAFTER}")
