"""A decoding step's seconds, memory, operations and compile time, by one of its sizes."""

import dataclasses
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.costs.step_cost import FreeChain
from specjax import decoder as decoding
from specjax import models
from specjax.models import LlamaLM, llama_config
from specjax.prompts import Prompts
from specjax.sharding import make_mesh
from specjax.speculative import speculative

STEPS, REPEATS = 8, 3
PROMPT = 4
"""Tokens that are prefilled; the rest of the context is said to be there, and its cache is empty."""


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The sizes of a step. One of them varies along an axis, the others stay.

    Attributes:
      rows: B, on each device.
      context: tokens of each row.
      nodes: N, verified nodes.
      vocabulary: V.
      layers: of the target.
      devices: among which the rows are shared.
    """

    rows: int = 1
    context: int = 512
    nodes: int = 1
    vocabulary: int = 1024
    layers: int = 2
    devices: int = 1


def measured(sizes: Sizes) -> dict[str, float]:
    """`seconds` of a step, `bytes` that its program needs besides its inputs, its `operations` as compiled, and the
    seconds to compile it.

    Seconds are the processor's, of all threads, so that another program on the machine changes little. The program is
    the one of jobs: steps in a loop, with the state donated. Its bytes are temporary ones and outputs, of one device.
    """
    decoder, params, state = made(sizes)
    jax.clear_caches()  # another axis may have had these sizes
    began = time.process_time()
    program = decoding.run_program.lower(decoder, params, state, np.int32(STEPS), np.int32(1)).compile()
    compiling = time.process_time() - began
    memory, cost = program.memory_analysis(), program.cost_analysis()
    seconds = []
    for _ in range(REPEATS):
        own = jax.block_until_ready(jax.tree.map(jnp.copy, state))  # the program consumes it
        began = time.process_time()
        after = jax.block_until_ready(program(params, own, np.int32(STEPS), np.int32(1)))
        seconds.append((time.process_time() - began) / STEPS)
        assert int(after.stats.steps.min()) == STEPS, "every row took part"
    return {
        "seconds": statistics.median(seconds),
        "bytes": memory.temp_size_in_bytes + memory.output_size_in_bytes,
        "operations": cost["flops"],
        "compile": compiling,
    }


def made(sizes: Sizes) -> tuple[Any, Any, Any]:
    """A decoder, its parameters, and a state whose rows are full of text but for the steps to come."""
    hidden, heads, rows = 64, 4, sizes.rows * sizes.devices
    config = llama_config(
        sizes.vocabulary, hidden, 2 * hidden, sizes.layers, heads, heads, hidden // heads, sizes.context
    )
    lm: Any = LlamaLM(config)
    target = lm.init(jax.random.key(0))
    mesh = None
    if sizes.devices > 1:
        mesh = make_mesh(f"data={sizes.devices}", jax.devices()[: sizes.devices])
        lm, target = models.spread(lm, target, mesh)
    decoder = speculative(lm, FreeChain(sizes.nodes, sizes.vocabulary) if sizes.nodes > 1 else None, mesh=mesh)
    params = {"target": target, "draft": None}
    ids = [[(row + i) % sizes.vocabulary for i in range(PROMPT)] for row in range(rows)]
    room = sizes.context - decoder.slack - PROMPT
    state = decoder.init(params, Prompts.of(ids, room), capacity=sizes.context, cache_dtype=jnp.dtype(jnp.float32))
    length = state.length + np.int32(room - STEPS)
    return decoder, params, dataclasses.replace(state, length=length)
