"""The `specjax` command. What needs a model is imported where it is used, so that `--help` and errors come quickly.

Exit status: 0, or 1 when a record failed, or 2 on bad input with one line on stderr, or 3 where another process of the same job
died.
"""

import argparse
import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from specjax.terminal import Parser, bad_input, run_command, write


def _generate_options(parser: argparse.ArgumentParser) -> None:
    from specjax.jobs.generate import add_options

    add_options(parser)


def generate(args: argparse.Namespace) -> int:
    """`specjax generate`."""
    from specjax.jobs.generate import command

    return command(args)


def drafters(args: argparse.Namespace) -> int:
    """`specjax drafters`."""
    from specjax.spec.registry import DRAFTERS, RULES

    _list_entries(DRAFTERS)
    write("rule=NAME,length=8,... of a drafter with an expander\n")
    return _list_entries(RULES)


def verifiers(args: argparse.Namespace) -> int:
    """`specjax verifiers`."""
    from specjax.spec.registry import VERIFIERS

    return _list_entries(VERIFIERS)


def _list_entries(table: dict[str, Any]) -> int:
    rows, guaranteed = [], any(entry.guarantee for entry in table.values())
    for name, entry in table.items():
        fields = ",".join(f"{field}={value}" for field, value in entry.listed.items())
        worth = [entry.guarantee or "-"] if guaranteed else []
        rows.append((f"{name}:{fields}" if fields else name, *worth, f"{entry.summary} [{entry.source}]"))
    return _columns(rows)


def policies(args: argparse.Namespace) -> int:
    """`specjax policies`."""
    from specjax.spec.registry import CACHES, SAMPLERS, UNMASKS

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
