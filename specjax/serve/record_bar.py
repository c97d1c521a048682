"""The progress of a run: a bar of records on stderr."""

import contextlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from typing import Any

Advance = Callable[[int, str], None]
"""Takes how many records are new, and a few words."""


def bar_fits() -> bool:
    """Whether stderr is a terminal."""
    return sys.stderr is not None and sys.stderr.isatty()


def in_notebook() -> bool:
    """Whether a notebook runs this, and can show a bar that moves."""
    return "ipykernel" in sys.modules and importlib.util.find_spec("ipywidgets") is not None


class Speed:
    """Says how fast a run is, from its turns.

    Args:
      timing: the `specjax.serve.engine.Timing` of the decoding engine.
    """

    def __init__(self, timing: Any):
        self.timing, self.began = timing, timing.decode_seconds
        self.tokens = self.steps = 0

    def __call__(self, turn: Any) -> str:
        """Tokens per second and per step, this turn included."""
        self.tokens, self.steps = self.tokens + turn.new_tokens, self.steps + turn.steps
        spent = self.timing.decode_seconds - self.began
        if not self.steps or not spent:
            return ""
        return f"{self.tokens / spent:.0f} tokens/s, {self.tokens / self.steps:.2f} tokens per step"


@contextlib.contextmanager
def record_bar(total: int, done: int = 0) -> Iterator[Advance]:
    """A bar of records, which goes when it is full.

    Args:
      total: all of them.
      done: those that were there before.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(stderr=True), transient=True) as shown:
        task = shown.add_task("", total=total, completed=done)
        yield lambda count, words: shown.update(task, advance=count, description=words)
