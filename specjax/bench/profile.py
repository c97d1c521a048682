"""`specjax bench profile`: the parts of the time of a prefill and of a decoding step, from a trace of the current device.

The decoder's own loop runs under `jax.profiler` until the first row ends. The trace gives the time of every operation,
and the compiled text gives the part of a step from which it was traced. Tracing slows small operations most. So each
part's share of the traced time is applied to the time of a step without a trace.
"""

import contextlib
import dataclasses
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax import decoder as decoding
from specjax.bench.engines import engines_of, requests_of
from specjax.bench.options import BenchOptions
from specjax.bench.prefill import Prefill, prefill
from specjax.bench.prompts import prompts_of, read_input
from specjax.bench.run import progress
from specjax.bench.step_parts import PARTS, REST, by_part, parts_of
from specjax.bench.trace import events_of, with_names
from specjax.jobs import jsonl
from specjax.serve.request import needs_of
from specjax.terminal import bad_input, note, write
from specjax.viz import text
from specjax.viz.files import check_plot


@dataclasses.dataclass(frozen=True)
class Profile:
    """The parts of the time of one decoder's step.

    Attributes:
      decoder: its registry line.
      batch: the number of rows.
      steps: the number of steps of a measurement.
      step_seconds: of one step without a trace, the median of the rounds.
      parts: seconds by part, which add up to `step_seconds`.
      besides_forwards: the share of a step outside a model's forward passes; drafting counts as one if the drafter has
        parameters.
      prefill: how the prompts were read before.
    """

    decoder: str
    batch: int
    steps: int
    step_seconds: float
    parts: dict[str, float]
    besides_forwards: float
    prefill: Prefill


def command(options: BenchOptions) -> int:
    """Runs the suite; returns the exit status."""
    with bad_input():
        if options.plot:
            check_plot(options.plot)
        lines = read_input(options)
        engines, skipped = engines_of(options)
        model = next(iter(engines.values())).model
        texts, suffixes = prompts_of(lines, options, model)
        if model.masked is not None:
            raise ValueError("the suite profile is for autoregressive models: a diffusion step has no draft to verify")
        count = options.batch_size
        if len(texts) < count:
            raise ValueError(f"a batch of {count} needs as many prompts, and there are {len(texts)}: raise --prompts")
        requests = requests_of(options, engines, texts[:count], suffixes[:count], skipped)
    for reason in skipped:
        note(reason)
    found = []
    with contextlib.nullcontext() if options.json else progress(len(requests)) as advance:  # its lines replace a bar
        for name, own in requests.items():
            found.append(profile(name, engines[name], own, options.repeats))
            if advance is None:
                write(jsonl.dumps(dataclasses.asdict(found[-1])) + "\n")
            else:
                advance(name)
    if not options.json:
        write(shown(found))
    if options.plot:
        from specjax.viz import figures

        figures.step_times({one.decoder: one.parts for one in found}).savefig(options.plot, dpi=120)
    return 0


def shown(found: list[Profile]) -> str:
    """The profiles as bars, the share outside models' forward passes, and how fast prompts were read."""
    bars = text.step_times({f"{one.decoder}, batch {one.batch}": one.parts for one in found})
    read = text.step_times({f"prefill of {one.decoder}": one.prefill.parts for one in found})
    rest = [f"{one.decoder}: {one.besides_forwards:.1%} of a step is no forward pass of a model" for one in found]
    rest += [
        f"prefill of {one.decoder}: {one.prefill.tokens} tokens, {one.prefill.tokens_per_second:.0f} a second; "
        f"{one.prefill.padding:.1%} of what was computed is padding"
        for one in found
    ]
    return "\n".join([bars, read, *rest]) + "\n"


def profile(name: str, engine: Any, requests: list[Any], repeats: int) -> Profile:
    """Compiles, measures and traces the steps of these requests, one per row, until the first of them ends.

    Args:
      name: the decoder's name.
      engine: with an autoregressive decoder.
      requests: one for each row.
      repeats: the number of measurements without a trace.

    Raises:
      RuntimeError: if the profiler recorded no operation of the program.
    """
    decoder = engine.decoder.fitted(dataclasses.replace(needs_of(requests), brief=False))
    state = engine.start([dataclasses.replace(request, ignore_eos=True) for request in requests])
    numbers = np.int32(decoding.NO_LIMIT), np.int32(len(requests))
    lowered = decoding.run_program.lower(decoder, engine.params, state, *numbers)
    program = lowered.compile()
    named = with_names(lowered, program)

    def once(program: Any = program) -> tuple[float, int]:
        mine = jax.block_until_ready(jax.tree.map(jnp.copy, state))  # the program consumes its state
        began = time.perf_counter()
        after = jax.block_until_ready(program(engine.params, mine, *numbers))
        return time.perf_counter() - began, int(np.max(np.asarray(after.stats.steps)))

    once()
    laps = [once() for _ in range(repeats)]
    steps = laps[0][1]
    seconds = statistics.median(lap for lap, _ in laps) / steps
    traced = by_part(events_of(lambda: once(named), "jit_run_program"), parts_of(named.as_text() or ""))
    total = sum(traced.values())
    if not total:
        raise RuntimeError("the profiler recorded no operation of the program on this device")
    parts = {part: seconds * traced[part] / total for part in (*PARTS, REST)}
    modelled = bool(jax.tree.leaves(engine.params["draft"]))
    forwards = parts["target"] + (parts["draft"] if modelled else 0.0)
    read = prefill(engine, requests, repeats)
    return Profile(name, len(requests), steps, seconds, parts, 1 - forwards / seconds, read)
