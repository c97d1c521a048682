"""How far a job is, for other eyes than the terminal's: a page of one file, and measures as JSON lines.

Both are written now and then while the job runs, the page as a whole and atomically, so a browser that shows it never sees a
part of it. It needs nothing but itself, and asks for itself again until the job has ended.
"""

import contextlib
import dataclasses
import html
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from specjax.jobs import meter
from specjax.jobs.jsonl import dumps
from specjax.models.on_disk import replace
from specjax.serve.slots import Turn
from specjax.terminal import note

EVERY_SECONDS = 2.0
"""How often both are written."""
RECENT = 15
"""How many measures back a speed or an estimate looks."""
POINTS = 400
"""How many measures are kept, apart from the newest: of more, every other one goes."""
Watch = Callable[[Turn, int, int], None]
"""Takes a turn, the number of records that were written after it, and how many of all have failed."""


@dataclasses.dataclass(frozen=True)
class Measure:
    """What a job has done so far.

    Attributes:
      seconds: since this run began, with compilation.
      records: all that are written, those of earlier runs too.
      failed: how many of them hold an error.
      tokens: new ones of this run.
      steps: target passes of this run.
    """

    seconds: float
    records: int
    failed: int
    tokens: int
    steps: int


@dataclasses.dataclass
class Course:
    """A run of a job as it goes on.

    Attributes:
      total: the number of the job's records.
      measures: from the first on, which is that of the beginning.
      ended: whether no more will come.
    """

    total: int
    measures: list[Measure]
    ended: bool = False

    def add(self, measure: Measure) -> None:
        """Takes one more measure, and leaves out older ones if there are many."""
        self.measures.append(measure)
        if len(self.measures) > 2 * POINTS:
            recent = len(self.measures) - 2 * RECENT
            self.measures = self.measures[:recent:2] + self.measures[recent:]

    @property
    def now(self) -> Measure:
        return self.measures[-1]

    @property
    def per_second(self) -> float:
        """New tokens per second, lately."""
        return self._rate(self._before, self.now, "tokens")

    @property
    def per_step(self) -> float:
        """New tokens per target pass of this run."""
        return self.now.tokens / self.now.steps if self.now.steps else 0.0

    @property
    def left(self) -> float | None:
        """Seconds until the job ends, if it goes on as lately; None if that cannot be said."""
        rate = self._rate(self._before, self.now, "records") or self._rate(self.measures[0], self.now, "records")
        missing = self.total - self.now.records
        return 0.0 if not missing else missing / rate if rate else None

    def speeds(self) -> list[tuple[float, float]]:
        """Pairs of seconds and of tokens per second, from one measure to the next."""
        pairs = zip(self.measures, self.measures[1:], strict=False)
        return [(after.seconds, self._rate(before, after, "tokens")) for before, after in pairs]

    @property
    def _before(self) -> Measure:
        return self.measures[max(0, len(self.measures) - 1 - RECENT)]

    def _rate(self, before: Measure, after: Measure, name: str) -> float:
        spent = after.seconds - before.seconds
        return (getattr(after, name) - getattr(before, name)) / spent if spent > 0 else 0.0

    def line(self) -> dict[str, Any]:
        """The newest measure as a line of measures."""
        left = self.left
        return {
            "time": round(time.time(), 3),
            **{name: round(value, 3) for name, value in dataclasses.asdict(self.now).items()},
            "total": self.total,
            "tokens_per_second": round(self.per_second, 2),
            "tokens_per_step": round(self.per_step, 4),
            "seconds_left": None if left is None else round(left, 1),
            "ended": self.ended,
        }


@contextlib.contextmanager
def watched(page: str | None, metrics: str | None, title: str, total: int, done: int, failed: int) -> Iterator[Watch]:
    """A function that keeps a page and a file of measures up to date.

    A file that can no longer be written is said once, and does not end the job.

    Args:
      page: the page's file; None: there is none.
      metrics: the file to which measures are appended, or `otel` for OpenTelemetry; None: there is none.
      title: of the page.
      total: the number of the job's records.
      done: the number of records that existed before.
      failed: how many of all records are known to hold an error.
    """
    if page is None and metrics is None:
        yield lambda turn, written, failed: None
        return
    send = meter.Meter(title) if metrics == meter.OTEL else None
    began, course = time.monotonic(), Course(total, [Measure(0.0, done, failed, 0, 0)])
    tokens, steps, records, wrong, last = 0, 0, done, failed, -EVERY_SECONDS
    complained: set[str] = set()

    def attempt(path: str | None, write: Callable[[str], None]) -> None:
        if path is None:
            return
        try:
            write(path)
        except OSError as error:
            if path not in complained:
                note(f"cannot write {path}: {error.strerror or error}; the job goes on without it")
            complained.add(path)

    def write() -> None:
        course.add(Measure(time.monotonic() - began, records, wrong, tokens, steps))
        line = course.line()
        if send:
            send(line)
        attempt(file_of(metrics), lambda path: _append(path, dumps(line)))
        attempt(page, lambda path: replace(path, [shown(course, title).encode()]))

    def watch(turn: Turn, written: int, failed: int) -> None:
        nonlocal tokens, steps, records, wrong, last
        tokens, steps, records, wrong = tokens + turn.new_tokens, steps + turn.steps, records + written, failed
        if time.monotonic() - began - last >= EVERY_SECONDS:
            last = time.monotonic() - began
            write()

    try:
        yield watch
    finally:
        course.ended = True
        write()
        if send:
            send.flush()


