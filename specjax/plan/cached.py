"""What a GPU's second-level cache spares of a program's reads.

An operation that reads what another has just made finds it in the cache, as long as little passed through in between: parts
of a product that was split over the multiprocessors, say, which the next kernel sums. A read of a temporary is free where all
that the program moves between its last use and that read, itself included, stays below half of the cache: an H100's is two
halves, and both may hold the same lines. Every write counts: a layer's weights may have pushed the lines out before a step
comes to the same place in memory again. So do weights and the cache of keys and values, once for every operation, and
whatever a Pallas kernel reads. This is reckoned, not measured.
"""

import dataclasses
from collections.abc import Sequence

from specjax.plan.hlo import Access, Op, Program

SHARE = 0.5
"""The share of the cache."""


def through(program: Program, found: Sequence[Access], cache: int) -> list[Access]:
    """Accesses in their order, without the reads that a cache of so many bytes spares."""
    ops = {op.name: op for here in program.computations.values() for op in here.ops.values()}
    used: dict[str, int] = {}  # of a temporary, the bytes that had passed when it was last used
    passed, left = 0, []
    for access in found:
        spared = 0
        for name, size in access.given:
            maker = _maker(ops, name)
            if maker in used:
                spared += size * (passed - used[maker] + size <= SHARE * cache)
                used[maker] = passed + size
        passed += access.total
        if access.written >= sum(buffer.hbm for buffer in access.op.value):  # all of it, and not a slice in place
            used[access.op.name] = passed
        left.append(dataclasses.replace(access, read=max(access.read - spared, 0)))
    return left


def _maker(ops: dict[str, Op], name: str) -> str:
    """The operation whose memory a value lies in."""
    op = ops[name]
    while op.operands and (op.opcode in ("bitcast", "reshape", "get-tuple-element") or op.opcode.endswith("-done")):
        op = ops[op.operands[0]]
    return op.name
