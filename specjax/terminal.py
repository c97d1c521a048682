"""What the commands share of the terminal: how options are read, lines written, and ends turned into an exit status.

Exit status: 0, or 1 when a record failed, or 2 on bad input with one line on stderr, or 3 where another process of the same job
died.
"""

import argparse
import contextlib
import io
import logging
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from specjax import startup

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
    logging.getLogger("jax._src.xla_bridge").addFilter(startup.no_spare_plugin)
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
