"""What the commands share: reading options, writing lines, and turning the end of a run into an exit status.

The exit status is one of these:

- 0, or 1 if a record failed;
- 2 for bad input, with one line on stderr;
- 3 if another process of the same job died;
- 130 after Ctrl-C and 143 after SIGTERM (128 plus the signal's number, as schedulers expect);
- 141 if nobody reads stdout.
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
import textwrap
import threading
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn, TypeVar, cast

from specjax import names, startup

QUIET = {"TRANSFORMERS_VERBOSITY": "error", "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1", "TOKENIZERS_PARALLELISM": "false"}


ENDS = {signal.SIGINT: "interrupted", signal.SIGTERM: "ended by SIGTERM"}
"""The beginning of the line on stderr about a signal that ended a command."""
Options = TypeVar("Options")


class BadInput(Exception):
    """The user's input cannot be used: one line on stderr, exit status 2."""


class Terminated(KeyboardInterrupt):
    """SIGTERM came."""


@contextlib.contextmanager
def bad_input() -> Iterator[None]:
    """Around work that only prepares: its ValueErrors and OSErrors become errors of the user's input."""
    try:
        yield
    except (ValueError, OSError) as error:
        raise BadInput(str(error)) from error


@dataclasses.dataclass(frozen=True)
class Help:
    """How the options of a command are shown.

    Attributes:
      groups: by title, the names of fields in order, separated by spaces. Only `--help all` shows names after a `|`.
        Names that the command does not have are skipped.
      examples: command lines.
    """

    groups: Mapping[str, str]
    examples: tuple[str, ...]

    def placed(self) -> Iterator[tuple[str, list[str], list[str]]]:
        """Each title with its usual names and its other names."""
        for title, names_of_group in self.groups.items():
            usual, _, others = names_of_group.partition("|")
            yield title, usual.split(), others.split()


class Formatter(argparse.ArgumentDefaultsHelpFormatter):
    """Shows the defaults that matter, keeps indented lines, and limits the usage line to required options."""

    def _get_help_string(self, action):
        if action.default is None or action.default is False or action.default in ([], ()):
            return action.help
        return super()._get_help_string(action)

    def _fill_text(self, text, width, indent):
        fill = functools.partial(textwrap.fill, width=width, break_long_words=False, break_on_hyphens=False)
        return "\n".join(line if line.startswith(" ") else fill(line) for line in text.splitlines())

    def add_usage(self, usage, actions, groups, prefix=None):
        actions = list(actions)
        needed = [own for own in actions if own.required or not own.option_strings or isinstance(own, _ShowHelp)]
        if len(needed) < len(actions):
            needed.insert(0, argparse.Action([], "option", nargs="*", metavar="OPTION"))
        super().add_usage(usage, needed, groups, prefix)


