"""The traffic of a compiled program, memory and collectives, from its optimized HLO text.

Every buffer in a chip's main memory counts once for each operation that reads or writes it. Buffers that the compiler
keeps on the chip (a memory space `S(n)` in the layout) cost nothing. In contrast, `cost_analysis` counts those too, and
counts a whole operand if only a slice of it is read.

- A fusion is one operation: everything inside it stays on the chip. An operand that it only slices or gathers from
  counts as much as is taken.
- A dynamic-update-slice, alone or as the result of a fusion, writes its slice. XLA makes it in place, or inserts a copy
  before it, which then counts.
- A loop counts its body as often as the compiler knows it to run, or as a condition allows that compares a counter with
  a constant. Otherwise the body counts once (`Traffic.unbounded`). A conditional counts its costliest branch, by bytes
  read, written and exchanged.
- Bytes in main memory are those of the layout, including its padding to whole tiles; bytes of collectives are those of
  the shape.
- On a TPU, operations carry the compiler's own estimate of their cycles, and are listed in the order in which they run.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Iterator, Sequence

COLLECTIVES = (
    "all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute", "collective-broadcast",
    "ragged-all-to-all",
)  # fmt: skip
_FREE = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id", "replica-id",
    "opt-barrier", "optimization-barrier", "add-dependency", "domain", "get-dimension-size",
}  # fmt: skip
_FREE_CALLS = {"ConcatBitcast", "AllocateBuffer", "AssumeGatherIndicesInBound", "Sharding", "SPMDFullToShardShape"}
_BITS = re.compile(r"[a-z]+?(\d+)")
_LEAF = re.compile(r"([a-z]\w*)\[([\d,<=]*)\](\{[^}]*\})?")
_SPACE = re.compile(r"S\((\d+)\)")
_TILE = re.compile(r"\{([\d,]*):T\(([\d,]+)\)")
_IN_PLACE = "output_to_operand_aliasing={{}: (0, {})}"
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_SUMMED = re.compile(r'lhs_contracting_dim(?:s|ensions"?:)[={\[]+([^}\]]*)')
_CALLED = re.compile(
    r"(?:calls|to_apply|body|true_computation|false_computation|branch_computations)=\{?([^,}]+(?:, ?%[^,}]+)*)"
)


@dataclasses.dataclass(frozen=True)
class Buffer:
    """One array of a value.

    Attributes:
      dtype: its type.
      dims: its shape.
      space: memory space; 0: main memory.
      padding: the size of the layout, in whole tiles, over the size of the elements.
    """

    dtype: str
    dims: tuple[int, ...]
    space: int = 0
    padding: float = dataclasses.field(default=1.0, compare=False)

    @property
    def size(self) -> int:
        """Bytes of its elements."""
        found = _BITS.match(self.dtype)  # a token has none
        bits = 8 if self.dtype == "pred" else int(found[1]) if found else 0
        return math.ceil(math.prod(self.dims) * bits / 8)

    @property
    def hbm(self) -> int:
        """Bytes with padding if it is in main memory, otherwise 0."""
        return self.padded(self.size) if self.space == 0 else 0

    def padded(self, part: int) -> int:
        """The padded size of a part with this number of bytes."""
        return round(part * self.padding)


@dataclasses.dataclass(frozen=True)
class Op:
    """A line of HLO."""

    name: str
    opcode: str
    value: tuple[Buffer, ...]
    operands: tuple[str, ...]
    rest: str

    @functools.cached_property
    def source(self) -> str:
        """The source from which it was traced."""
        found = re.search(r'op_name="([^"]*)"', self.rest)
        return found[1].replace("\\'", "'") if found else ""

    @functools.cached_property
    def target(self) -> str:
        """The target of a custom call."""
        found = re.search(r'custom_call_target="([^"]*)"', self.rest)
        return found[1] if found else ""

    @property
    def number(self) -> int:
        """The number of a parameter, or the value of a scalar constant."""
        return int(self.rest.split(")")[0])

    @functools.cached_property
    def cycles(self) -> int | None:
        """The compiler's estimate of one run's cycles; None if it gives none."""
        found = _CYCLES.search(self.rest)
        return int(found[1]) if found else None

    @functools.cached_property
    def called(self) -> tuple[str, ...]:
        """The computations that it runs."""
        names = [name for group in _CALLED.findall(self.rest) for name in re.findall(r"%?([\w.\-]+)", group)]
        return tuple(dict.fromkeys(names))


@dataclasses.dataclass(frozen=True)
class Computation:
    """The operations of a computation by name, in order, and the one that gives its value."""

    ops: dict[str, Op]
    root: str

    @functools.cached_property
    def users(self) -> dict[str, list[Op]]:
        """The operations that read each value, by its name."""
        found: dict[str, list[Op]] = {name: [] for name in self.ops}
        for op in self.ops.values():
            for name in dict.fromkeys(op.operands):
                found.setdefault(name, []).append(op)
        return found

    def value(self, name: str) -> tuple[Buffer, ...]:
        return self.ops[name].value if name in self.ops else ()


@dataclasses.dataclass(frozen=True)
class Program:
    """A module."""

    computations: dict[str, Computation]
    entry: str


@dataclasses.dataclass(frozen=True)
class Access:
    """The memory traffic of one operation, per run.

    Attributes:
      op: the operation.
      read: bytes from main memory.
      written: bytes to main memory.
      times: how often it runs.
      moved: for a collective, the bytes that it exchanges, in any memory.
      flops: the operations of its matrix products.
      kernel_flops: for a Pallas call, the operations that the compiler's own count leaves out.
      given: for a fusion, a product or a collective, the bytes that it reads of every operand, by name.
    """

    op: Op
    read: int
    written: int
    times: int = 1
    moved: int = 0
    flops: int = 0
    kernel_flops: int = 0
    given: tuple[tuple[str, int], ...] = ()

    @property
    def total(self) -> int:
        """The bytes of all its runs."""
        return (self.read + self.written) * self.times


Kernel = Callable[[Op, Sequence[tuple[Buffer, ...]]], "tuple[int, int, int] | None"]
"""A function from a Pallas call and its operands' buffers to its reads, writes and operations; None for an unknown
call."""
Cached = Callable[[Program, Sequence[Access]], list[Access]]
"""A function that removes the reads that a cache saves from a program's accesses, given in order."""


