"""The weights that a compiled program sends from chip to chip, by the origin of each collective's operands.

A value carries a weight if it is made only of weights (a slice, a transpose, a conversion, a product of two of them).
So does a value assembled from pieces of which one does (concatenated, padded, selected). A value computed from a weight
and anything else is an activation: a product with activations, or the rows that tokens look up in a table.
"""

import dataclasses
import functools
import operator
import re
from collections.abc import Callable
from typing import Any

from specjax.plan.hlo import COLLECTIVES, Op, Program, parse

_SAME = {
    "tuple", "copy", "copy-start", "copy-done", "convert", "bitcast", "bitcast-convert", "reshape", "transpose", "broadcast",
    "slice", "reverse", "opt-barrier", "optimization-barrier", "all-reduce", "all-gather", "all-to-all", "collective-permute",
}  # fmt: skip
"""Operations that pass on each operand."""
_PIECES = {
    "select": slice(1, None), "concatenate": slice(None), "pad": slice(None), "dynamic-update-slice": slice(2),
    "scatter": slice(None, None, 2),
}  # fmt: skip
"""Operations that assemble arrays, and which of their operands are assembled."""


@dataclasses.dataclass(frozen=True)
class Origin:
    """The origin of an array.

    Attributes:
      weights: the weights whose numbers it carries.
      other: whether it depends on anything except weights.
    """

    weights: frozenset[str] = frozenset()
    other: bool = False

    def __or__(self, more: "Origin") -> "Origin":
        return Origin(self.weights | more.weights, self.other or more.other)


@dataclasses.dataclass(frozen=True)
class Moved:
    """A collective that moves weights.

    Attributes:
      op: the collective.
      weights: their names in the traced function's arguments.
    """

    op: Op
    weights: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.op.opcode} {self.op.name} of {self.op.value[0].dims} moves {', '.join(self.weights)}"


Value = tuple[Origin, ...]  # one per buffer, tuples flattened
Found = dict[str, frozenset[str]]  # weights, by the collective's name


def moved_weights(text: str, weight: Callable[[str], bool] = lambda name: name.startswith("params")) -> list[Moved]:
    """The collectives of a program that move weights.

    Args:
      text: from `compiled.as_text()`.
      weight: says whether an argument of the traced function, such as `params['target']['norm']['scale']`, is a weight.

    Raises:
      ValueError: if no argument is a weight.
    """
    program = parse(text)
    entry = program.computations[program.entry]
    given = [op for op in entry.ops.values() if op.opcode == "parameter"]
    value = {op.number: _argument(op, weight) for op in given}
    if not any(origin.weights for leaves in value.values() for origin in leaves):
        raise ValueError(
            "none of this program's arguments is a weight: trace a function whose weights are called params"
        )
    found: Found = {}
    _Reader(program).run(program.entry, tuple(value[i] for i in range(len(given))), found)
    ops = {name: op for each in program.computations.values() for name, op in each.ops.items()}
    return [Moved(ops[name], tuple(sorted(weights))) for name, weights in found.items()]


def _argument(op: Op, weight: Callable[[str], bool]) -> Value:
    name = op.source.replace("\\'", "'")
    return (Origin(frozenset([name])) if weight(name) else Origin(other=True),) * len(op.value)


class _Reader:
    """Follows values through a program's computations; results of computations are cached by their arguments."""

    def __init__(self, program: Program):
        self.program = program
        self.known: dict[Any, tuple[Value, Found]] = {}

    def run(self, name: str, arguments: tuple[Value, ...], found: Found) -> Value:
        """The value of a computation; collectives in it that carry weights are added to `found`."""
        key = name, arguments
        if key not in self.known:
            inside: Found = {}
            self.known[key] = self._compute(name, arguments, inside), inside
        value, inside = self.known[key]
        for op, weights in inside.items():
            found[op] = found.get(op, frozenset()) | weights
        return value

    def _compute(self, name: str, arguments: tuple[Value, ...], found: Found) -> Value:
        here = self.program.computations[name]
        values: dict[str, Value] = {}
        for op in here.ops.values():
            if op.opcode == "parameter":
                values[op.name] = arguments[op.number]
            else:
                values[op.name] = self._value(op, [values[operand] for operand in op.operands], found)
        return values[here.root]

    def _value(self, op: Op, given: list[Value], found: Found) -> Value:
        kind = op.opcode
        leaves = tuple(origin for value in given for origin in value)
        if kind == "get-tuple-element" and len(op.value) == 1:
            at = int(_attribute(op, "index"))
            return given[0][at : at + 1]
        if kind in ("fusion", "call", "async-start") and op.called:
            return self.run(op.called[0], tuple(given), found)
        if kind == "while":
            return self._loop(op, leaves, found)
        if kind == "conditional":
            return self._branches(op, given, found)
        if kind.removesuffix("-start") in COLLECTIVES:
            carried = frozenset(weight for origin in leaves for weight in origin.weights)
            if carried:
                found[op.name] = carried
        if kind in _SAME and len(leaves) == len(op.value):
            return leaves
        other = any(origin.other for origin in leaves)
        if kind in _PIECES:
            leaves = tuple(origin for value in given[_PIECES[kind]] for origin in value)
        elif other:
            leaves = ()
        weights = frozenset(weight for origin in leaves for weight in origin.weights)
        return (Origin(weights, other),) * len(op.value)

    def _branches(self, op: Op, given: list[Value], found: Found) -> Value:
        results = [self.run(name, (value,), found) for name, value in zip(op.called, given[1:], strict=True)]
        chosen = Origin(other=any(origin.other for origin in given[0]))
        return tuple(functools.reduce(operator.or_, origins, chosen) for origins in zip(*results, strict=True))

    def _loop(self, op: Op, carry: Value, found: Found) -> Value:
        """Finds first which values depend on more than weights in any round, and then which weights each value
        carries."""
        body, condition = _attribute(op, "body"), _attribute(op, "condition")
        for mark in (lambda origin: Origin(other=origin.other), lambda origin: origin):
            before = None
            while carry != before:
                before = carry
                after = self.run(body, (carry,), {})
                carry = tuple(a | mark(b) for a, b in zip(carry, after, strict=True))
        self.run(condition, (carry,), found)
        self.run(body, (carry,), found)
        return carry


def _attribute(op: Op, name: str) -> str:
    found = re.search(rf"\b{name}=%?([\w.\-]+)", op.rest)
    if found is None:
        raise ValueError(f"{op.opcode} {op.name} has no {name}")
    return found[1]
