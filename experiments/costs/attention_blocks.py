"""`python -m experiments.costs.attention_blocks`: the block sizes of `specjax.kernels.tree_attention` on TPUs.

Without a chip they follow from a model of the pipeline, which fetches for a step while it computes the one before. It starts
the fetch for the next step before it waits for this one's, so two may be under way. Where a step fetches for F seconds,
computes for W, and a fetch takes L until its first byte, the period is the longest of F, W and (F + L + W) / 2. W is the
compiler's: the cycles of its schedule, over the clock. What a row's first step does with the block's own keys, and its last to
write the result, is not in it. On a chip all sizes are timed.
"""

import dataclasses
import functools
import glob
import itertools
import math
import os
import pathlib
import re
import sys
import tempfile
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from experiments.costs.kernels import seconds
from specjax.bench.run import progress
from specjax.kernels.tree_attention import block_sizes, blocks, tpu
from specjax.kernels.tree_attention.blocks import Tiles
from specjax.kernels.tree_attention.parts import Operands
from specjax.serve.options import option
from specjax.sharding import aot
from specjax.terminal import bad_input, run_program, write

TOPOLOGIES = {"v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2"}
CORES = {"v5e": 1, "v5p": 2, "v6e": 1}
CLOCK = {"v5e": 1.5e9, "v5p": 1.75e9, "v6e": 1.75e9}
"""Cycles a second, assumed."""
LATENCY = 0.5e-6
"""Seconds from the start of a fetch to its first byte, assumed."""
WIDTH = 128
SLOT = 2 * WIDTH * 2
"""Bytes of a slot's key and value in bfloat16."""
CAPACITIES = (1024, 2048, 4096, 8192, 16384, 32768, 131072)
HEADS = (1, 2, 4, 8)
QUERIES = (8, 64, 256, 1024)
ROWS = 8
CYCLES = {
    ("v5e", 8): (257, 57, 0.156),
    ("v5e", 64): (257, 156, 0.350),
    ("v5e", 256): (254, 537, 0.910),
    ("v5e", 1024): (257, 2791, 2.469),
    ("v5p", 8): (423, 57, 0.156),
    ("v5p", 64): (423, 161, 0.338),
    ("v5p", 256): (425, 574, 0.859),
    ("v5p", 1024): (424, 2815, 2.414),
    ("v6e", 8): (272, 42, 0.150),
    ("v6e", 64): (272, 88, 0.338),
    ("v6e", 256): (273, 199, 1.086),
    ("v6e", 1024): (225, 3889, 0.775),
}
"""By chip and queries of a kv-head: cycles of a step beside its work, of a head's work on some slots (`blocks.chunk`), and what
that grows by with each; as `attention_blocks --source schedule` prints them with libtpu 0.0.42.1."""


Cost = Callable[[str, int, int, int, Tiles], float]
"""Seconds of one call, of a chip, kv-heads that a core reads, queries of each, slots and tiles."""


def lengths(capacity: int, rows: int = ROWS) -> list[int]:
    """Of the rows of a batch: spread over the cache by the golden ratio, so that they end anywhere in a block."""
    return [math.ceil(capacity * ((row + 1) * (5**0.5 - 1) / 2 % 1)) for row in range(rows)]


def bandwidth(chip: str) -> float:
    """Bytes a second of a core."""
    return aot.CHIPS[chip].hbm_bandwidth / CORES[chip]


