"""A progress bar on stderr, shown only on a terminal and only for work that takes a while."""

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator

PATIENCE = 3.0
"""Seconds until it is shown."""


@contextlib.contextmanager
def bar(title: str, total: int | None = None) -> Iterator[Callable[[int], None]]:
    """A bar; it yields a function to be called with the number of further parts done.

    Args:
      title: what is being done.
      total: the number of parts; None: unknown, and the bar only moves.
    """
    if sys.stderr is None or not sys.stderr.isatty():
        yield lambda parts: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    progress = Progress(*columns, console=Console(stderr=True), transient=True)
    task = progress.add_task(title, total=total)
    later = threading.Timer(PATIENCE, progress.start)
    later.daemon = True
    later.start()
    try:
        yield lambda parts: progress.advance(task, parts)
    finally:
        later.cancel()
        later.join()
        if progress.live.is_started:
            progress.stop()
