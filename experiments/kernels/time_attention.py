"""Tree attention on the NVIDIA GPU at hand: every implementation's bytes a second, as a share of a copy's in the same run.

python experiments/kernels/time_attention.py --output experiments/kernels/results.json
"""

import dataclasses
import functools
import itertools
import json
import math
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from specjax.bench.attention_blocks import lengths
from specjax.bench.kernels import copy_bandwidth, seconds
from specjax.bench.run import progress
from specjax.kernels.tree_attention import tree_attention
from specjax.models import kv_bits
from specjax.serve.options import check_least, option
from specjax.terminal import bad_input, flag, run_program, write

Array = jax.Array

GOAL = 0.8
"""The share that is wanted."""
IMPLEMENTATIONS = {"Triton": "pallas", "Mosaic GPU": "mosaic_gpu", "XLA": "xla"}
HEADS, KV_HEADS, NODES = 32, 8, 16
"""Those of Llama-3-8B, and of a tree."""
SLOTS = 32768
LAYERS = 4
"""Each with a cache of its own in one program: together they are larger than what a GPU keeps on its chip."""


@dataclasses.dataclass(frozen=True)
class Case:
    """One step's attention.

    Attributes:
      rows: of the batch.
      ragged: whether rows have filled from a tenth to nearly all of their slots, instead of all.
      width: of a head.
      cache: its type; queries are bfloat16.
      slots: of a row.
    """

    rows: int
    ragged: bool
    width: int
    cache: str
    slots: int = SLOTS

    @property
    def used(self) -> list[int]:
        """Slots that each row has filled."""
        full = self.slots - NODES
        return lengths(full, self.rows) if self.ragged else [full] * self.rows

    @property
    def bytes(self) -> int:
        """The fewest that a layer reads: filled slots with their scales, and the block's own keys and values."""
        scaled = 4 * (self.cache in kv_bits.LARGEST)
        slot = self.width * jnp.dtype(self.cache).itemsize + scaled
        return 2 * KV_HEADS * (sum(self.used) * slot + self.rows * NODES * self.width * 2)


BATCHES = ((1, False), (8, False), (8, True))
CASES = tuple(
    Case(rows, ragged, width, cache)
    for (width, cache), (rows, ragged) in itertools.product(
        (
            (64, "bfloat16"),
            (80, "bfloat16"),
            (96, "bfloat16"),
            (128, "bfloat16"),
            (128, "int8"),
            (128, "float8_e4m3fn"),
        ),
        BATCHES,
    )
)


@dataclasses.dataclass(frozen=True)
class Row:
    """One measurement.

    Attributes:
      case: what was timed.
      implementation: by which, a key of IMPLEMENTATIONS.
      microseconds: of a layer; None where it does not serve the case.
      share: its bytes a second over the copy's.
      why: why it does not.
    """

    case: Case
    implementation: str
    microseconds: float | None
    share: float | None
    why: str | None = None


@functools.partial(jax.jit, static_argnums=0)
def operands(case: Case, seed: int) -> tuple[Any, ...]:
    """The block's own keys and values `[B, N, K, H]`, and a cache's `[B, K, S, H]`, of random numbers."""
    keys = jax.random.split(jax.random.key(seed), 4)
    draw = lambda key, *shape: jax.random.normal(key, (case.rows, *shape, case.width), jnp.bfloat16)
    new = [draw(key, NODES, KV_HEADS) for key in keys[:2]]
    like = kv_bits.empty((0,), case.cache)
    return *new, *(kv_bits.stored(draw(key, KV_HEADS, case.slots), like) for key in keys[2:])


def attend(query: Array, used: Array, *layers: tuple[Any, ...], implementation: str) -> Array:
    """What the last of the layers finds, each of which asks with what the one before found.

    Args:
      query: `[B, N, K * G, H]`.
      used: `[B]` int32, slots that each row has filled.
      *layers: `operands` of each.
      implementation: of `tree_attention`.
    """
    visible = jnp.broadcast_to(jnp.tril(jnp.ones((NODES, NODES), bool)), (len(query), NODES, NODES))
    for key, value, *cache in layers:
        (cache_key, key_scale), (cache_value, value_scale) = map(kv_bits.parts, cache)
        query = tree_attention(
            query, key, value, cache_key, cache_value, used, visible=visible, scale=query.shape[-1] ** -0.5,
            key_scale=key_scale, value_scale=value_scale, implementation=implementation,
        )  # fmt: skip
    return query


