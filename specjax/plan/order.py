"""Which operations of a compiled program wait for which, from its optimized HLO text.

Only the entry computation is followed operation by operation. An operation that calls other computations (a loop, a
branch) is one step, in which their collectives come one after the other, each once.
"""

import dataclasses
from collections.abc import Callable

from specjax.plan.hlo import COLLECTIVES, Op, Program, parse


@dataclasses.dataclass(frozen=True)
class Apart:
    """How two parts of a program depend on each other.

    Attributes:
      waits: names of the first part's operations that wait for an operation of the second.
      awaited: names of the first part's operations that an operation of the second waits for.
      free: names of the first part's operations that are neither, so that both parts may run at the same time.
      collectives: how many collectives the free operations have.
    """

    waits: tuple[str, ...]
    awaited: tuple[str, ...]
    free: tuple[str, ...]
    collectives: int


def in_sequence(text: str) -> int:
    """The most collectives of a program that wait for one another.

    Args:
      text: from `compiled.as_text()`.

    Raises:
      ValueError: if the text is no module.
    """
    program = parse(text)
    here = program.computations[program.entry]
    before: dict[str, int] = {}
    for op in here.ops.values():
        before[op.name] = collectives(program, op) + max((before.get(name, 0) for name in op.operands), default=0)
    return max(before.values(), default=0)


def apart(text: str, first: Callable[[Op], bool], second: Callable[[Op], bool]) -> Apart:
    """How the operations of one part depend on those of another.

    Args:
      text: from `compiled.as_text()`.
      first: says whether an operation is of the first part, for example by its `source`.
      second: the same of the second part.

    Raises:
      ValueError: if the text is no module, or a part has no operations.
    """
    program = parse(text)
    ops = program.computations[program.entry].ops
    parts = [{op.name for op in ops.values() if op.opcode != "parameter" and part(op)} for part in (first, second)]
    if not all(parts):
        raise ValueError("a part of the program has no operations: look at the sources of its operations")
    one, other = parts
    after, before = _reached(ops, other, forwards=True), _reached(ops, other, forwards=False)
    free = one - after - before
    ordered = lambda names: tuple(name for name in ops if name in names)
    count = sum(collectives(program, ops[name]) for name in free)
    return Apart(ordered(one & after), ordered(one & before), ordered(free), count)


def _reached(ops: dict[str, Op], names: set[str], forwards: bool) -> set[str]:
    """The operations that wait for some of `names`, or that these wait for; without `names` themselves."""
    found = set(names)
    for op in ops.values() if forwards else reversed(ops.values()):
        if forwards and found & set(op.operands):
            found.add(op.name)
        elif not forwards and op.name in found:
            found.update(op.operands)
    return found - names


def collectives(program: Program, op: Op) -> int:
    """How many collectives an operation is or contains, each once; the end of an asynchronous one is none."""
    if op.opcode.removesuffix("-start") in COLLECTIVES:
        return 1
    if op.opcode.endswith("-done"):
        return 0
    inside = (program.computations[name] for name in op.called if name in program.computations)
    return sum(collectives(program, one) for computation in inside for one in computation.ops.values())