def _append(path: str, line: str) -> None:
    """Adds a line to a file, and ends one that a kill has torn."""
    with open(path, "ab+") as file:
        torn = b""
        if file.seekable() and file.seek(0, os.SEEK_END):
            file.seek(-1, os.SEEK_END)
            torn = b"" if file.read(1) == b"\n" else b"\n"
        file.write(torn + line.encode() + b"\n")


def check(page: str | None, metrics: str | None) -> None:
    """Raises ValueError if one of these files cannot be written, or OpenTelemetry takes no measures."""
    if metrics == meter.OTEL:
        meter.check()
    for name, path in (("--page", page), ("--metrics", file_of(metrics))):
        if path is None:
            continue
        if Path(path).is_dir():
            raise ValueError(f"{name} {path!r} is a folder; give a file")
        if name == "--page" and Path(path).exists() and not Path(path).is_file():
            raise ValueError(f"--page {path!r} is no file: it is replaced as a whole")
        if not Path(path).parent.is_dir():
            raise ValueError(f"{name} {path!r}: there is no folder {str(Path(path).parent)!r}; make it first")


def file_of(metrics: str | None) -> str | None:
    """The file that `--metrics` names; None if it names OpenTelemetry, or nothing."""
    return None if metrics == meter.OTEL else metrics


def shown(course: Course, title: str) -> str:
    """The page."""
    now, left = course.now, course.left
    share = now.records / course.total if course.total else 1.0
    state = "ended" if course.ended and now.records >= course.total else "stopped" if course.ended else "running"
    rows = {
        "records": f"{now.records:,} of {course.total:,} ({share:.1%})",
        "with an error": f"{now.failed:,}",
        "new tokens": f"{now.tokens:,}",
        "tokens per second, lately": f"{course.per_second:,.0f}",
        "tokens per target pass": f"{course.per_step:.2f}",
        "this run has taken": _duration(now.seconds),
        "left": "" if course.ended else "unknown" if left is None else _duration(left),
    }
    cells = "".join(f"<tr><th>{name}</th><td>{value}</td></tr>" for name, value in rows.items() if value)
    again = "" if course.ended else f'<meta http-equiv="refresh" content="{EVERY_SECONDS:.0f}">'
    records = [(own.seconds, own.records) for own in course.measures]
    curves = _curve(records, "records") + _curve(course.speeds(), "tokens per second")
    name = html.escape(title)
    return (
        f'<!DOCTYPE html><html lang="en"><head><meta charset="utf-8">{again}<title>{share:.0%} {name}</title>'
        f"<style>{_STYLE}</style></head><body><h1>{name}</h1><p>{state}</p>"
        f'<div class="bar"><div style="width: {100 * share:.2f}%"></div></div><table>{cells}</table>{curves}</body></html>\n'
    )


_STYLE = (
    "body{font:16px sans-serif;max-width:46em;margin:2em auto;padding:0 1em}h1{font-size:1.2em;overflow-wrap:anywhere}"
    ".bar{background:#ddd;height:1.2em}.bar div{background:#2e7d32;height:100%}table{margin:1em 0}"
    "th{text-align:left;font-weight:normal;padding-right:2em;color:#555}svg{width:100%;height:8em;background:#f6f6f6}"
    "figcaption{color:#555}figure{margin:1em 0}"
    "polyline{fill:none;stroke:#2e7d32;stroke-width:2;vector-effect:non-scaling-stroke}"
)


def _curve(points: Sequence[tuple[float, float]], name: str) -> str:
    """A curve over time, with its largest value; empty for fewer than two points."""
    if len(points) < 2:
        return ""
    first, last = points[0][0], points[-1][0]
    top = max(value for _, value in points) or 1.0
    wide = (last - first) or 1.0
    line = " ".join(f"{1000 * (at - first) / wide:.1f},{100 - 95 * value / top:.1f}" for at, value in points)
    return (
        f"<figure><figcaption>{name}, at most {top:,.0f}, over {_duration(wide)}</figcaption>"
        f'<svg viewBox="0 0 1000 100" preserveAspectRatio="none"><polyline points="{line}"/></svg></figure>'
    )


def _duration(seconds: float) -> str:
    """Seconds in words.

    >>> [_duration(own) for own in (5.2, 65, 7260)]
    ['5 s', '1 min 5 s', '2 h 1 min']
    """
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600:,} h {whole % 3600 // 60} min"