def timed(case: Case, implementation: str, bandwidth: float, repeats: int, calls: int) -> Row:
    """One row of the table.

    Args:
      case: what to time.
      implementation: a key of IMPLEMENTATIONS.
      bandwidth: of a copy, in bytes a second.
      repeats: measurements, of which the median counts.
      calls: of the program, a measurement.
    """
    query = jax.random.normal(jax.random.key(LAYERS), (case.rows, NODES, HEADS, case.width), jnp.bfloat16)
    rest = jnp.asarray(case.used, jnp.int32), *(operands(case, seed) for seed in range(LAYERS))
    program = jax.jit(functools.partial(attend, implementation=IMPLEMENTATIONS[implementation]), donate_argnums=0)
    try:
        taken = seconds(program, query, rest, repeats, calls) / LAYERS
    except (ValueError, NotImplementedError, jax.errors.JaxRuntimeError) as error:
        return Row(case, implementation, None, None, (str(error).strip() or type(error).__name__).splitlines()[0])
    return Row(case, implementation, round(taken * 1e6, 2), float(f"{case.bytes / taken / bandwidth:.4g}"))


def table(rows: Sequence[Row]) -> str:
    """In Markdown, a line a case, and why some were left out."""
    lines = [
        f"| rows | width | cache | {' | '.join(IMPLEMENTATIONS)} | goal |",
        "|" + " --- |" * (len(IMPLEMENTATIONS) + 4),
    ]
    for case, found in itertools.groupby(rows, lambda row: row.case):
        shares = {row.implementation: "-" if row.share is None else f"{row.share:.0%}" for row in found}
        batch = f"{case.rows}{', ragged' * case.ragged}"
        lines.append(f"| {batch} | {case.width} | {case.cache} | {' | '.join(shares.values())} | {GOAL:.0%} |")
    reasons = dict.fromkeys(f"{row.implementation}: {row.why}" for row in rows if row.why)
    return "\n".join([*lines, "", *reasons]) + "\n"


@dataclasses.dataclass(frozen=True, kw_only=True)
class TimeOptions:
    """See the help of each."""

    repeats: int = option(9, "measurements; the median counts", least=1)
    calls: int = option(20, f"calls of a program of {LAYERS} layers, a measurement", least=1)
    output: str | None = option(None, "a file for all of it, as JSON", metavar="FILE")


def command(options: TimeOptions) -> int:
    """Measures, prints and writes."""
    with bad_input():
        check_least(options, flag)
        if jax.devices()[0].platform != "gpu":
            raise ValueError(f"timing tree attention needs an NVIDIA GPU, and JAX found {jax.devices()[0].device_kind}")
        if options.output is not None:
            pathlib.Path(options.output).touch()
    largest = max(CASES, key=lambda case: case.bytes)
    count = math.prod((2, largest.rows, KV_HEADS, largest.slots, largest.width))
    bandwidth = copy_bandwidth(count, "bfloat16", options.repeats, options.calls)
    rows = []
    with progress(len(CASES) * len(IMPLEMENTATIONS)) as advance:
        for case, name in itertools.product(CASES, IMPLEMENTATIONS):
            rows.append(timed(case, name, bandwidth, options.repeats, options.calls))
            advance(f"{name}, {case.rows} rows, width {case.width}, {case.cache}")
    device = jax.devices()[0].device_kind
    write(
        f"{device}: copies {bandwidth / 1e9:.0f} GB/s, read and written; of that, by jax {jax.__version__}:\n\n{table(rows)}"
    )
    if options.output is not None:
        content = {
            "device": device, "jax": jax.__version__, "copy_bytes_per_second": round(bandwidth), "goal": GOAL,
            "layers": LAYERS, "heads": HEADS, "kv_heads": KV_HEADS, "nodes": NODES,
            "rows": [dataclasses.asdict(row) for row in rows],
        }  # fmt: skip
        pathlib.Path(options.output).write_text(json.dumps(content, indent=1) + "\n")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    about = "Tree attention as a share of the copy bandwidth of the GPU at hand."
    return run_program("python experiments/kernels/time_attention.py", about, TimeOptions, command, argv)


if __name__ == "__main__":
    sys.exit(main())
