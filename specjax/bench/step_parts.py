"""The part of a step to which each operation of its compiled program belongs, and the time of each part."""

import collections
import dataclasses
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from specjax.plan.hlo import Computation, Op, Program, parse

PARTS = ("draft", "target", "verify", "commit")
REST = "everything else"
_SCOPES = {"draft": "draft", "observe": "draft", "target": "target", "verify": "verify", "commit": "commit"}
"""Parts by the named scopes of `Speculative.step`."""
_SHARED = ("constant", "parameter", "get-tuple-element")
"""The operation kinds that all parts read and that do no work."""


@dataclasses.dataclass(frozen=True)
class Event:
    """One run of an operation.

    Attributes:
      name: in the compiled text.
      start: nanoseconds.
      duration: nanoseconds, including operations that it runs.
    """

    name: str
    start: float
    duration: float


def of_step(op: Op) -> str | None:
    """The part of a step by the outermost scope that names one; None if the operation names no source."""
    if not op.source:
        return None
    return next((_SCOPES[word] for word in op.source.split("/") if word in _SCOPES), REST)


def parts_of(text: str, part: Callable[[Op], str | None] = of_step) -> dict[str, str]:
    """The part of every operation of a compiled program, by name; `REST` for operations of no part.

    Operations that the compiler added or rewrote (a copy, a library's matrix product) may not name a source. Their part
    is that of the operations fused into them, of their caller, of their operands or of their users, in this order.

    Args:
      text: of `compiled.as_text()`.
      part: that of an operation by itself, or None.
    """
    program, found = parse(text), {}
    seen: set[str] = set()
    waiting = [(program.entry, REST)]
    while waiting:
        name, outer = waiting.pop()
        if name in seen or name not in program.computations:
            continue
        seen.add(name)
        own = _of_computation(program, program.computations[name], None if outer == REST else outer, part)
        found |= own
        ops = program.computations[name].ops.values()
        waiting += [(called, own[op.name]) for op in ops for called in op.called]
    return found


def _of_computation(
    program: Program, here: Computation, outer: str | None, part: Callable[[Op], str | None]
) -> dict[str, str]:
    said = {name: part(op) or _fused(program, op, part) or outer for name, op in here.ops.items()}

    def largest(names: Iterable[str]) -> str | None:
        known = [name for name in names if said.get(name)]
        return said[max(known, key=lambda name: sum(buffer.size for buffer in here.value(name)))] if known else None

    for name, op in here.ops.items():  # operands come first
        said[name] = said[name] or largest(op.operands)
    for name, op in reversed(here.ops.items()):
        if op.opcode not in _SHARED:
            said[name] = said[name] or largest(user.name for user in here.users[name])
    return {name: found or REST for name, found in said.items()}


def _fused(program: Program, op: Op, part: Callable[[Op], str | None]) -> str | None:
    """The part of most operations in a fusion."""
    inside = [
        program.computations[name] for name in op.called if op.opcode == "fusion" and name in program.computations
    ]
    parts = collections.Counter(own for one in inside for inner in one.ops.values() if (own := part(inner)))
    return parts.most_common(1)[0][0] if parts else None


def by_part(
    lines: Sequence[Sequence[Event]], parts: Mapping[str, str], names: Sequence[str] = PARTS
) -> dict[str, float]:
    """Nanoseconds by part, over all lines of a trace.

    Each run of a repeated operation counts as its median run. Each gap between the operations of a loop counts as the
    median gap. So interruptions of the program do not count.

    Args:
      lines: lists of events, one for every thread or stream.
      parts: see `parts_of`.
      names: of the parts, beside `REST`.
    """
    runs: dict[str, list[float]] = collections.defaultdict(list)
    for line in lines:
        for name, own in _own(line):
            runs[name] += own
    total = dict.fromkeys((*names, REST), 0.0)
    for name, times in runs.items():
        total[parts.get(name, REST)] += len(times) * statistics.median(times)
    return total


def _own(line: Sequence[Event]) -> Iterator[tuple[str, list[float]]]:
    """Every event's own time: its duration or, if others ran inside it, the gaps between them."""
    open_: list[tuple[Event, list[float]]] = []  # with the gaps so far
    for event in [*sorted(line, key=lambda e: (e.start, -e.duration)), Event("", float("inf"), 0)]:
        while open_ and open_[-1][0].start + open_[-1][0].duration <= event.start:
            done, ends = open_.pop()
            ends = [done.start, *ends, done.start + done.duration]
            yield done.name, [max(stop - start, 0.0) for start, stop in zip(ends[::2], ends[1::2], strict=True)]
        if open_:
            open_[-1][1].extend((event.start, event.start + event.duration))
        open_.append((event, []))
