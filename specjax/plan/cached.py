"""The reads of a program that a GPU's second-level cache saves.

An operation that reads a result made just before finds it in the cache, as long as little else passed through in
between. An example is a product that was split over the multiprocessors, whose parts the next kernel sums.

A read of a temporary is free if everything that the program moves from its last use up to and including that read stays
below half of the cache. An H100's cache has two halves, and both may hold the same lines.

Every write counts: a layer's weights may have evicted the lines before a step returns to the same place in memory.
Weights, the cache of keys and values (once for every operation), and all reads of Pallas kernels count too. This is an
estimate, not a measurement.
"""

import dataclasses
from collections.abc import Sequence

from specjax.plan.hlo import Access, Op, Program

SHARE = 0.5
"""The usable share of the cache."""


def through(program: Program, found: Sequence[Access], cache: int) -> list[Access]:
    """Accesses in order, without the reads that a cache of this number of bytes saves."""
    ops = {op.name: op for here in program.computations.values() for op in here.ops.values()}
    used: dict[str, int] = {}  # by temporary: the bytes moved up to its last use
    passed, left = 0, []
    for access in found:
        spared = 0
        for name, size in access.given:
            maker = _maker(ops, name)
            if maker in used:
                spared += size * (passed - used[maker] + size <= SHARE * cache)
                used[maker] = passed + size
        passed += access.total
        if access.written >= sum(buffer.hbm for buffer in access.op.value):  # the whole result, not a slice in place
            used[access.op.name] = passed
        left.append(dataclasses.replace(access, read=max(access.read - spared, 0)))
    return left


def _maker(ops: dict[str, Op], name: str) -> str:
    """The operation whose memory holds a value."""
    op = ops[name]
    while op.operands and (op.opcode in ("bitcast", "reshape", "get-tuple-element") or op.opcode.endswith("-done")):
        op = ops[op.operands[0]]
    return op.name