def period(chip: str, queries: int, tiles: Tiles) -> float:
    """Seconds from one step to the next."""
    step, head, slot = CYCLES[chip, queries]
    fetch = tiles.heads * tiles.slots * SLOT / bandwidth(chip)
    size = blocks.chunk(tiles.slots)
    work = (step + tiles.heads * (tiles.slots // size) * (head + slot * size)) / CLOCK[chip]
    return max(fetch, work, (fetch + LATENCY + work) / 2)


def steps(heads: int, capacity: int, tiles: Tiles, rows: int = ROWS) -> int:
    """Of the grid: a row's live blocks, for each group of heads."""
    return heads // tiles.heads * sum(math.ceil(length / tiles.slots) for length in lengths(capacity, rows))


def modelled(chip: str, heads: int, queries: int, capacity: int, tiles: Tiles, rows: int = ROWS) -> float:
    """`Cost` by the model."""
    return steps(heads, capacity, tiles, rows) * period(chip, queries, tiles)


def before(chip: str, heads: int, queries: int, capacity: int) -> tuple[int, float]:
    """Steps and modelled seconds of a grid of rows, heads and the longest row's blocks of 512 slots. All are run; those
    after a row's end fetch and compute nothing."""
    old = Tiles(512, 1)
    run = ROWS * heads * math.ceil(max(lengths(capacity)) / old.slots)
    empty = run - steps(heads, capacity, old)
    return run, modelled(chip, heads, queries, capacity, old) + empty * CYCLES[chip, queries][0] / CLOCK[chip]


def share(chip: str, heads: int, capacity: int, taken: float) -> float:
    """Of the bandwidth: the seconds that the filled slots alone would take, over those that it took."""
    return heads * sum(lengths(capacity)) * SLOT / bandwidth(chip) / taken


def best(cost: Cost, chip: str, heads: int, queries: int, capacity: int) -> int:
    """The smallest block size that is within a hundredth of the fastest."""
    operands = operands_of(heads, queries, capacity)
    room = blocks.VMEM[chip]
    sizes = [size for size in sorted(blocks.SIZES) if 256 <= size <= capacity]
    taken = {size: cost(chip, heads, queries, capacity, blocks.fitted(operands, heads, size, room)) for size in sizes}
    return next(size for size in sizes if taken[size] <= 1.01 * min(taken.values()))


def table(chips: Sequence[str], cost: Cost) -> dict[tuple[str, int, int], tuple[int, ...]]:
    """`block_sizes.SLOTS` of these chips."""
    keys = list(itertools.product(chips, HEADS, QUERIES))
    with progress(len(keys)) as advance:
        found = {}
        for chip, heads, queries in keys:
            found[chip, heads, queries] = tuple(best(cost, chip, heads, queries, slots) for slots in CAPACITIES)
            advance(f"{chip}, {heads} heads, {queries} queries")
    return found


def source(found: dict[tuple[str, int, int], tuple[int, ...]]) -> str:
    """The text of `block_sizes.py`."""
    lines = [f'    ("{chip}", {heads}, {queries}): {sizes},' for (chip, heads, queries), sizes in sorted(found.items())]
    return "\n".join([
        '"""Block sizes of the TPU kernel of tree attention, written by '
        '`python -m experiments.costs.attention_blocks --write`."""',
        "",
        f"CAPACITIES = {CAPACITIES}",
        '"""Slots of a row."""',
        "SLOTS = {",
        *lines,
        "}",
        '"""By chip, kv-heads that a core reads and queries of each: slots of a block, for every capacity."""',
        "",
    ])  # fmt: skip


def operands_of(heads: int, queries: int, capacity: int, keys: int = 16, width: int = WIDTH) -> Operands:
    """Shapes of a step's attention in bfloat16."""
    batch = ROWS
    of = lambda dtype, *shape: jax.ShapeDtypeStruct(shape, dtype)
    half = functools.partial(of, jnp.bfloat16)
    cache, own = half(batch, heads, capacity, width), half(batch, heads, keys, width)
    seen = of(jnp.bool_, batch, min(queries, keys), keys)
    return Operands(half(batch, heads, queries, width), own, own, cache, cache, of(jnp.int32, batch), seen)


def timed(chip: str, heads: int, queries: int, capacity: int, tiles: Tiles) -> float:
    """`Cost` on this chip."""
    shapes = operands_of(heads * CORES[chip], queries, capacity)
    given = dataclasses.replace(
        jax.tree.map(lambda x: jnp.ones(x.shape, x.dtype), shapes), length=jnp.asarray(lengths(capacity), jnp.int32)
    )
    call = jax.jit(lambda _, given: attend(given, tiles))
    return seconds(call, jnp.zeros(()), (given,), repeats=5, calls=10)


def attend(operands: Operands, tiles: Tiles) -> jax.Array:
    """The kernel with given tiles."""
    return tpu.attend(operands, scale=WIDTH**-0.5, window=None, soft_cap=None, tiles=tiles)


def schedule(chips: Sequence[str]) -> dict[tuple[str, int], tuple[int, float, float]]:
    """`CYCLES`, from the text of the schedule that the TPU's compiler writes where it is told to before it is loaded."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["LIBTPU_INIT_ARGS"] = f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true"
        found = {}
        with progress(len(chips) * len(QUERIES)) as advance:
            for chip in chips:
                for queries in QUERIES:
                    (step, less), (_, more) = (_scheduled(folder, chip, queries, slots) for slots in (512, 1024))
                    slot = (more - less) / 512
                    found[chip, queries] = step, less - 512 * slot, slot
                    advance(f"{chip}, {queries} queries")
        return found


def _scheduled(folder: str, chip: str, queries: int, slots: int) -> tuple[int, int]:
    """Cycles of a step without its work, and of that for a head."""
    device = np.asarray(aot.devices(TOPOLOGIES[chip])[:1])
    place = jax.sharding.NamedSharding(jax.sharding.Mesh(device, "x"), jax.P())
    given = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), operands_of(2 * CORES[chip], queries, 8192)
    )
    aot.compiled(jax.jit(lambda given: attend(given, Tiles(slots, 2))).lower(given))
    (file,) = [name for name in glob.glob(f"{folder}/*tree_attention*-final_bundles.txt")]
    lines = pathlib.Path(file).read_text().splitlines()
    for name in glob.glob(f"{folder}/*"):
        os.remove(name)
    return cycles(lines)


def cycles(lines: Sequence[str]) -> tuple[int, int]:
    """Of the compiler's schedule, an instruction word a line with its number: the words of a step that are always run, and
    those of the work on a block. Of the parts that may be jumped over, two have matrix products: a row's first step, which is
    not counted, and the work. The part after them is a row's last step, which is not counted either."""
    begin, last, jumps, places, products = 0, 0, [], {}, []
    for line in lines:
        word = re.match(r"\s*(0x[0-9a-f]+|0)\s+(\w+)?\s*:", line)
        if word is None:
            continue
        last = int(word[1], 16)
        begin = begin or (last if word[2] == "LB" else 0)
        places |= {int(region): last for region in re.findall(r"(?:Start|Start/End empty) region (\d+)", line)}
        jumps += [(last, int(region)) for region in re.findall(r"sbr\.rel .*?target = \$region(\d+)", line) if begin]
        products += [last] if "matmul" in line else []
    ahead = [(at, places[region]) for at, region in jumps if places.get(region, 0) > at]
    inner = sorted((at, to) for at, to in ahead if not any(at < other < to for other, _ in ahead))
    own, work = (part for part in inner if any(part[0] < at < part[1] for at in products))
    end = inner[inner.index(work) + 1]
    return last - begin - sum(to - at for at, to in (own, work, end)), work[1] - work[0]


CASES = (
    ("v5e", 2, 8, 2048), ("v5e", 2, 64, 8192), ("v5e", 2, 64, 32768), ("v5e", 8, 64, 8192),
    ("v5p", 1, 256, 8192), ("v5p", 4, 64, 8192),
    ("v6e", 2, 8, 2048), ("v6e", 2, 64, 8192), ("v6e", 2, 64, 32768), ("v6e", 8, 64, 8192),
)  # fmt: skip


def report() -> str:
    """What the blocks of the table change, for some calls."""
    lines = [
        "| chip | kv-heads | queries | slots | block | heads per step | steps | bandwidth |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for chip, heads, queries, capacity in CASES:
        wanted = blocks.listed(chip, heads, queries, capacity)
        tiles = blocks.fitted(operands_of(heads, queries, capacity), heads, wanted, blocks.VMEM[chip])
        run, taken = before(chip, heads, queries, capacity)
        now = share(chip, heads, capacity, modelled(chip, heads, queries, capacity, tiles))
        lines.append(
            f"| {chip} | {heads} | {queries} | {capacity} | 512 -> {tiles.slots} | 1 -> {tiles.heads} "
            f"| {run} -> {steps(heads, capacity, tiles)} | {share(chip, heads, capacity, taken):.0%} -> {now:.0%} |"
        )
    return "\n".join(lines) + "\n"


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockOptions:
    """See the help of each."""

    source: str = option(
        "model",
        "where times come from: `model`; `time`, on the TPU at hand, of whose chip alone; `schedule` prints the cycles that "
        "the model is of, by libtpu's compiler",
        choices=("model", "time", "schedule"),
    )
    write: bool = option(False, "write the table that follows; without it the effect of the one in use is printed")


def command(options: BlockOptions) -> int:
    """Prints or writes."""
    if options.source == "schedule":
        with bad_input():
            found = schedule(list(CORES))
        for (chip, queries), (step, head, slot) in found.items():
            write(f'("{chip}", {queries}): ({step}, {head:.0f}, {slot:.3f}),\n')
        return 0
    chips: Sequence[str] = list(CORES)
    if options.source == "time":
        with bad_input():
            chips = [chip_here()]
    if not options.write and options.source == "model":
        write(report())
        return 0
    made = table(chips, functools.partial(modelled, rows=1000) if options.source == "model" else timed)
    text = source(block_sizes.SLOTS | made)
    if options.write:
        pathlib.Path(block_sizes.__file__).write_text(text)
    else:
        write(text)
    return 0


def chip_here() -> str:
    """The chip that JAX runs on.

    Raises:
      ValueError: where it is none of the table's.
    """
    kind = jax.devices()[0].device_kind
    chip = aot.chip_named(kind)
    if chip is None or chip.name not in CORES:
        raise ValueError(f"--source time needs one of {', '.join(CORES)}, and JAX runs on {kind}: use --source model")
    return chip.name


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    about = "Block sizes of tree attention on TPUs: modelled, not timed, where there is no chip."
    return run_program("python -m experiments.costs.attention_blocks", about, BlockOptions, command, argv)


if __name__ == "__main__":
    sys.exit(main())
