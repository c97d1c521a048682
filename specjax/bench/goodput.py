"""`python -m specjax.bench.goodput`: the five times of the rule `goodput` on this machine, as a line to paste.

For every requested batch size, context and rung, each step drafts a chain of fixed length. A step's time is the median
of `--repeats` runs of `--steps` whole steps. A non-negative least-squares fit of the rule's formula to all steps gives
the five times. Each step is weighted by its own time, so that errors are relative.
"""

import dataclasses
import itertools
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from scipy.optimize import nnls

from specjax import decoder as decoding
from specjax import models
from specjax.assembly.companions import Ruled
from specjax.assembly.line import extended
from specjax.assembly.registry import DRAFTERS as REGISTRY
from specjax.assembly.registry import parse
from specjax.draft.adaptive import Rule
from specjax.jobs import jsonl
from specjax.models import DEFAULT_MODEL
from specjax.prompts import Prompts
from specjax.sampling import row_keys
from specjax.serve.options import ModelOptions, check_least, option, same
from specjax.speculative import speculative
from specjax.terminal import bad_input, flag, run_program, write

TIMES = ("draft_pass", "draft_row", "target_pass", "target_context", "target_token")


@dataclasses.dataclass(frozen=True)
class Forced(Rule):
    """A rule that drafts as many tokens as its state says, so that one program serves all lengths."""

    together = True

    def init(self, batch):
        return jnp.zeros((batch,), jnp.int32)

    def start(self, params, state, view, length, hidden):
        return lambda depth, confidence, carry: jnp.broadcast_to(depth < state[0], confidence.shape)


@dataclasses.dataclass(frozen=True)
class Step:
    """A measured step.

    Attributes:
      drafted: k, tokens drafted in each row.
      rows: B.
      context: C, tokens in all caches.
      ms: milliseconds.
    """

    drafted: int
    rows: int
    context: float
    ms: float

    @property
    def terms(self) -> tuple[float, ...]:
        """The factors of `TIMES`."""
        return self.drafted, self.drafted * self.rows, 1, self.context, self.rows * (self.drafted + 1)


def fit(steps: Sequence[Step]) -> tuple[dict[str, float], float]:
    """The times in milliseconds, and the largest relative error of a step."""
    terms = np.asarray([step.terms for step in steps], float)
    taken = np.asarray([step.ms for step in steps])
    found, _ = nnls(terms / taken[:, None], np.ones(len(steps)))
    error = np.abs(terms @ found / taken - 1).max()
    return dict(zip(TIMES, found.tolist(), strict=True)), float(error)


def measure(
    model: Any,
    drafter: Any,
    draft_params: Any,
    batches: Sequence[int],
    contexts: Sequence[int],
    count: int,
    repeats: int,
) -> list[Step]:
    """Times of steps for every batch size, context (tokens per row) and rung.

    Args:
      model: what `specjax.models.load` returned.
      drafter: an `Adaptive` bound to it, with the rule `Forced`.
      draft_params: its parameters.
      batches: batch sizes.
      contexts: tokens per row.
      count: steps per measurement.
      repeats: the number of measurements.

    Raises:
      ValueError: if the model is too small for the longest context.
    """
    decoder = speculative(model.lm, drafter)
    params = {"target": model.params, "draft": draft_params}
    capacity = -(-(max(contexts) + count * decoder.slack + decoder.slack) // 128) * 128
    if capacity > model.lm.config.max_position_embeddings:
        raise ValueError(
            f"{max(contexts)} tokens and {count} steps need {capacity} positions, and {model.name} has "
            f"{model.lm.config.max_position_embeddings}: ask for a shorter context or fewer steps"
        )
    rng = np.random.default_rng(0)
    steps = []
    for rows, context in itertools.product(batches, contexts):
        ids = rng.integers(0, model.lm.vocab_size, (rows, context), dtype=np.int32)
        keys = row_keys(0, map(str, range(rows)))
        prompts = Prompts.of(list(ids), capacity - decoder.slack - context, keys=keys)
        state = decoder.init(params, prompts, capacity=capacity, cache_dtype=model.dtype)
        for drafted in drafter.rule.lengths(drafter.length):
            ready = dataclasses.replace(state, draft=(state.draft[0], jnp.full((rows,), drafted, jnp.int32)))
            seconds, seen = [], 0.0
            for turn in range(repeats + 1):  # the first turn compiles
                mine = jax.block_until_ready(jax.tree.map(jnp.copy, ready))  # `run` consumes its state
                began = time.perf_counter()
                after = jax.block_until_ready(decoding.run(decoder, params, mine, count))
                if turn:
                    seconds.append((time.perf_counter() - began) / count)
                seen = (context * rows + float(after.length.sum())) / 2
            steps.append(Step(drafted, rows, seen, 1000 * statistics.median(seconds)))
    return steps


@dataclasses.dataclass(frozen=True, kw_only=True)
class GoodputOptions:
    """Options of `python -m specjax.bench.goodput`; see the help of each."""

    model: str | None = option(None, "the target (default: the shipped one)")
    adapter: tuple[str, ...] = same(ModelOptions, "adapter")
    drafter: str = option("draft", "a drafter with an expander (default: draft)", metavar="LINE")
    length: int = option(8, "the longest chain", least=1)
    batch: str = option("1,4,16", "batch sizes", metavar="B,...")
    context: str = option("64,512", "tokens per row", metavar="N,...")
    steps: int = option(8, "steps per measurement", least=1)
    repeats: int = option(5, "measurements, of which the median counts", least=1)
    json: bool = option(False, "print every step as a line of JSON")


def command(options: GoodputOptions) -> int:
    """Measures, fits and prints."""
    with bad_input():
        batches, contexts = (_integers(name, getattr(options, name)) for name in ("batch", "context"))
        check_least(options, flag)
        asked = extended(options.drafter, f"rule=goodput,length={options.length}")
        ruled = parse("drafter", REGISTRY, asked)
        model = models.load(options.model or DEFAULT_MODEL, adapter=options.adapter)
        drafter, draft_params = Ruled(ruled.drafter, Forced(), ruled.length).load(model)
        steps = measure(model, drafter, draft_params, batches, contexts, options.steps, options.repeats)
    found, error = fit(steps)
    if options.json:
        for step in steps:
            write(jsonl.dumps(dataclasses.asdict(step)) + "\n")
    times = ",".join(f"{name}={value:.4g}" for name, value in found.items())
    write(extended(asked, times) + "\n")
    print(f"{len(steps)} steps of {model.name}; the fit is off by at most {error:.0%}", file=sys.stderr)
    return 0


def _integers(name: str, words: str) -> list[int]:
    parts = [word.strip() for word in words.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise ValueError(f"--{name} must be a comma list of integers from 1 on, got {words!r}")
    return list(dict.fromkeys(map(int, parts)))


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    about = "The times of the rule goodput on this machine."
    return run_program("python -m specjax.bench.goodput", about, GoodputOptions, command, argv)


if __name__ == "__main__":
    sys.exit(main())
