"""The `specjax` command. What needs a model is imported where it is used, so that `--help` and errors come quickly.

Exit status: 0, or 1 when a record failed, or 2 on bad input with one line on stderr, or 3 where another process of the same job
died.
"""

import argparse
import contextlib
import io
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

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


class Formatter(argparse.ArgumentDefaultsHelpFormatter):
    """Shows the defaults that say something."""

    def _get_help_string(self, action):
        if action.default is None or action.default is False or action.default == []:
            return action.help
        return super()._get_help_string(action)


class Parser(argparse.ArgumentParser):
    """Reports a mistake in one line; no abbreviated options."""

    def __init__(self, **kwargs: Any):
        super().__init__(allow_abbrev=False, formatter_class=Formatter, **kwargs)

    def error(self, message: str) -> NoReturn:
        raise BadInput(f"{message} (see {self.prog} --help)")


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Options that `generate` and `bench` share."""
    parser.add_argument("--model", help="folder, shipped name or hub id (default: the shipped target)")
    parser.add_argument("--dtype", help="float32, bfloat16 or float16 (default: float32 on a CPU, else bfloat16)")
    parser.add_argument("--mesh", help="devices by axis, such as data=2,model=2,context=2 (default: one device)")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy")
    parser.add_argument("--seed", type=int, default=0, help="with the prompt it decides the noise")
    parser.add_argument("--max-new-tokens", type=int, default=128, help="new tokens a prompt, at most")


def _generate_options(parser: argparse.ArgumentParser) -> None:
    from specjax.jobs.generate import add_options

    add_options(parser)


def generate(args: argparse.Namespace) -> int:
    """`specjax generate`."""
    from specjax.jobs.generate import command

    return command(args)


def drafters(args: argparse.Namespace) -> int:
    """`specjax drafters`."""
    from specjax.registry import DRAFTERS, RULES

    _list_entries(DRAFTERS)
    write("rule=NAME,length=8,... of a drafter with an expander\n")
    return _list_entries(RULES)


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


def policies(args: argparse.Namespace) -> int:
    """`specjax policies`."""
    from specjax.registry import CACHES, SAMPLERS, UNMASKS

    write("--unmask\n")
    _list_entries(UNMASKS)
    write("--unmask, of models without a mask\n")
    _list_entries(SAMPLERS)
    write("--cache\n")
    return _list_entries(CACHES)


def models(args: argparse.Namespace) -> int:
    """`specjax models`."""
    import json
    import math

    from specjax.models import shipped, tensors

    rows = []
    with bad_input():
        for name, folder in shipped().items():
            config = json.loads((folder / "config.json").read_text())
            count = sum(math.prod(tensor.shape) for tensor in tensors.read_folder(folder).values())
            shape = f"{config['num_hidden_layers']} layers of width {config['hidden_size']}"
            about = f"{config['model_type']}, {shape}, vocabulary {config['vocab_size']}"
            rows.append((name, f"{count / 1e6:.2f}M parameters", f"{about} [{folder}]"))
    return _columns(rows)


def _columns(rows: Sequence[tuple[str, ...]]) -> int:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        write("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() + "\n")
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


def _convert_options(parser: argparse.ArgumentParser) -> None:
    from specjax.jobs.convert import add_options

    add_options(parser)


def convert(args: argparse.Namespace) -> int:
    """`specjax convert`."""
    from specjax.jobs.convert import command

    return command(args)


def _plan_options(parser: argparse.ArgumentParser) -> None:
    from specjax.plan.command import add_options

    add_options(parser)


def plan(args: argparse.Namespace) -> int:
    """`specjax plan`."""
    from specjax.plan.command import command

    return command(args)


COMMANDS: dict[str, tuple[str, Callable[[argparse.ArgumentParser], None] | None, Callable[..., int]]] = {
    "generate": ("complete prompts", _generate_options, generate),
    "bench": ("plain decoding against drafters: speed, tokens a step, identical text", _bench_options, bench),
    "train": ("train a drafter for a target", _train_options, train),
    "datastore": ("build a retrieval datastore from text files", _datastore_options, datastore),
    "convert": ("write a model as an Orbax checkpoint, or in another type", _convert_options, convert),
    "plan": (
        "compile a step for a TPU slice or an H100 machine without either, and say what it costs",
        _plan_options,
        plan,
    ),
    "drafters": ("list the drafters: fields, what they do, source", None, drafters),
    "verifiers": ("list the verifiers: fields, what they do, source", None, verifiers),
    "policies": ("list the unmask and cache policies of diffusion models", None, policies),
    "models": ("list the shipped models", None, models),
}


def write(text: str) -> None:
    """Text on stdout, at once."""
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

                write(f"specjax {__version__}\n")
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
    args.words = words
    return command(args)


@contextlib.contextmanager
def _help_exits() -> Iterator[None]:
    """`--help` prints and exits inside argparse; here it only ends the parsing."""
    try:
        yield
    except SystemExit as done:
        if done.code:
            raise
