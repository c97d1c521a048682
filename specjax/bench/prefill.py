"""The time in which prompts are read, by the kind of work: products, attention, copies, and everything else."""

import dataclasses
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax import decoder as decoding
from specjax.bench.step_parts import REST, by_part, parts_of
from specjax.bench.trace import events_of, with_names
from specjax.plan.hlo import Op
from specjax.sampling_params import form_of
from specjax.serve.slots import Slots

KINDS = ("products", "attention", "copies")
_COPIES = {"copy", "dynamic-update-slice", "dynamic-slice", "scatter", "gather", "concatenate", "pad"}
_MOVES = {
    "scatter",
    "dynamic_update_slice",
    "dynamic_slice",
    "gather",
    "concatenate",
    "broadcast_in_dim",
    "pad",
    "copy",
}


@dataclasses.dataclass(frozen=True)
class Prefill:
    """How the prompts of a batch are read.

    Attributes:
      tokens: of all prompts. Their last ones are read by the first step.
      columns: those that are computed, with the padding of chunks.
      seconds: of all prompts, the median of the rounds, with the work of the host.
      parts: seconds by kind of work, which add up to `seconds`.
    """

    tokens: int
    columns: int
    seconds: float
    parts: dict[str, float]

    @property
    def padding(self) -> float:
        """The share of computed columns that hold no token of a prompt."""
        return 1 - self.tokens / self.columns

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds


def kind_of(op: Op) -> str | None:
    """The kind of an operation's work; None if it names no source."""
    words = op.source.split("/") if op.source else []
    if "tree_attention" in words:
        return "attention"
    if op.opcode in ("dot", "convolution") or (words and words[-1] in ("dot_general", "conv_general_dilated")):
        return "products"
    if op.opcode in _COPIES or (words and words[-1] in _MOVES):
        return "copies"
    return REST if words else None


def prefill(engine: Any, requests: list[Any], repeats: int) -> Prefill:
    """Compiles, measures and traces the programs with which requests enter a batch.

    Args:
      engine: with an autoregressive decoder.
      requests: one for each row.
      repeats: the number of measurements without a trace.

    Raises:
      RuntimeError: if the profiler recorded no operation of the programs.
    """
    slots = Slots(engine.served(), len(requests), engine.capacity(requests), form_of(requests))
    rows, keys, empty = range(len(requests)), engine.keys(requests), slots.empty()
    fresh = lambda: jax.block_until_ready(jax.tree.map(jnp.copy, empty))  # a program consumes its state

    def once() -> float:
        state = fresh()
        began = time.perf_counter()
        jax.block_until_ready(slots.insert(state, rows, requests, keys))
        return time.perf_counter() - began

    once()
    seconds = statistics.median(once() for _ in range(repeats))
    totals, columns = dict.fromkeys((*KINDS, REST), 0.0), 0
    for chosen, prompts in slots.calls(rows, requests, keys):
        given = slots.served.decoder, slots.served.params, empty, *jax.device_put((chosen, prompts)), None
        lowered = decoding.insert_program.lower(*given)
        named = with_names(lowered, lowered.compile())
        run = lambda named=named, given=given: jax.block_until_ready(named(given[1], fresh(), *given[3:]))
        run()
        kinds = parts_of(named.as_text() or "", kind_of)
        traced = by_part(events_of(run, "jit_insert_program"), kinds, KINDS)
        totals = {kind: totals[kind] + time for kind, time in traced.items()}
        width: Any = prompts.width
        chunks = max(1, -(-(int(np.max(prompts.lengths)) - 1) // width))
        columns += chunks * width * len(chosen)
    if not sum(totals.values()):
        raise RuntimeError("the profiler recorded no operation of the program on this device")
    scale = seconds / sum(totals.values())
    tokens = sum(len(slots.served.given(request)) - 1 for request in requests)
    return Prefill(tokens, columns, seconds, {kind: scale * time for kind, time in totals.items()})
