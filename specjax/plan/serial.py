"""The time of a compiled program whose operations run one after the other, which is longer than they need.

A TPU's program stands in the order in which it runs, and the compiler has written its estimate of cycles at most operations:
kernels, and that of a small one is that of starting it and of waiting for what it reads and writes. The rest is reckoned with:

- Copies that begin ahead (`copy-start`, `slice-start`) take what an operation leaves of the memory's bandwidth, in the order in
  which they began; an operation that needs one waits for the rest of it.
- What the compiler gives no estimate of (Pallas kernels, relayouts, writes into a cache) takes its bytes at the rate that it
  expects of large reads (`Chip.reads`), and as long as the median of its estimates at least. Scalars take nothing.
- A collective takes its bytes over the links, and the latency of its way through the slice.
- The program's own code is read once.

Where the compiler gives no estimates at all, on a GPU, every operation takes its bytes or its matrix products at the published
speed, whichever is longer, and the launch of a kernel.
"""

import collections
import dataclasses
import statistics

from specjax.plan.hlo import COLLECTIVES, Access, Traffic
from specjax.sharding.aot import Chip

PASSES = {"all-reduce": 2}
"""How often a collective goes through the slice, where it is more than once."""
PARTS = ("kernels", "loops", "assumed", "waits", "collectives", "code")
"""What `Serial` adds up."""
_COPIES = ("copy-start", "slice-start")


@dataclasses.dataclass(frozen=True)
class Serial:
    """Seconds of one run, each part by itself; they do not overlap.

    Attributes:
      kernels: that the compiler gives an estimate for, or, on a GPU, all of them; without those in loops.
      loops: likewise, those in loops.
      assumed: operations that it gives none for.
      waits: for copies that began ahead.
      collectives: bytes and latencies.
      code: reading the program.
      launches: how many kernels run.
      least: seconds that a kernel takes at least where the compiler says nothing.
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
    """The seconds of a program whose operations run one after the other.

    Args:
      traffic: of the program.
      chip: that it is for.
      topology: the slice, such as `v5e:2x2`.
      parts: chips that share rows.
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
    """Which part an operation belongs to, and its seconds."""
    moved = (access.read + access.written) / chip.hbm_bandwidth
    if access.op.cycles is not None:
        return "loops" if access.times > 1 else "kernels", max(access.op.cycles / chip.clock, moved)
    if estimated:
        return "assumed", max((access.read + access.written) / rate, access.kernel_flops / chip.flops, least)
    computed = (access.flops + access.kernel_flops) / chip.flops
    return "loops" if access.times > 1 else "kernels", max(moved, computed) + least


def _scalar(access: Access) -> bool:
    """Whether it makes single numbers alone, which a TPU's scalar unit does."""
    return all(not buffer.dims for buffer in access.op.value)


class _Copies:
    """Those under way, in the order in which they began, and the seconds that each still needs of the whole memory."""

    def __init__(self) -> None:
        self.left: dict[str, float] = {}

    def begin(self, name: str, seconds: float) -> None:
        self.left[name] = seconds

    def go_on(self, seconds: float) -> None:
        """Lets them have the memory for so long."""
        for name, left in self.left.items():
            self.left[name] = max(left - seconds, 0.0)
            seconds = max(seconds - left, 0.0)

    def finish(self, name: str) -> float:
        """How long it takes until a copy is there, and those that began before it."""
        if name not in self.left:
            return 0.0
        names = list(self.left)
        before = names[: names.index(name) + 1]
        return sum(self.left.pop(each) for each in before)
