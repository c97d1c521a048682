"""`specjax generate`: completes prompts given as words, on stdin or in a file of JSON lines."""

import argparse
import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

from specjax.cli import add_model_options, bad_input, complain, note, write
from specjax.jobs import jsonl
from specjax.request import Record, Request


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of `specjax generate`."""
    add_model_options(parser)
    add = parser.add_argument
    add("prompts", nargs="*", metavar="PROMPT", help="text to complete (default: stdin, where that is no terminal)")
    add("--drafter", default="prompt_lookup", help="name:field=value,...; see `specjax drafters`; a+b fuses two")
    add("--verifier", default="coupled", help="see `specjax verifiers`")
    add("--top-k", type=int, default=0, help="keep the k likeliest tokens; 0 is off")
    add("--top-p", type=float, default=1.0, help="keep the smallest likeliest set of this mass; 1 is off")
    add("--min-p", type=float, default=0.0, help="keep tokens of at least this share of the likeliest's probability")
    add("--repetition-penalty", type=float, default=1.0, help="1 is off")
    add("--num-return-sequences", type=int, default=1, metavar="N", help="independent completions of each prompt")
    add("--stop", action="append", default=[], metavar="STRING", help="ends a text and is left out; may be repeated")
    add("--ignore-eos", action="store_true", help="go on after the end-of-sequence token")
    add("--batch-size", type=int, default=8, help="rows decoded together; changes speed, never text")
    add("--input", metavar="FILE.jsonl", help="lines of {prompt or messages, optionally id and generation options}")
    add("--output", metavar="FILE.jsonl", help="write records there as they finish")
    add("--strict", action="store_true", help="stop at the first bad line of --input, before any work")
    add("--json", action="store_true", help="print records as JSON, one a line")
    add("--logprobs", action="store_true", help="records carry log-probabilities of their tokens")


def command(args: argparse.Namespace) -> int:
    """Completes prompts for parsed options; returns the exit status."""
    with bad_input():
        engine, items = _prepare(args)
        output = Path(args.output).open("w", encoding="utf-8") if args.output else None
    with contextlib.ExitStack() as stack:
        if output is not None:
            stack.enter_context(output)
        return _complete(args, engine, items, output)


def _prepare(args: argparse.Namespace) -> tuple[Any, list[Request | Record]]:
    """Everything that can be wrong with the input is found here, the cheap checks first."""
    for name in ("num_return_sequences", "batch_size"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(args, name)}")
    if args.input and args.prompts:
        raise ValueError("give PROMPT or --input, not both")
    if args.strict and not args.input:
        raise ValueError("--strict is about the lines of --input, and there is none")
    if args.output:
        _check_output(args.output, args.input)
    lines = _read_lines(args) if args.input else None
    prompts = [] if lines is not None else args.prompts or [_read_stdin()]

    from specjax.engine import Engine, check_options

    defaults = {name: getattr(args, name) for name in jsonl.OPTIONS}
    check_options(defaults)
    engine = Engine(
        args.model, args.drafter, args.verifier, dtype=args.dtype, mesh=args.mesh, logprobs=args.logprobs
    )  # fmt: skip
    engine.check_stop(args.stop)
    if lines is None:
        items: list[Request | Record] = [engine.request(prompt, **defaults) for prompt in prompts]
    else:
        items = list(jsonl.to_requests(lines, engine, defaults))
        _check_lines(args, [(item.line, item.error) for item in items if isinstance(item, Record)], len(items))
    items = [item for item in items for _ in range(1 if isinstance(item, Record) else args.num_return_sequences)]
    return engine, items


def _check_output(output: str, source: str | None) -> None:
    path = Path(output)
    if path.is_dir():
        raise ValueError(f"--output {output!r} is a folder; give a file")
    if not path.parent.is_dir():
        raise ValueError(f"--output {output!r}: there is no folder {str(path.parent)!r}; make it first")
    if source and path.exists() and Path(source).exists() and path.samefile(source):
        raise ValueError("--output must not be the --input file")


def _read_lines(args: argparse.Namespace) -> list[jsonl.Line]:
    lines = jsonl.read(args.input)
    _check_lines(args, [(line.number, line.error) for line in lines if line.error is not None], len(lines))
    unknown = sorted({key for line in lines for key in line.unknown})
    if unknown:
        note(f"{args.input}: fields without a meaning here are left out: {', '.join(map(repr, unknown))}")
    return lines


def _check_lines(args: argparse.Namespace, bad: list[tuple[int | None, str | None]], count: int) -> None:
    if bad and args.strict:
        raise ValueError(f"{args.input}, line {bad[0][0]}: {bad[0][1]}")
    if len(bad) == count:
        why = f"; line {bad[0][0]}: {bad[0][1]}" if bad else ""
        raise ValueError(f"the input file {args.input!r} has no valid line{why}")


def _read_stdin() -> str:
    if sys.stdin is None or sys.stdin.isatty():
        raise ValueError("nothing to complete: give PROMPT, --input FILE.jsonl, or text on stdin")
    text = sys.stdin.buffer.read().decode()
    text = text.removesuffix("\n")
    if not text:
        raise ValueError("nothing to complete: give PROMPT, --input FILE.jsonl, or text on stdin (it is empty)")
    return text


def _complete(args: argparse.Namespace, engine: Any, items: list[Request | Record], output: TextIO | None) -> int:
    requests = [item for item in items if isinstance(item, Request)]
    texts = not args.json and output is None
    alone = texts and len(items) == 1 and engine.model.tokenizer is not None
    if alone:
        write(_prompt_text(engine, requests[0]))
    on_text: Callable[[int, str], None] | None = (lambda _, text: write(text)) if alone else None
    records = engine.run(
        requests, batch_size=args.batch_size, stop=args.stop, ignore_eos=args.ignore_eos, on_text=on_text
    )
    done: list[Record] = []
    with _progress(len(items), shown=not (texts and sys.stdout.isatty())) as advance:
        for number, item in enumerate(items, start=1):  # failed lines keep their place among the others
            record = item if isinstance(item, Record) else next(records)
            done.append(record)
            if output is not None:
                output.write(jsonl.dumps(record.to_json()) + "\n")
                output.flush()
            if args.json:
                write(jsonl.dumps(record.to_json()) + "\n")
            elif alone:
                write("\n")
            elif texts and not (record.finish_reason == "error" and not record.steps):
                prompt = "" if isinstance(item, Record) else _prompt_text(engine, item)
                text = " ".join(map(str, record.tokens)) if record.text is None else prompt + record.text
                name = f" {record.id}" if record.id is not None else ""
                write(f"==> {number}/{len(items)}{name} <==\n{text}\n\n")
            if record.error is not None:
                where = f"{args.input}, line {record.line}: " if record.line else f"prompt {number}: "
                complain(where + record.error)
            advance()
    _summary(args, engine, done)
    return 1 if any(record.finish_reason == "error" for record in done) else 0


def _prompt_text(engine: Any, request: Request) -> str:
    if isinstance(request.prompt, str):
        return request.prompt
    if engine.model.tokenizer is None or isinstance(request.prompt[0], dict):
        return ""
    return engine.model.tokenizer.decode(list(request.ids))


def _summary(args: argparse.Namespace, engine: Any, records: list[Record]) -> None:
    ran = [record for record in records if record.steps]
    tokens, steps = sum(record.new_tokens for record in ran), sum(record.steps for record in ran)
    if not steps:
        return
    speed = f"{engine.timing.tokens_per_second:.0f} tokens/s"
    if engine.decoder.drafter.depth == 0:
        note(f"{tokens} new tokens in {steps} steps: plain decoding, 1.00 tokens a step, {speed}")
    else:
        decoded = sum(record.tokens_per_step * record.steps for record in ran)  # those behind a stop string too
        gain = f"{decoded / steps:.2f} tokens a step against 1.00 of plain decoding"
        note(f"{tokens} new tokens in {steps} steps: {gain}, {speed}, drafter {args.drafter}")


@contextlib.contextmanager
def _progress(total: int, shown: bool) -> Iterator[Callable[[], None]]:
    if total < 2 or not shown or not sys.stderr.isatty():
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("generate", total=total)
        yield lambda: progress.advance(task)
