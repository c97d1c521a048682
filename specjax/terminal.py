"""What the commands share of the terminal: how options are read, lines written, and ends turned into an exit status.

Exit status: 0, or 1 when a record failed, or 2 on bad input with one line on stderr, or 3 where another process of the same job
died; 130 after Ctrl-C, 143 after SIGTERM (128 and the signal's number, as schedulers expect), 141 where nobody reads stdout.
"""

import argparse
import contextlib
import dataclasses
import functools
import io
import logging
import os
import signal
import sys
import threading
import typing
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn, TypeVar, cast

from specjax import names, startup

QUIET = {"TRANSFORMERS_VERBOSITY": "error", "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1", "TOKENIZERS_PARALLELISM": "false"}


ENDS = {signal.SIGINT: "interrupted", signal.SIGTERM: "ended by SIGTERM"}
"""How a line on stderr begins that says what ended a command."""
Options = TypeVar("Options")


class BadInput(Exception):
    """What the user gave cannot be used: one line on stderr, exit status 2."""


class Terminated(KeyboardInterrupt):
    """SIGTERM came."""


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
        if action.default is None or action.default is False or action.default in ([], ()):
            return action.help
        return super()._get_help_string(action)


class Parser(argparse.ArgumentParser):
    """Reports a mistake in one line; no abbreviated options."""

    def __init__(self, **kwargs: Any):
        super().__init__(allow_abbrev=False, formatter_class=Formatter, **kwargs)

    @property
    def words(self) -> list[str]:
        """Its flags, and its arguments by name."""
        return [word for action in self._actions for word in action.option_strings or [action.dest]]

    def error(self, message: str) -> NoReturn:
        unknown = message.removeprefix("unrecognized arguments: ")
        if unknown != message and unknown.startswith("-"):
            message = names.unrecognized(unknown.split()[0].partition("=")[0], self.words)
        raise BadInput(f"{message} (see {self.prog} --help)")


def flag(name: str) -> str:
    """A field's name on the command line.

    >>> flag("batch_size")
    '--batch-size'
    """
    return f"--{name.replace('_', '-')}"


def add_fields(parser: argparse.ArgumentParser, cls: type, **words: str) -> None:
    """Adds an option, or where its metadata says so an argument, for every field of a dataclass of options.

    Args:
      parser: to add to.
      cls: see `specjax.serve.options`. A field that is a tuple may be repeated; one whose metadata has `hidden` is no option.
      **words: put into the help texts, where they stand in braces.
    """
    for field in dataclasses.fields(cls):
        about = field.metadata
        if about.get("hidden"):
            continue
        text = functools.reduce(lambda text, word: text.replace(f"{{{word}}}", words[word]), words, about["help"])
        more: dict[str, Any] = {name: about[name] for name in ("metavar", "choices", "nargs") if name in about}
        kinds = [kind for kind in typing.get_args(field.type) or (field.type,) if kind in (int, float)]
        needed = field.default is dataclasses.MISSING
        if field.type is bool:
            more["action"] = "store_true"
        else:
            several = typing.get_origin(field.type) is tuple and "parse" not in about
            more |= {"type": about.get("parse") or kinds[0]} if kinds or "parse" in about else {}
            more |= {"action": "append"} if several and "nargs" not in about else {}
            default: Any = field.default
            more |= {} if needed else {"default": list(default) if several else default}
        if about.get("positional"):
            parser.add_argument(field.name, help=text, **more)
        else:
            parser.add_argument(flag(field.name), help=text, required=needed, **more)


def from_args(cls: type[Options], args: argparse.Namespace) -> Options:
    """What a parser with the fields of `cls` found; lists become tuples, and a hidden field that nobody set is its default."""
    found = {name: tuple(value) if isinstance(value, list) else value for name, value in vars(args).items()}
    fields = dataclasses.fields(cast(Any, cls))
    return cls(**{f.name: found[f.name] for f in fields if f.name in found or not f.metadata.get("hidden")})


def run_program(
    prog: str,
    about: str,
    cls: type[Options],
    command: Callable[[Options], int],
    argv: Sequence[str] | None,
    **words: str,
) -> int:
    """The whole of a program whose options are the fields of `cls`; returns the exit status.

    Args:
      prog: how it is called.
      about: what it does.
      cls: its options.
      command: does it.
      argv: the command line; None: that of the process.
      **words: see `add_fields`.
    """

    def parse_and_run() -> int:
        parser = Parser(prog=prog, description=about)
        add_fields(parser, cls, **words)
        return command(from_args(cls, parser.parse_args(argv)))

    return run_command(parse_and_run)


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


class _Notes(logging.Handler):
    """Messages of the package as lines on stderr."""

    def emit(self, record: logging.LogRecord) -> None:
        note(record.getMessage())


@contextlib.contextmanager
def talking(verbose: bool) -> Iterator[None]:
    """Lets the package say on stderr, where `verbose`, what it loads and how it reads it; else warnings alone."""
    log, handler = logging.getLogger("specjax"), _Notes()
    before, others = log.level, log.handlers
    log.handlers = [handler]
    log.setLevel(logging.INFO if verbose else logging.WARNING)
    try:
        yield
    finally:
        log.handlers = others
        log.setLevel(before)


def run_command(command: Callable[[], int]) -> int:
    """Runs a command, and turns what ends it into an exit status."""
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    logging.getLogger("jax._src.xla_bridge").addFilter(startup.no_spare_plugin)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that cannot show a character must not end the run
    try:
        with _terminable(), talking(False):
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
    except Terminated:
        note(ENDS[signal.SIGTERM])
        return 128 + signal.SIGTERM
    except KeyboardInterrupt:
        note(ENDS[signal.SIGINT])
        return 128 + signal.SIGINT


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
    """SIGTERM ends the command as Ctrl-C does, where nobody else handles it."""
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return

    def handle(number: int, frame: Any) -> None:
        raise Terminated

    signal.signal(signal.SIGTERM, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