def parse(text: str) -> Program:
    """Reads the text of `compiled.as_text()`.

    Raises:
      ValueError: if there is no entry computation.
    """
    computations, entry = {}, None
    name, ops, root = None, {}, ""
    for line in text.splitlines():
        if line[:1] not in (" ", "}", "") and line.endswith("{") and "->" in line:
            first = line.split(" ", 1)
            name = (first[1] if first[0] == "ENTRY" else line).split(" ", 1)[0].split("(")[0].lstrip("%")
            entry = name if first[0] == "ENTRY" else entry
            ops, root = {}, ""
        elif line.startswith("}") and name is not None:
            computations[name] = Computation(ops, root)
            name = None
        elif name is not None and " = " in line:
            op = _op(line)
            ops[op.name] = op
            if line.lstrip().startswith("ROOT "):
                root = op.name
    if entry is None:
        raise ValueError("this is not an HLO module: it has no ENTRY computation")
    return Program(computations, entry)


def _op(line: str) -> Op:
    left, right = line.strip().split(" = ", 1)
    name = left.removeprefix("ROOT ").lstrip("%")
    end = _closing(right, 0) + 1 if right.startswith("(") else right.index(" ")
    shape, right = right[:end], right[end:].lstrip()
    at = right.index("(")
    close = _closing(right, at)
    inside = right[at + 1 : close]
    valued = right[:at] in ("constant", "parameter")
    operands = () if valued else tuple(re.findall(r"%([\w.\-]+)", inside))
    rest = right[at + 1 :] if valued else right[close + 1 :]
    return Op(name, right[:at], _buffers(shape), operands, rest)


def _closing(text: str, at: int) -> int:
    depth = 0
    for i in range(at, len(text)):
        depth += {"(": 1, ")": -1}.get(text[i], 0)
        if depth == 0:
            return i
    raise ValueError(f"a parenthesis is not closed in {text[:80]!r}")


def _buffers(shape: str) -> tuple[Buffer, ...]:
    found = []
    for dtype, dims, layout in _LEAF.findall(shape):
        space = _SPACE.search(layout)
        sizes = tuple(int(d.lstrip("<=")) for d in dims.split(",") if d)
        found.append(Buffer(dtype, sizes, int(space[1]) if space else 0, _padding(sizes, layout)))
    return tuple(found)


