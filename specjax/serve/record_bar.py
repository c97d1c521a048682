"""A progress bar of records on stderr."""

import contextlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from typing import Any

Advance = Callable[[int, str], None]
"""Takes the number of new records, and a short note."""


def bar_fits() -> bool:
    """Whether stderr is a terminal."""
    return sys.stderr is not None and sys.stderr.isatty()


def in_notebook() -> bool:
    """Whether this runs in a notebook that can show a moving bar."""
    return "ipykernel" in sys.modules and importlib.util.find_spec("ipywidgets") is not None


class Speed:
    """Formats the speed of a run, from its turns.

    Args:
      timing: the decoding engine's `specjax.serve.engine.Timing`.
    """

    def __init__(self, timing: Any):
        self.timing, self.began = timing, timing.decode_seconds
        self.tokens = self.steps = 0

    def __call__(self, turn: Any) -> str:
        """Tokens per second and per step, and what a prefix cache knew, up to and including this turn."""
        self.tokens, self.steps = self.tokens + turn.new_tokens, self.steps + turn.steps
        spent = self.timing.decode_seconds - self.began
        if not self.steps or not spent:
            return ""
        words = f"{self.tokens / spent:.0f} tokens/s, {self.tokens / self.steps:.2f} tokens per step"
        return f"{words}, {self.timing.known}" if self.timing.known else words


@contextlib.contextmanager
def record_bar(total: int, done: int = 0) -> Iterator[Advance]:
    """A bar of records, removed when it is full.

    Args:
      total: the number of all records.
      done: the number of records that existed before.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(stderr=True), transient=True) as shown:
        task = shown.add_task("", total=total, completed=done)
        yield lambda count, words: shown.update(task, advance=count, description=words)
