"""The blocks into which the TPU kernel of tree attention cuts a cache: by a table of chips and by their memory."""

import dataclasses
import math

import jax

from specjax.kernels.layouts import slots_last
from specjax.kernels.tree_attention.block_sizes import CAPACITIES, SLOTS
from specjax.kernels.tree_attention.parts import Operands
from specjax.sharding.aot import chip_named

MIB = 1 << 20
VMEM = {"v5e": 16 * MIB, "v5p": 16 * MIB, "v6e": 32 * MIB}
"""The bytes of a core's vector memory that the compiler allows one kernel. The rest (of 128, 64 and 128 MiB) is XLA's,
for operands of other operations."""
SIZES = (4096, 2048, 1024, 512, 256, 128)
"""The candidate block sizes."""
COMPUTED = 1024
"""Slots computed at a time: more would only lengthen the program."""


@dataclasses.dataclass(frozen=True)
class Tiles:
    """The part of a cache that a step of the grid reads.

    Attributes:
      slots: cache slots, the same for every row.
      heads: kv-heads at a time.
      parts: parts of the rows, each with a list of steps for its own core.
    """

    slots: int
    heads: int
    parts: int = 1


def tiles(operands: Operands, window: int | None) -> Tiles:
    """The tiles for such operands on the ambient mesh's device or, without a mesh, on JAX's first device."""
    device = jax.sharding.get_abstract_mesh().abstract_device or jax.devices()[0]
    batch, heads, queries, width = operands.queries.shape
    capacity, kept = operands.cache_key.shape[2], operands.cache_key.dtype.itemsize
    known, cores = chip_named(device.device_kind), getattr(device, "num_cores", None) or 1
    chip = known.name if known is not None and known.name in VMEM else "v5e"  # it has the least memory for a kernel
    parts = cores if heads % cores and batch % cores == 0 else 1  # a core has its own heads, otherwise its own rows
    mine = heads if heads % cores else heads // cores
    span = capacity if window is None or operands.cache_positions is not None else min(capacity, window)
    wanted = listed(chip, mine * width * kept / 256, queries, span)
    return dataclasses.replace(fitted(operands, mine, wanted, VMEM[chip]), parts=parts)


def fitted(operands: Operands, heads: int, slots: int, room: int) -> Tiles:
    """Blocks of `slots` slots for as many heads as fit `room` bytes; smaller blocks if one head does not fit."""
    several = [some for some in range(heads, 0, -1) if heads % some == 0]
    sizes = [size for size in SIZES if size <= slots]
    cuts = [Tiles(cut(operands.cache_key.shape[2], size), some) for size in sizes for some in several]
    return next((tiles for tiles in cuts if used(operands, tiles) <= room), cuts[-1])


def listed(chip: str, heads: float, queries: int, capacity: int) -> int:
    """The table's block size.

    Args:
      chip: a chip of the table.
      heads: kv-heads that a core reads, in units of 128 bfloat16 numbers.
      queries: the queries of a kv-head.
      capacity: slots of a row.
    """
    kinds = [(h, q) for c, h, q in SLOTS if c == chip]
    nearest = max((h for h, _ in kinds if h <= heads), default=min(h for h, _ in kinds))
    above = min((q for _, q in kinds if q >= queries), default=max(q for _, q in kinds))
    column = sum(capacity >= known for known in CAPACITIES[1:])
    return SLOTS[chip, nearest, above][column]


def cut(capacity: int, slots: int) -> int:
    """A block of at most about `slots` slots.

    It is the whole of a small cache, otherwise a divisor of the capacity, otherwise the size that reads least beyond
    its end."""
    if capacity <= min(slots, COMPUTED):
        return capacity
    unit = 128 if slots <= COMPUTED else COMPUTED // 2
    largest = min(slots, capacity // unit * unit)
    exact = (size for size in range(largest, slots // 2 - 1, -unit) if capacity % size == 0)
    return next(exact, math.ceil(capacity / math.ceil(capacity / largest) / unit) * unit)


def chunk(slots: int) -> int:
    """How many of a block's slots are computed at a time."""
    if slots <= COMPUTED:
        return slots
    return next(size for size in range(COMPUTED, 0, -128) if slots % size == 0)


def used(operands: Operands, tiles: Tiles) -> int:
    """The most bytes of vector memory that a step takes, including the fetch for the next step."""
    lanes = lambda size: math.ceil(size / 128) * 128
    each = lambda x: x.dtype.itemsize
    heads, slots = tiles.heads, lanes(tiles.slots)
    queries, width, keys = operands.queries.shape[2], lanes(operands.queries.shape[3]), lanes(operands.key.shape[2])
    read = 1 if operands.value is None else 2  # keys, and values that are not the keys
    cache = read * heads * slots * width * each(operands.cache_key)
    if slots_last(*operands.cache_key.shape[2:]):
        cache = read * heads * slots * math.ceil(operands.queries.shape[3] / 32) * 32 * each(operands.cache_key)
    lines = 2 * heads * (operands.key_scale is not None)
    lines += (operands.unseen is not None) + (operands.cache_positions is not None)
    line = 4 * 8 * slots  # eight numbers high
    own = heads * (queries * each(operands.queries) + 2 * keys * each(operands.key)) * width
    facts = 4 * queries * 128
    results = 4 * heads * queries * (width + 2 * 128)
    scores = 2 * 4 * queries * lanes(chunk(tiles.slots))
    return 2 * (cache + lines * line + own + facts + results) + results + scores
