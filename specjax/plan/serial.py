"""The time of a compiled program if its operations run one after the other, which is an upper estimate.

A TPU's program is listed in the order in which it runs, and the compiler notes its estimate of cycles at most
operations. These are kernels; the estimate of a small one is the time to start it and to wait for its reads and writes.
The rest is estimated as follows:

- Asynchronous copies (`copy-start`, `slice-start`) take the bandwidth that an operation leaves free, in the order in
  which they began. An operation that needs a copy waits for the rest of it.
- Operations without an estimate (Pallas kernels, relayouts, writes into a cache) move their bytes at the rate that the
  compiler expects of large reads (`Chip.reads`). They take at least the median of its estimates. Scalars take no time.
- A collective takes the time of its bytes over the links, plus the latency of its path through the slice.
- The program's own code is read once.

On a GPU, the compiler gives no estimates at all. Every operation then takes the longer of its bytes and its matrix
products at the published speeds, plus the launch of a kernel.
"""

import collections
import dataclasses
import statistics

from specjax.plan.hlo import COLLECTIVES, Access, Traffic
from specjax.sharding.aot import Chip

PASSES = {"all-reduce": 2}
"""How often a collective passes through the slice, if more than once."""
PARTS = ("kernels", "loops", "assumed", "waits", "collectives", "code")
"""The parts that `Serial` adds up."""
_COPIES = ("copy-start", "slice-start")


@dataclasses.dataclass(frozen=True)
class Serial:
    """Seconds of one run by part; parts do not overlap.

    Attributes:
      kernels: kernels outside loops, with the compiler's estimate; on a GPU, all kernels outside loops.
      loops: the same for kernels in loops.
      assumed: operations without an estimate.
      waits: waiting for asynchronous copies.
      collectives: their bytes and latencies.
      code: reading the program.
      launches: the number of kernels that run.
      least: the least seconds of a kernel without an estimate.
    """

    kernels: float = 0.0
    loops: float = 0.0
    assumed: float = 0.0
    waits: float = 0.0
    collectives: float = 0.0
    code: float = 0.0
    launches: float = 0.0
    least: float = 0.0

    @property
    def parts(self) -> dict[str, float]:
        """Seconds of each."""
        return {name: getattr(self, name) for name in PARTS}


def serial(traffic: Traffic, chip: Chip, topology: str, parts: int, code: int) -> Serial:
    """The seconds of a program if its operations run one after the other.

    Args:
      traffic: the program's traffic.
      chip: the chip for which it was compiled.
      topology: the slice, such as `v5e:2x2`.
      parts: the number of chips that share rows.
      code: bytes of the program itself.
    """
    known = [access.op.cycles for access in traffic.accesses if access.op.cycles is not None]
    rate = chip.reads or chip.hbm_bandwidth
    least = statistics.median(known) / chip.clock if known else chip.launch
    spent: dict[str, float] = collections.defaultdict(float, least=least, code=code / rate)
    copies = _Copies()
    for access in traffic.accesses:
        kind, size = access.op.opcode.removesuffix("-start"), access.read + access.written
        if kind in COLLECTIVES:
            way = PASSES.get(kind, 1) * (parts > 1)
            sent = 2 * way * access.moved * (parts - 1) / parts / chip.links(topology) if parts > 1 else 0.0
            spent["collectives"] += access.times * (sent + way * chip.hops(topology) * chip.latency + chip.launch)
        elif access.op.opcode in _COPIES:
            copies.begin(access.op.name, access.times * size / rate)
        elif access.op.opcode.endswith("-done"):
            spent["waits"] += copies.finish(access.op.operands[0])
        elif not (known and access.op.cycles is None and _scalar(access)):
            part, took = _kernel(access, chip, rate, least, bool(known))
            spent[part] += access.times * took
            spent["launches"] += access.times
            copies.go_on(access.times * max(took - size / rate, 0.0))
    return Serial(**spent)


def _kernel(access: Access, chip: Chip, rate: float, least: float, estimated: bool) -> tuple[str, float]:
    """The part to which an operation belongs, and its seconds."""
    moved = (access.read + access.written) / chip.hbm_bandwidth
    if access.op.cycles is not None:
        return "loops" if access.times > 1 else "kernels", max(access.op.cycles / chip.clock, moved)
    if estimated:
        return "assumed", max((access.read + access.written) / rate, access.kernel_flops / chip.flops, least)
    computed = (access.flops + access.kernel_flops) / chip.flops
    return "loops" if access.times > 1 else "kernels", max(moved, computed) + least


def _scalar(access: Access) -> bool:
    """Whether it makes only single numbers, which a TPU's scalar unit computes."""
    return all(not buffer.dims for buffer in access.op.value)


class _Copies:
    """The copies in progress, in the order in which they began, and the seconds that each still needs at full
    bandwidth."""

    def __init__(self) -> None:
        self.left: dict[str, float] = {}

    def begin(self, name: str, seconds: float) -> None:
        self.left[name] = seconds

    def go_on(self, seconds: float) -> None:
        """Gives the copies the memory's bandwidth for this time."""
        for name, left in self.left.items():
            self.left[name] = max(left - seconds, 0.0)
            seconds = max(seconds - left, 0.0)

    def finish(self, name: str) -> float:
        """The time until a copy, and all copies that began before it, are finished."""
        if name not in self.left:
            return 0.0
        names = list(self.left)
        before = names[: names.index(name) + 1]
        return sum(self.left.pop(each) for each in before)
