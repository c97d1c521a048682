"""The `specjax` command. What needs a model is imported where it is used, so that `--help` and errors come quickly.

Exit status: 0, or 1 when a record failed, or 2 on bad input with one line on stderr.
"""

import argparse
import contextlib
import io
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn, TextIO

from specjax.jobs import jsonl
from specjax.request import Record, Request

QUIET = {"TRANSFORMERS_VERBOSITY": "error", "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1", "TOKENIZERS_PARALLELISM": "false"}


class BadInput(Exception):
    """What the user gave cannot be used: one line on stderr, exit status 2."""


@contextlib.contextmanager
def bad_input() -> Iterator[None]:
    """Around work that only prepares: its ValueErrors and OSErrors are the user's input."""
    try:
        yield
    except (ValueError, OSError) as error:
        raise BadInput(str(error)) from error


class Parser(argparse.ArgumentParser):
    """Reports a mistake in one line; no abbreviated options."""

    def __init__(self, **kwargs: Any):
        super().__init__(allow_abbrev=False, formatter_class=argparse.ArgumentDefaultsHelpFormatter, **kwargs)

    def error(self, message: str) -> NoReturn:
        raise BadInput(f"{message} (see {self.prog} --help)")


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Options that `generate` and `bench` share."""
    parser.add_argument("--model", help="folder, shipped name or hub id (default: the shipped target)")
    parser.add_argument("--dtype", help="float32, bfloat16 or float16 (default: float32 on a CPU, else bfloat16)")
    parser.add_argument("--mesh", help="devices by axis, such as data=2,model=4 (default: one device)")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy")
    parser.add_argument("--seed", type=int, default=0, help="with the prompt it decides the noise")
    parser.add_argument("--max-new-tokens", type=int, default=128, help="new tokens a prompt, at most")


def _generate_options(parser: argparse.ArgumentParser) -> None:
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


def generate(args: argparse.Namespace) -> int:
    """`specjax generate`."""
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
        _write(_prompt_text(engine, requests[0]))
    on_text: Callable[[int, str], None] | None = (lambda _, text: _write(text)) if alone else None
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
                _write(jsonl.dumps(record.to_json()) + "\n")
            elif alone:
                _write("\n")
            elif texts and not (record.finish_reason == "error" and not record.steps):
                prompt = "" if isinstance(item, Record) else _prompt_text(engine, item)
                text = " ".join(map(str, record.tokens)) if record.text is None else prompt + record.text
                name = f" {record.id}" if record.id is not None else ""
                _write(f"==> {number}/{len(items)}{name} <==\n{text}\n\n")
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


def drafters(args: argparse.Namespace) -> int:
    """`specjax drafters`."""
    from specjax.registry import DRAFTERS

    return _list_entries(DRAFTERS)


def verifiers(args: argparse.Namespace) -> int:
    """`specjax verifiers`."""
    from specjax.registry import VERIFIERS

    return _list_entries(VERIFIERS)


def _list_entries(table: dict[str, Any]) -> int:
    rows = []
    for name, entry in table.items():
        own = dict(entry.fields)
        if entry.expander:
            name_of, _, settings = entry.expander.partition(":")
            own |= {"expander": name_of} | dict(item.split("=") for item in settings.split(",") if item)
        fields = ",".join(f"{field}={value}" for field, value in own.items())
        rows.append((f"{name}:{fields}" if fields else name, f"{entry.summary} [{entry.source}]"))
    return _columns(rows)


def models(args: argparse.Namespace) -> int:
    """`specjax models`."""
    import json
    import math

    from specjax.models import shipped, weights

    rows = []
    with bad_input():
        for name, folder in shipped().items():
            config = json.loads((folder / "config.json").read_text())
            count = sum(math.prod(tensor.shape) for tensor in weights.read_folder(folder).values())
            shape = f"{config['num_hidden_layers']} layers of width {config['hidden_size']}"
            about = f"{config['model_type']}, {shape}, vocabulary {config['vocab_size']}"
            rows.append((name, f"{count / 1e6:.2f}M parameters", f"{about} [{folder}]"))
    return _columns(rows)


def _columns(rows: Sequence[tuple[str, ...]]) -> int:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        _write("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() + "\n")
    return 0


def _bench_options(parser: argparse.ArgumentParser) -> None:
    from specjax.bench.run import add_options

    add_options(parser)


def bench(args: argparse.Namespace) -> int:
    """`specjax bench`."""
    from specjax.bench.run import command

    return command(args)


def _train_options(parser: argparse.ArgumentParser) -> None:
    from specjax.train.command import add_options

    add_options(parser)


def train(args: argparse.Namespace) -> int:
    """`specjax train`."""
    from specjax.train.command import command

    return command(args)


def _datastore_options(parser: argparse.ArgumentParser) -> None:
    from specjax.jobs.datastore import add_options

    add_options(parser)


def datastore(args: argparse.Namespace) -> int:
    """`specjax datastore`."""
    from specjax.jobs.datastore import command

    return command(args)


COMMANDS: dict[str, tuple[str, Callable[[argparse.ArgumentParser], None] | None, Callable[..., int]]] = {
    "generate": ("complete prompts", _generate_options, generate),
    "bench": ("plain decoding against drafters: speed, tokens a step, identical text", _bench_options, bench),
    "train": ("train a drafter for a target", _train_options, train),
    "datastore": ("build a retrieval datastore from text files", _datastore_options, datastore),
    "drafters": ("list the drafters: fields, what they do, source", None, drafters),
    "verifiers": ("list the verifiers: fields, what they do, source", None, verifiers),
    "models": ("list the shipped models", None, models),
}


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def note(message: str) -> None:
    """One line on stderr."""
    print(f"specjax: {' '.join(message.split())}", file=sys.stderr, flush=True)


def complain(message: str) -> None:
    """One line on stderr about something that went wrong."""
    note(f"error: {message}")


def run_command(command: Callable[[], int]) -> int:
    """Runs a command, and turns what ends it into an exit status."""
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that cannot show a character must not end the run
    try:
        status = command()
        sys.stdout.flush()
        return status
    except BadInput as error:
        complain(str(error))
        return 2
    except BrokenPipeError:
        with contextlib.suppress(OSError, ValueError):  # nothing may be written at exit either
            stdout = sys.stdout.fileno()
            os.dup2(os.open(os.devnull, os.O_WRONLY), stdout)
        return 141
    except OSError as error:  # a disk that filled up
        complain(str(error))
        return 1
    except KeyboardInterrupt:
        note("interrupted")
        return 130


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    return run_command(lambda: _dispatch(words))


def _dispatch(words: list[str]) -> int:
    listing = "\n".join(f"  {name:10} {about}" for name, (about, _, _) in COMMANDS.items())
    top = Parser(prog="specjax", usage="specjax COMMAND ...", description="Fast language-model decoding in JAX.")
    top.formatter_class = argparse.RawDescriptionHelpFormatter
    top.epilog = f"commands:\n{listing}\n\n`specjax COMMAND --help` lists a command's options."
    top.add_argument("--version", action="store_true", help="print the version")
    if not words or words[0].startswith("-"):
        with _help_exits():
            if top.parse_args(words).version:
                from specjax import __version__

                _write(f"specjax {__version__}\n")
                return 0
            top.error("give a command: " + ", ".join(COMMANDS))
        return 0
    if words[0] not in COMMANDS:
        top.error(f"unknown command {words[0]!r}; choose {', '.join(COMMANDS)}")
    about, add_options, command = COMMANDS[words[0]]
    parser = Parser(prog=f"specjax {words[0]}", description=about[0].upper() + about[1:] + ".")
    if add_options is not None:
        add_options(parser)
    rest = words[1:]
    cut = rest.index("--") if "--" in rest else len(rest)  # intermixed parsing would lose what follows
    args = None
    with _help_exits():
        args = parser.parse_intermixed_args(rest[:cut])
    if args is None:
        return 0
    if rest[cut + 1 :]:
        if not hasattr(args, "prompts"):
            parser.error(f"unrecognized arguments: {' '.join(rest[cut + 1 :])}")
        args.prompts += rest[cut + 1 :]
    return command(args)


@contextlib.contextmanager
def _help_exits() -> Iterator[None]:
    """`--help` prints and exits inside argparse; here it only ends the parsing."""
    try:
        yield
    except SystemExit as done:
        if done.code:
            raise