class _ShowHelp(argparse.Action):
    """`--help` shows the usual options, and `--help all` every option."""

    def __init__(self, option_strings: Sequence[str], dest: str, whole: "Callable[[], Parser] | None" = None):
        super().__init__(option_strings, argparse.SUPPRESS, "?", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
        self.metavar, self.whole = "all", whole

    def __call__(self, parser, namespace, values, option_string=None):
        shown = self.whole() if self.whole and values == "all" else parser
        shown.print_help()
        parser.exit()


class Parser(argparse.ArgumentParser):
    """Reports a mistake in one line; accepts no abbreviated options.

    Args:
      whole: makes the parser whose help `--help all` shows; None for this one.
    """

    def __init__(self, whole: "Callable[[], Parser] | None" = None, **kwargs: Any):
        super().__init__(allow_abbrev=False, add_help=False, formatter_class=Formatter, **kwargs)
        self.add_argument("-h", "--help", action=_ShowHelp, whole=whole)

    @property
    def words(self) -> list[str]:
        """Its flags, and its arguments by name."""
        return [word for action in self._actions for word in action.option_strings or [action.dest]]

    @property
    def left_out(self) -> list[str]:
        """The flags that the help does not show."""
        left = [action for action in self._actions if action.help == argparse.SUPPRESS]
        return [action.option_strings[0] for action in left if not isinstance(action, _ShowHelp)]

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


def add_fields(
    parser: argparse.ArgumentParser,
    cls: type,
    words: Mapping[str, str] | None = None,
    shown: Help | None = None,
    whole: bool = True,
) -> None:
    """Adds an option for every field of a dataclass of options, or an argument if the field's metadata says so.

    Args:
      parser: the parser to add to.
      cls: see `specjax.serve.options`. A field that is a tuple may be repeated; one whose metadata has `hidden` is no
        option.
      words: values for the names in braces in the help texts.
      shown: how the options are grouped; None shows none.
      whole: whether the parser's help shows all of them, or only the usual ones.
    """
    fields = {field.name: field for field in dataclasses.fields(cls) if not field.metadata.get("hidden")}
    for title, usual, others in shown.placed() if shown else ():
        group = parser.add_argument_group(title)
        for name in (own for own in (*usual, *others) if own in fields):
            _add_field(group, fields.pop(name), whole or name in usual, words or {})
    for field in fields.values():
        _add_field(parser, field, True, words or {})


def _add_field(place: Any, field: dataclasses.Field, visible: bool, words: Mapping[str, str]) -> None:
    """Adds a field to a parser or to one of its groups."""
    about = field.metadata
    text = functools.reduce(lambda text, word: text.replace(f"{{{word}}}", words[word]), words, about["help"])
    more: dict[str, Any] = {name: about[name] for name in ("metavar", "choices", "nargs") if name in about}
    more["help"] = text if visible else argparse.SUPPRESS
    kinds = [kind for kind in typing.get_args(field.type) or (field.type,) if kind in (int, float)]
    needed = field.default is dataclasses.MISSING
    if field.type is bool:
        more["action"] = "store_true"
    else:
        several = typing.get_origin(field.type) is tuple and "parse" not in about
        more |= {"type": about.get("parse") or kinds[0]} if kinds or "parse" in about else {}
        more |= {"action": "append"} if several and "nargs" not in about else {}
        more |= (
            {"metavar": "N" if kinds[0] is int else "X"} if kinds and not {"metavar", "choices"} & more.keys() else {}
        )
        default: Any = field.default
        more |= {} if needed else {"default": list(default) if several else default}
    if about.get("positional"):
        place.add_argument(field.name, **more)
    else:
        place.add_argument(flag(field.name), required=needed, **more)


def from_args(cls: type[Options], args: argparse.Namespace) -> Options:
    """The options `cls` from what the parser found; lists become tuples, and a hidden field that is not set has its
    default.
    """
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
    """Runs a whole program whose options are the fields of `cls`; returns the exit status.

    Args:
      prog: the name that the user calls.
      about: what the program does.
      cls: its options.
      command: the function that runs it.
      argv: the command line; None for the process's own.
      **words: see `add_fields`.
    """

    def parse_and_run() -> int:
        parser = Parser(prog=prog, description=about)
        add_fields(parser, cls, words)
        return command(from_args(cls, parser.parse_args(argv)))

    return run_command(parse_and_run)


def write(text: str) -> None:
    """Writes text to stdout at once."""
    sys.stdout.write(text)
    sys.stdout.flush()


def note(message: str) -> None:
    """Writes one line to stderr."""
    print(f"specjax: {' '.join(message.split())}", file=sys.stderr, flush=True)


def complain(message: str) -> None:
    """Writes one line to stderr about something that went wrong."""
    note(f"error: {message}")


class _Notes(logging.Handler):
    """Writes the package's messages as lines on stderr."""

    def emit(self, record: logging.LogRecord) -> None:
        note(record.getMessage())


@contextlib.contextmanager
def talking(verbose: bool) -> Iterator[None]:
    """If `verbose`, the package reports on stderr what it loads and how it reads it; otherwise only warnings appear."""
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
    """Runs a command, and turns the way it ends into an exit status."""
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
    except OSError as error:  # a full disk
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
    """SIGTERM ends the command as Ctrl-C does, unless somebody else handles it."""
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
