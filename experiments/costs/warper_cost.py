"""`python -m experiments.costs.warper_cost`: what a warper costs over a whole vocabulary, beside one sort of it.

Scores are drawn at random with so small a spread that the cuts of `top_p` and `top_k` lie beyond the tokens that are ranked.
Each warper is timed alone, jitted, after the temperature.
"""

import dataclasses
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from experiments.costs.printed import printed
from specjax.sampling import SamplingArrays, warp
from specjax.serve.options import check_least, option
from specjax.terminal import bad_input, flag, run_program

WARPERS: dict[str, dict[str, Any]] = {
    "temperature alone": {}, "top_p=0.95": {"top_p": 0.95}, "top_k=1000": {"top_k": 1000}, "typical_p=0.9": {"typical_p": 0.9},
}  # fmt: skip
SORT = "one sort"


@dataclasses.dataclass(frozen=True, kw_only=True)
class WarperOptions:
    """See the help of each."""

    vocab: int = option(49152, "vocabulary", least=2)
    rows: int = option(1, "rows", least=1)
    nodes: int = option(1, "positions of a row, such as a tree's nodes", least=1)
    spread: float = option(1.0, "standard deviation of the scores")
    repeats: int = option(9, "rounds; the median counts", least=1)
    json: bool = option(False, "print one line of JSON")


def warped(options: WarperOptions, sampling: dict[str, Any]) -> Callable[[jax.Array], jax.Array]:
    """A jitted function from scores `[B, T, V]` to what a warper leaves of them."""
    live, arrays = jnp.ones(options.rows, bool), SamplingArrays.make(options.rows, temperature=1.0, **sampling)
    return jax.jit(lambda scores: warp(scores, arrays, live))


def measure(options: WarperOptions) -> dict[str, dict[str, float]]:
    """By warper: milliseconds for all positions, and the ratio to a sort of the same scores."""
    scores = options.spread * jax.random.normal(jax.random.key(0), (options.rows, options.nodes, options.vocab))
    runs = {SORT: jax.jit(jnp.sort)} | {name: warped(options, own) for name, own in WARPERS.items()}
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(options.repeats + 1):
        for name, run in runs.items():
            began = time.perf_counter()
            jax.block_until_ready(run(scores))
            seconds[name] += [time.perf_counter() - began] if turn else []  # the first one compiles
    times = {name: 1000 * statistics.median(own) for name, own in seconds.items()}
    return {name: {"ms": round(ms, 3), "ratio": round(ms / times[SORT], 3)} for name, ms in times.items()}


def command(options: WarperOptions) -> int:
    """Measures and prints."""
    with bad_input():
        check_least(options, flag)
    return printed(measure(options), options.json, lambda own: f"{own['ms']:9.3f} ms   {own['ratio']:6.3f} of a sort")


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    name = "python -m experiments.costs.warper_cost"
    return run_program(name, "A warper's cost beside a sort of the vocabulary.", WarperOptions, command, argv)


if __name__ == "__main__":
    sys.exit(main())
