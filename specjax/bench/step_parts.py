"""Which part of a step an operation of its compiled program belongs to, and how long each part took."""

import collections
import dataclasses
import statistics
from collections.abc import Iterator, Mapping, Sequence

from specjax.plan.hlo import Op, parse

PARTS = ("draft", "target", "verify", "commit")
REST = "everything else"
_SCOPES = {"draft": "draft", "observe": "draft", "target": "target", "verify": "verify", "commit": "commit"}
"""Parts by the named scopes of `Speculative.step`."""


@dataclasses.dataclass(frozen=True)
class Event:
    """One run of an operation.

    Attributes:
      name: in the compiled text.
      start: nanoseconds.
      duration: likewise; where the operation runs others, theirs is inside.
    """

    name: str
    start: float
    duration: float


def parts_of(text: str) -> dict[str, str]:
    """The part of every operation of a compiled program, by its name; `REST` where it is of none.

    What the compiler adds by itself (copies, above all) belongs to what runs it: a branch of the target's switch, say.

    Args:
      text: of `compiled.as_text()`.
    """
    program, found = parse(text), {}
    seen: set[str] = set()
    waiting = [(program.entry, REST)]
    while waiting:
        name, outer = waiting.pop()
        if name in seen or name not in program.computations:
            continue
        seen.add(name)
        for op in program.computations[name].ops.values():
            found[op.name] = _part(op) or outer
            waiting += [(called, found[op.name]) for called in op.called]
    return found


def _part(op: Op) -> str | None:
    """By the outermost scope that names a part; `accept` is no part, and what is in it may be one."""
    words = op.source.split("/")
    return next((_SCOPES[word] for word in words if word in _SCOPES), REST if "accept" in words else None)


def by_part(lines: Sequence[Sequence[Event]], parts: Mapping[str, str]) -> dict[str, float]:
    """Nanoseconds by part, over all lines of a trace.

    Of an operation that ran often, each run counts as the median one: what interrupts a program does not count.

    Args:
      lines: events, a list for every thread or stream.
      parts: see `parts_of`.
    """
    runs: dict[str, list[float]] = collections.defaultdict(list)
    for line in lines:
        for event, own in _own(line):
            runs[event.name].append(own)
    total = dict.fromkeys((*PARTS, REST), 0.0)
    for name, times in runs.items():
        total[parts.get(name, REST)] += len(times) * statistics.median(times)
    return total


def _own(line: Sequence[Event]) -> Iterator[tuple[Event, float]]:
    """Every event with its time less that of the events inside it."""
    open_: list[tuple[Event, float]] = []  # with what those inside took
    for event in [*sorted(line, key=lambda e: (e.start, -e.duration)), Event("", float("inf"), 0)]:
        while open_ and open_[-1][0].start + open_[-1][0].duration <= event.start:
            done, inside = open_.pop()
            yield done, max(done.duration - inside, 0.0)
        if open_:
            outer, inside = open_.pop()
            open_.append((outer, inside + event.duration))
        open_.append((event, 0.0))
