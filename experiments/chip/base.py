"""What a part of the run on a chip is, and what parts share: arrays to work on, and how a call is timed."""

import dataclasses
import functools
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from specjax.sharding.aot import Chip, chip_named

Record = dict[str, Any]
Run = Callable[[], Record]
"""What is left of a case once its programs are compiled: it runs them, and says what came of it."""


@dataclasses.dataclass(frozen=True)
class Setting:
    """Where parts run.

    Attributes:
      platform: `cpu`, `gpu` or `tpu`.
      kind: what JAX calls the device.
      rehearse: whether this is a rehearsal: few cases of small shapes, on a CPU.
    """

    platform: str
    kind: str
    rehearse: bool = False

    @property
    def chip(self) -> Chip | None:
        """What is published about the device; None of one that no plan is made for."""
        return chip_named(self.kind)

    def pick(self, real: Any, small: Any) -> Any:
        """One of two, the second in a rehearsal."""
        return small if self.rehearse else real


@dataclasses.dataclass(frozen=True)
class Part:
    """One part of the run: a file of this folder, and a line of `PARTS`.

    Attributes:
      name: of its records.
      title: of its section on the page.
      share: of the time, beside the shares of the others.
      cases: the names of its cases, the most telling first.
      made: compiles a case's programs, but for those that are compiled where they are first called.
      shown: its section in Markdown, of its records and of the whole run's.
      alone: whether its cases have the device to themselves, as whatever is timed must; else several processes share them out.
      ahead: how many cases are compiled at a time, before any of them runs.
      longest: seconds that may pass before a case is compiled or has run; then it is given up.
    """

    name: str
    title: str
    share: float
    cases: Callable[[Setting], Sequence[str]]
    made: Callable[[Setting, str], Run]
    shown: "Callable[[Sequence[Record], Shown], str]"
    alone: bool = True
    ahead: int = 16
    longest: float = 90.0


@dataclasses.dataclass(frozen=True)
class Shown:
    """What a part's section may say beside its own records.

    Attributes:
      setting: where it ran.
      records: of all parts, by name.
    """

    setting: Setting
    records: Mapping[str, Sequence[Record]]

    def rate(self, case: str) -> float | None:
        """What the part `rates` measured; None where it did not come to it."""
        found = (record.get("rate") for record in self.records.get("rates", ()) if record["case"] == case)
        return next(found, None)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """In Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def failures(records: Sequence[Record]) -> str:
    """Why cases have no result, a line a reason; nothing where all have."""
    reasons: dict[str, list[str]] = {}
    for record in records:
        if "error" in record:
            reasons.setdefault(record["error"], []).append(record["case"])
    return "\n".join(f"- {len(cases)} without a result: {why} ({_first(cases)})" for why, cases in reasons.items())


def _first(cases: Sequence[str], most: int = 3) -> str:
    """Some of them by name."""
    return ", ".join([*(f"`{case}`" for case in cases[:most]), *["..."] * (len(cases) > most)])


@functools.partial(jax.jit, static_argnums=(0, 1))
def _numbers(shape: tuple[int, ...], dtype: Any, seed: int) -> jax.Array:
    at = jax.lax.iota(jnp.uint32, math.prod(shape)) + jnp.uint32(seed) * jnp.uint32(0x9E3779B9)
    mixed = (at ^ (at >> 15)) * jnp.uint32(0x85EBCA6B)
    mixed = (mixed ^ (mixed >> 13)) * jnp.uint32(0xC2B2AE35)
    mixed = (mixed ^ (mixed >> 16)).reshape(shape)
    if jnp.issubdtype(dtype, jnp.integer):
        bits = jnp.iinfo(dtype).bits
        return jax.lax.bitcast_convert_type(mixed, jnp.int32).astype(jnp.int32) >> (32 - bits)
    return mixed.astype(jnp.float32) / 2.0**31 - 1


def numbers(shape: Sequence[int], dtype: Any, seed: int, scale: float = 1.0) -> jax.Array:
    """An array that no two places are alike in: floats between `-scale` and `scale`, or all integers that `dtype` has.

    A hash of every place's number makes them, in one pass: timing zeros would flatter a chip, and real noise takes long.
    """
    drawn = _numbers(tuple(shape), jnp.dtype(dtype), seed)
    return drawn.astype(dtype) if jnp.issubdtype(dtype, jnp.integer) else (drawn * scale).astype(dtype)


def seconds_of(
    program: Callable[..., Any], state: Any, sets: Sequence[Sequence[Any]], least: float, repeats: int = 5
) -> float:
    """The median of a call's time: `program(state, *rest)` returns the next state, and `sets` of the rest take turns.

    Args:
      program: compiled.
      state: what it may consume.
      sets: more than one where a single one would stay in the chip's own memory.
      least: seconds that a measurement lasts at least.
      repeats: measurements.
    """
    lap = lambda state, calls: functools.reduce(
        lambda state, i: program(state, *sets[i % len(sets)]), range(calls), state
    )
    state = jax.block_until_ready(lap(state, len(sets)))
    began = time.perf_counter()
    state = jax.block_until_ready(lap(state, 2))
    calls = max(2, math.ceil(least / max((time.perf_counter() - began) / 2, 1e-9)))
    taken = []
    for _ in range(repeats):
        began = time.perf_counter()
        state = jax.block_until_ready(lap(state, calls))
        taken.append((time.perf_counter() - began) / calls)
    return statistics.median(taken)


def held_by(program: Any) -> int:
    """Bytes of the device that a compiled program takes: its arguments, what it makes of them, and what it needs meanwhile."""
    memory = program.memory_analysis()
    made = memory.output_size_in_bytes - memory.alias_size_in_bytes
    return memory.argument_size_in_bytes + made + memory.temp_size_in_bytes


def compiled(program: Any, *given: Any) -> Any:
    """A jitted function's program for these arguments, or for their shapes."""
    return program.lower(*given).compile()