def _padding(sizes: Sequence[int], layout: str) -> float:
    """How much larger an array is with its two innermost dimensions filled up to whole tiles."""
    tiled = _TILE.match(layout)
    if tiled is None or not math.prod(sizes):
        return 1.0
    order, tile = ([int(d) for d in part.split(",") if d] for part in tiled.groups())
    inner = [sizes[axis] for axis in order[: len(tile)]]
    return math.prod(-(-size // whole) * whole / size for size, whole in zip(inner, reversed(tile), strict=False))


Rounds = Callable[[Op], int | None]
"""A function that returns how often a loop runs if its text does not show it; None if unknown."""


def accesses(program: Program, kernel: Kernel | None = None, rounds: Rounds = lambda op: None) -> list[Access]:
    """The accesses of one run of the program on one chip."""
    return list(_run(program, program.entry, 1, kernel, rounds))


def _run(program: Program, name: str, times: int, kernel: Kernel | None, rounds: Rounds) -> Iterator[Access]:
    here = program.computations[name]
    for op in here.ops.values():
        if op.opcode == "while":
            trips = _trips(program, here, op) or rounds(op) or 1
            yield from _run(program, _named(op, "body"), times * trips, kernel, rounds)
        elif op.opcode == "conditional":
            branches = [list(_run(program, branch, times, kernel, rounds)) for branch in op.called]
            yield from max(
                branches, key=lambda found: sum(access.total + access.moved * access.times for access in found)
            )
        elif op.opcode in ("call", "async-start"):
            for called in op.called:
                yield from _run(program, called, times, kernel, rounds)
        else:
            found = _access(program, here, op, times, kernel)
            if found is not None:
                yield dataclasses.replace(found, flops=_flops(program, here, op))
            if op.opcode == "fusion":  # a collective that runs beside other work is wrapped in a fusion
                yield from (a for called in op.called for a in _wrapped(program, called, times))


def _named(op: Op, part: str) -> str:
    """The computation that is a loop's `body` or `condition`."""
    return re.findall(rf"{part}=%?([\w.\-]+)", op.rest)[0]


def _trips(program: Program, here: Computation, op: Op) -> int | None:
    """How often a loop runs; None if the text has no constant bound.

    The compiler may say so. Otherwise the loop runs until its counter reaches the constant in its condition. The
    counter starts at 0 and grows by 1 unless the text shows other values."""
    if known := _TRIPS.search(op.rest):
        return int(known[1])
    condition, body = (program.computations[_named(op, part)] for part in ("condition", "body"))
    test, sides = _alone(program, condition, condition.ops[condition.root])
    if test.opcode != "compare" or "direction=LT" not in test.rest or len(sides) != 2:
        return None
    counter, bound = sides
    if counter.opcode != "get-tuple-element" or bound.opcode != "constant" or bound.value[0].dims:
        return None
    at = int(re.findall(r"index=(\d+)", counter.rest)[0])
    number = lambda value: value.number if value.opcode == "constant" and not value.value[0].dims else None
    carried, grown = here.ops[op.operands[0]], body.ops[body.root]
    start = number(_through(here, carried.operands[at])) if carried.opcode == "tuple" else None
    added, terms = _alone(program, body, _through(body, grown.operands[at])) if grown.opcode == "tuple" else (grown, [])
    step = next((n for term in terms if added.opcode == "add" and (n := number(term))), None)
    return max(-(-(bound.number - (start or 0)) // (step or 1)), 0)


def _alone(program: Program, here: Computation, op: Op) -> tuple[Op, list[Op]]:
    """An operation and its operands, unwrapped from the fusion that may hold it."""
    if op.opcode != "fusion":
        return op, [_through(here, name) for name in op.operands if name in here.ops]
    inside = program.computations[op.called[0]]
    root = inside.ops[inside.root]
    given = [_through(inside, name) for name in root.operands]
    return root, [_through(here, op.operands[each.number]) if each.opcode == "parameter" else each for each in given]


def _through(here: Computation, name: str) -> Op:
    """The operation that makes a value, followed through copies."""
    op = here.ops[name]
    while op.opcode in ("copy", "bitcast", "convert") and op.operands:
        op = here.ops[op.operands[0]]
    return op


def _unbounded(program: Program, rounds: Rounds) -> tuple[str, ...]:
    """The loops that count once, by what they were traced from."""
    return tuple(
        op.source or op.name
        for here in program.computations.values()
        for op in here.ops.values()
        if op.opcode == "while" and _trips(program, here, op) is None and rounds(op) is None
    )


def _flops(program: Program, here: Computation, op: Op) -> int:
    """The operations of matrix products, two for every product of two numbers, including those inside a fusion."""
    if op.opcode == "fusion":
        return sum(_flops(program, inside, each) for inside in map(program.computations.get, op.called) if inside
                   for each in inside.ops.values())  # fmt: skip
    summed = _SUMMED.search(op.rest)
    if (
        summed is None
        or not op.operands
        or (op.opcode != "dot" and "gemm" not in op.target and "matmul" not in op.target)
    ):
        return 0
    sizes = here.value(op.operands[0])[0].dims
    return 2 * math.prod(op.value[0].dims) * math.prod(sizes[int(d)] for d in re.findall(r"\d+", summed[1]))


def _wrapped(program: Program, name: str, times: int) -> Iterator[Access]:
    here = program.computations[name]
    for op in here.ops.values():
        if _kind(op):
            yield Access(op, 0, 0, times, _moved(here, op))
        elif op.opcode in ("fusion", "call", "async-start"):
            for called in op.called:
                yield from _wrapped(program, called, times)


def _kind(op: Op) -> str | None:
    kind = op.opcode.removesuffix("-start")
    return kind if kind in COLLECTIVES else None


def _moved(here: Computation, op: Op) -> int:
    return max(sum(b.size for name in op.operands for b in here.value(name)), _result(here, op, lambda b: b.size))


def _result(here: Computation, op: Op, size: Callable[[Buffer], int]) -> int:
    """The size of an operation's result; a `-start` may also pass on its operands."""
    own = list(op.value)
    if op.opcode.endswith("-start"):
        given = [b for name in op.operands for b in here.value(name)]
        handed = len(own) > len(given) and op.opcode not in ("copy-start", "slice-start")
        own = own[len(given) :] if handed else own
    return sum(size(b) for b in own if b.dims or len(own) == 1)


def _access(program: Program, here: Computation, op: Op, times: int, kernel: Kernel | None) -> Access | None:
    operands = [here.value(name) for name in dict.fromkeys(op.operands)]
    whole = tuple((name, sum(b.hbm for b in here.value(name))) for name in dict.fromkeys(op.operands))
    given = sum(size for _, size in whole)
    made = sum(b.hbm for b in op.value)
    kind = op.opcode
    if kind.endswith("-done"):
        return Access(op, 0, 0, times)
    if kind in _FREE or kind.endswith("-update") or op.target in _FREE_CALLS:
        return None
    if _kind(op):
        moved = _moved(here, op)
        return Access(op, given, _result(here, op, lambda b: b.hbm), times, moved, given=whole)
    if kind == "fusion":
        return _fusion(program, here, op, times)
    if kind in ("copy-start", "slice-start"):  # (destination, source, ...) and ((source), destination, ...)
        source, target = (op.value[1], op.value[0]) if kind == "copy-start" else (op.value[0], op.value[1])
        return Access(op, source.padded(target.size) if source.space == 0 else 0, target.hbm, times)
    if kind in ("dynamic-slice", "slice", "gather"):
        source = operands[0][0]
        taken = source.padded(sum(b.size for b in op.value)) if source.space == 0 else 0
        rest = sum(b.hbm for value in operands[1:] for b in value)
        return Access(op, taken + rest, made, times)
    if kind in ("dynamic-update-slice", "scatter"):
        update = here.value(op.operands[1 if kind == "dynamic-update-slice" else -1])
        rest = sum(b.hbm for name in op.operands[1:] for b in here.value(name))
        target = op.value[0].padded(sum(b.size for b in update)) if op.value[0].space == 0 else 0
        return Access(op, rest + (target if kind == "scatter" else 0), target, times)
    if kind == "custom-call" and kernel is not None:
        found = kernel(op, [here.value(name) for name in op.operands])
        if found is not None:
            return Access(op, found[0], found[1], times, kernel_flops=found[2])
    return Access(op, given, made, times, given=whole)


def _fusion(program: Program, here: Computation, op: Op, times: int) -> Access:
    inside = program.computations[op.called[0]]
    parameters = {line.number: line.name for line in inside.ops.values() if line.opcode == "parameter"}
    given: dict[str, int] = {}
    for index, name in enumerate(op.operands):
        buffers = here.value(name)
        if name in given or not buffers or buffers[0].space:
            continue
        taken = buffers[0].padded(_taken(inside, parameters[index], buffers[0]))
        given[name] = min(taken, sum(b.hbm for b in buffers))
    roots = _roots(inside, inside.root)
    written = 0
    for buffer, root in zip(op.value, roots, strict=False):
        if buffer.space:
            continue
        written += buffer.padded(min(_placed(inside, root, buffer), buffer.size))
    return Access(op, sum(given.values()), written, times, given=tuple(given.items()))


def _roots(inside: Computation, name: str) -> list[str]:
    op = inside.ops[name]
    return [root for part in op.operands for root in _roots(inside, part)] if op.opcode == "tuple" else [name]


def _origin(inside: Computation, name: str) -> Op:
    op = inside.ops[name]
    while op.opcode in ("bitcast", "reshape") and op.operands:
        op = inside.ops[op.operands[0]]
    return op


def _taken(inside: Computation, name: str, whole: Buffer) -> int:
    """The bytes that a fusion reads of an operand."""
    total = 0
    for user in inside.users[name]:
        first = user.operands[0] == name and name not in user.operands[1:]
        size = sum(b.size for b in user.value)
        same = user.opcode == "fusion" and _IN_PLACE in user.rest and first  # a 4-bit type in other tiles
        if user.opcode in ("bitcast", "reshape") or same:
            total += _taken(inside, user.name, whole)
        elif user.opcode in ("dynamic-slice", "slice", "gather") and first:
            total += size
        elif user.opcode == "dynamic-update-slice" and first:
            total += 0
        elif user.opcode == "scatter" and first:
            total += sum(b.size for b in inside.value(user.operands[-1]))
        elif user.opcode == "reduce" and first and size and inside.users[user.name]:
            total += whole.size * _taken(inside, user.name, user.value[0]) // size
        else:
            return whole.size
    return total


def _placed(inside: Computation, name: str, buffer: Buffer) -> int:
    """The bytes that a fusion writes of a result."""
    op = _origin(inside, name)
    if op.opcode == "parameter":
        return 0
    if op.opcode in ("dynamic-update-slice", "scatter") and _origin(inside, op.operands[0]).opcode == "parameter":
        return sum(b.size for b in inside.value(op.operands[1 if op.opcode == "dynamic-update-slice" else -1]))
    return buffer.size


@dataclasses.dataclass(frozen=True)
class Traffic:
    """The traffic of a whole program.

    Attributes:
      bytes: bytes read and written in main memory.
      collectives: by kind, how many run and how many bytes they exchange.
      flops: operations of matrix products, if they are written as such (on a TPU they are not).
      kernel_flops: operations of Pallas calls that declare none.
      accesses: the single accesses, in the order in which they run; a `-done` moves nothing and waits for its `-start`.
      unbounded: loops that count once, because their number of trips is unknown.
    """

    bytes: int
    collectives: dict[str, dict[str, int]]
    flops: int
    kernel_flops: int
    accesses: tuple[Access, ...]
    unbounded: tuple[str, ...] = ()

    def written(self, dims: Sequence[int]) -> list[Access]:
        """The accesses that write a whole array of this shape to main memory: copies."""
        return [
            access for access in self.accesses
            if any(b.dims == tuple(dims) and 0 < b.hbm <= access.written for b in access.op.value)
        ]  # fmt: skip


def traffic(
    text: str, kernel: Kernel | None = None, cached: Cached | None = None, rounds: Rounds = lambda op: None
) -> Traffic:
    """The traffic of a compiled program, from `compiled.as_text()`.

    Args:
      text: of one chip's program.
      kernel: gives the traffic of Pallas calls; without it, their operands and results count in full.
      cached: removes the reads that the chip's second-level cache saves, if it has one; see `cached.through`.
      rounds: gives the number of runs of loops whose text does not show it.
    """
    program = parse(text)
    found = accesses(program, kernel, rounds)
    found = found if cached is None else cached(program, found)
    collectives: dict[str, dict[str, int]] = {}
    for access in found:
        kind = _kind(access.op)
        if kind:
            entry = collectives.setdefault(kind, {"count": 0, "bytes": 0})
            entry["count"] += access.times
            entry["bytes"] += access.moved * access.times
    flops = sum(access.flops * access.times for access in found)
    inside = sum(access.kernel_flops * access.times for access in found)
    moved = sum(access.total for access in found)
    return Traffic(moved, collectives, flops, inside, tuple(found), _unbounded(program, rounds))
