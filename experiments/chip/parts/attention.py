"""Tree attention timed: every implementation's bytes per second, as a share of those that the chip copies in the same
run."""

import dataclasses
import functools
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp

from experiments.chip.base import (
    Part,
    Record,
    Run,
    Setting,
    Shown,
    compiled,
    numbers,
    seconds_of,
    table,
)
from specjax.kernels.tree_attention import tree_attention
from specjax.kernels.tree_attention.mosaic_gpu import WIDTHS
from specjax.models import kv_bits

WAYS = {
    "gpu": {"Triton": "pallas", "Mosaic GPU": "mosaic_gpu", "XLA": "xla"},
    "tpu": {"Mosaic": "pallas", "XLA": "xla"},
    "cpu": {"blocked": "blocked", "XLA": "xla"},
}
SIZES = {"8B": (32, 8, 128), "70B on 8 chips": (8, 1, 128), "1B": (32, 8, 64), "heads of 96": (32, 8, 96)}
"""Query heads, kv-heads and their width: Llama 3.1's, a chip's part where eight share them, Llama 3.2's, and an odd width."""
ROWS = 8
OFF_CHIP = 2**28
"""Bytes that a program reads at least, more than a chip keeps to itself between two calls."""


@dataclasses.dataclass(frozen=True)
class Shape:
    """One layer's step.

    Attributes:
      model: a key of SIZES.
      nodes: slots of the tree.
      slots: of a row's cache, all of them filled but for a few.
      cache: its type; queries are bfloat16.
      rows: of the batch; of `ragged` ones, the first has an eighth of its slots filled and the last all.
      ragged: whether rows are of different lengths.
    """

    model: str
    nodes: int
    slots: int
    cache: str
    rows: int = ROWS
    ragged: bool = False

    def __str__(self) -> str:
        return f"{self.model}, {self.rows}{' ragged' * self.ragged} rows, {self.nodes} nodes, {self.slots} slots, {self.cache}"

    @property
    def used(self) -> list[int]:
        """Slots that each row has filled."""
        full = self.slots - self.nodes
        return [full * (row + 1) // self.rows for row in range(self.rows)] if self.ragged else [full] * self.rows

    @property
    def bytes(self) -> int:
        """The fewest that a layer reads: filled slots with their scales, and the block's own keys and values."""
        _, heads, width = SIZES[self.model]
        slot = width * jnp.dtype(self.cache).itemsize + 4 * (self.cache in kv_bits.LARGEST)
        return 2 * heads * (sum(self.used) * slot + self.rows * self.nodes * width * 2)

    @property
    def layers(self) -> int:
        """How many a program has, each with a cache of its own: enough not to fit on a chip, but few enough to compile."""
        return min(max(2, math.ceil(OFF_CHIP / self.bytes)), 16)


def shapes(setting: Setting) -> list[Shape]:
    """Those of the middle first, and of both types; then nodes, contexts and sizes to either side."""
    if setting.rehearse:
        return [Shape("70B on 8 chips", nodes, 256, cache, 2) for nodes, cache in ((1, "bfloat16"), (16, "int8"))]
    caches = "bfloat16", "int8"
    near = [Shape("8B", n, s, c) for s, n, c in itertools.product((4096, 32768), (16, 1), caches)]
    other = [Shape("70B on 8 chips", n, s, c) for s, n, c in itertools.product((4096, 32768), (16, 1), caches)]
    odd = [
        Shape("8B", 16, 32768, "bfloat16", 1),
        Shape("8B", 16, 32768, "bfloat16", ragged=True),
        Shape("8B", 16, 32768, "float8_e4m3fn"),
    ]
    narrow = [Shape(model, 16, 8192, "bfloat16") for model in ("1B", "heads of 96")]
    product = itertools.product((16384, 1024, 32768, 4096), (64, 8, 16, 1), caches, ("8B", "70B on 8 chips"))
    rest = [Shape(m, n, s, c) for s, n, c, m in product]
    return list(dict.fromkeys([*near, *other, *odd, *narrow, *rest]))


def cases(setting: Setting) -> list[str]:
    """Every shape by every implementation that supports it."""
    return [f"{shape}: {way}" for shape in shapes(setting) for way in WAYS[setting.platform] if _supports(way, shape)]


def _supports(way: str, shape: Shape) -> bool:
    return way != "Mosaic GPU" or (shape.cache == "bfloat16" and SIZES[shape.model][2] in WIDTHS)


def operands(shape: Shape, layer: int) -> tuple[Any, ...]:
    """The block's own keys and values `[B, N, K, H]`, and a cache's `[B, K, S, H]`."""
    _, heads, width = SIZES[shape.model]
    new = [numbers((shape.rows, shape.nodes, heads, width), jnp.bfloat16, 4 * layer + i) for i in range(2)]
    whole = shape.rows, heads, shape.slots, width
    cache = [numbers(whole, shape.cache, 4 * layer + i) for i in (2, 3)]
    if shape.cache in kv_bits.LARGEST:
        cache = [kv_bits.Scaled(values, numbers(whole[:3], jnp.float32, 4 * layer, 0.01)) for values in cache]
    return *new, *cache


def attend(query: jax.Array, used: jax.Array, layers: Any, *, implementation: str) -> jax.Array:
    """What the last of the layers finds, each of which asks with what the one before found.

    Args:
      query: `[B, N, K * G, H]`.
      used: `[B]` int32, slots that each row has filled.
      layers: `operands` of each.
      implementation: of `tree_attention`.
    """
    rows, nodes, _, width = query.shape
    visible = jnp.broadcast_to(jnp.tril(jnp.ones((nodes, nodes), bool)), (rows, nodes, nodes))
    for key, value, *cache in layers:
        (cache_key, key_scale), (cache_value, value_scale) = map(kv_bits.parts, cache)
        found = tree_attention(
            query, key, value, cache_key, cache_value, used, visible=visible, scale=width**-0.5,
            key_scale=key_scale, value_scale=value_scale, implementation=implementation,
        )  # fmt: skip
        query = jax.lax.optimization_barrier(found)  # as between a model's layers: XLA fuses no two of them
    return query


def program_of(shape: Shape, way: str) -> tuple[Any, Any]:
    """A jitted program of some layers, and what makes its arguments."""
    heads, _, width = SIZES[shape.model]

    def given() -> tuple[Any, ...]:
        query = numbers((shape.rows, shape.nodes, heads, width), jnp.bfloat16, 1)
        used = jnp.asarray(shape.used, jnp.int32)
        return query, used, [operands(shape, layer) for layer in range(shape.layers)]

    return jax.jit(functools.partial(attend, implementation=way), donate_argnums=0), given


def made(setting: Setting, case: str) -> Run:
    words, _, way = case.rpartition(": ")
    shape = next(shape for shape in shapes(setting) if str(shape) == words)
    jitted, given = program_of(shape, WAYS[setting.platform][way])
    program = compiled(jitted, *jax.eval_shape(given))

    def run() -> Record:
        query, *rest = given()
        return {
            "seconds": seconds_of(program, query, [rest], setting.pick(0.01, 0.001)) / shape.layers,
            "bytes": shape.bytes,
            "layers": shape.layers,
        }

    return run


def shown(records: list[Record], context: Shown) -> str:
    """Shares of the copy's bandwidth; a program that is over before the next can be called says so."""
    copies, call = context.rate("copy"), context.rate("call") or 0.0
    ways, rows = list(WAYS[context.setting.platform]), {}
    for record in records:
        words, _, way = record["case"].rpartition(": ")
        rows.setdefault(words, {})[way] = record
    lines = [[words, *(_cell(found.get(way), copies, call) for way in ways)] for words, found in rows.items()]
    notes = "Microseconds of a layer"
    notes += f", and the share of {copies / 1e9:.0f} GB/s that the chip copies, read and written." if copies else "."
    if any(cell.endswith("*") for line in lines for cell in line):
        notes += " `*`: the program took less than three calls of an empty one; starting it may be what was timed."
    return "\n".join([notes, "", table(["one layer", *ways], lines)])


def _cell(record: Record | None, copies: float | None, call: float) -> str:
    if record is None:
        return "-"
    share = "" if copies is None else f"{record['bytes'] / record['seconds'] / copies:.0%}, "
    return f"{share}{record['seconds'] * 1e6:.1f} us{'*' * (record['seconds'] * record['layers'] < 3 * call)}"


PART = Part("attention", "Tree attention, timed", 3.0, cases, made, shown, ahead=24)
