"""`specjax completion`: a script with which a shell completes commands, options, method names and file names."""

import argparse
import dataclasses
import importlib.util
from collections.abc import Mapping
from typing import Any

from specjax.serve.options import option
from specjax.terminal import BadInput, Parser

NEEDED = "completion needs shtab: pip install 'specjax[completion]'"


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompletionOptions:
    """Options of `specjax completion`."""

    shell: str = option(
        dataclasses.MISSING, "the shell that the script is for", choices=("bash", "zsh"), positional=True
    )


def script(parsers: Mapping[str, Parser], shell: str) -> str:
    """The script for a shell.

    Args:
      parsers: by the words of the command, such as `plan train`; each parser's help shows all of its options.
      shell: a name that shtab knows.

    Raises:
      BadInput: if shtab is not installed.
    """
    if importlib.util.find_spec("shtab") is None:
        raise BadInput(NEEDED)
    import shtab

    top = argparse.ArgumentParser(prog="specjax")
    top.add_argument("--version", action="store_true", help="print the version")
    below = {"": top.add_subparsers()}
    for name, parser in parsers.items():
        above, _, word = name.rpartition(" ")
        made = below[above].add_parser(word, parents=[parser], add_help=False, help=parser.description)
        if any(other.startswith(f"{name} ") for other in parsers):
            below[name] = made.add_subparsers()
        for action in made._actions:
            _say_values(action, shtab)
    return shtab.complete(top, shell=shell)


def _say_values(action: Any, shtab: Any) -> None:
    """Tells the shell which values an option takes, if these are files or one of a few names."""
    from specjax.assembly.registry import DRAFTERS, MIXERS, SAMPLERS, SELECTIONS, UNMASKS
    from specjax.decode.lines import DECODES
    from specjax.train.trainable import trainable

    named = {"decode": [*DECODES, *UNMASKS, *SAMPLERS, *MIXERS], "select": [*SELECTIONS]}
    named["drafter"] = [*DRAFTERS] if action.option_strings else [*trainable()]
    shown = str(action.metavar or action.dest).partition(".")[0]
    if "--help" in action.option_strings:
        action.help, action.choices = "show the usual options; all: every one", ("all",)
    elif action.dest in named:
        action.choices = named[action.dest]
    elif shown in ("FOLDER", "OUTPUT"):
        action.complete = shtab.DIRECTORY
    elif shown in ("FILE", "model", "MODEL", "target", "HEAD", "config", "plot", "PROMPTS"):
        action.complete = shtab.FILE
