"""The progress of a job, as a bar on a terminal or as occasional lines; and signals that wait for the end of a step."""

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from specjax.serve.engine import Timing
from specjax.serve.record_bar import Speed, record_bar
from specjax.serve.slots import Turn
from specjax.terminal import ENDS, note

EVERY_SECONDS = 10.0
Advance = Callable[[Turn, int], None]


@contextlib.contextmanager
def progress(total: int, done: int, timing: Timing, bar: bool, lines: bool) -> Iterator[Advance]:
    """A function to be called with each turn and the records written after it.

    Args:
      total: the number of the job's records.
      done: the number of records that existed before.
      timing: of the decoding engine.
      bar: whether to show a bar on stderr.
      lines: whether to print a line every ten seconds if there is no bar.
    """
    speed = Speed(timing)
    if bar:
        with record_bar(total, done) as shown:
            yield lambda turn, written: shown(written, speed(turn))
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
def interruptible(active: bool) -> Iterator[Callable[[], int]]:
    """Yields a function that returns the number of the signal that asked the job to end, 0 for none.

    The first Ctrl-C only sets this number, and a second one ends the program as usual. SIGTERM may come several times,
    from a scheduler and from the process that started this one."""
    if not active or threading.current_thread() is not threading.main_thread():
        yield lambda: 0
        return
    asked = 0

    def handle(number: int, frame: Any) -> None:
        nonlocal asked
        asked = max(asked, number)
        signal.signal(signal.SIGINT, before[signal.SIGINT])

    before = {number: signal.signal(number, handle) for number in ENDS}
    try:
        yield lambda: asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
