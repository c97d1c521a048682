"""How far a job is: a bar on a terminal, or a line now and then, and Ctrl-C that waits for the step."""

import contextlib
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from specjax.serve.slots import Turn
from specjax.terminal import note

EVERY_SECONDS = 10.0
Advance = Callable[[Turn, int], None]


@contextlib.contextmanager
def progress(total: int, done: int, timing: Any, bar: bool, lines: bool) -> Iterator[Advance]:
    """A function of a turn and of the records that were written after it.

    Args:
      total: records of the job.
      done: records that were there before.
      timing: the engine's.
      bar: whether stderr shows a bar.
      lines: whether it gets a line every ten seconds where there is no bar.
    """
    tokens = steps = 0
    began = timing.decode_seconds

    def speed(turn: Turn) -> str:
        nonlocal tokens, steps
        tokens, steps = tokens + turn.new_tokens, steps + turn.steps
        spent = timing.decode_seconds - began
        return f"{tokens / spent:.0f} tokens/s, {tokens / steps:.2f} tokens a step" if steps and spent else ""

    if bar:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
        with Progress(*columns, console=Console(stderr=True), transient=True) as shown:
            task = shown.add_task("", total=total, completed=done)
            yield lambda turn, written: shown.update(task, advance=written, description=speed(turn))
        return
    last = time.monotonic()

    def line(turn: Turn, written: int) -> None:
        nonlocal done, last
        done, words = done + written, speed(turn)
        if lines and time.monotonic() - last >= EVERY_SECONDS:
            last = time.monotonic()
            note(f"{done} of {total} records, {words}")

    yield line


@contextlib.contextmanager
def interruptible(active: bool) -> Iterator[Callable[[], bool]]:
    """Whether Ctrl-C was pressed: the first one only says so, a second one ends the program as it always does."""
    if not active or threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    pressed = False

    def handle(number: int, frame: Any) -> None:
        nonlocal pressed
        pressed = True
        signal.signal(signal.SIGINT, before)

    before = signal.signal(signal.SIGINT, handle)
    try:
        yield lambda: pressed
    finally:
        signal.signal(signal.SIGINT, before)


def bar_fits() -> bool:
    """Whether stderr is a terminal."""
    return sys.stderr is not None and sys.stderr.isatty()
