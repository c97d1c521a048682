"""`python -m experiments.costs.few_rows`: products of a few rows with large matrices on this CPU, beside XLA's.

The matrices are the MLPs of some layers and a tied output head, in float32. Together they should be larger than all caches, as
a model's weights are. Each number of rows is one program, whose input has that many rows; the two ways take turns.
"""

import dataclasses
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

from experiments.costs.printed import printed
from specjax.kernels.few_rows import few_rows, takes
from specjax.serve.options import check_least, option
from specjax.terminal import bad_input, flag, run_program

Product = Callable[[Any, Any, bool], Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class FewRowsOptions:
    """See the help of each."""

    hidden: int = option(576, "width of the rows", least=1)
    intermediate: int = option(1536, "inner width of the MLPs", least=1)
    layers: int = option(12, "MLPs", least=1)
    vocab: int = option(49152, "outputs of the head", least=1)
    rows: str = option("1,2,3,5,8,12", "numbers of rows, with commas")
    repeats: int = option(9, "rounds; the median counts", least=1)
    json: bool = option(False, "print one line of JSON")


def plain(x: jax.Array, matrix: jax.Array, by_outputs: bool) -> jax.Array:
    return jax.lax.dot_general(x, matrix, (((1,), (int(by_outputs),)), ((), ())))


def forward(product: Product) -> Callable[[jax.Array, Any], jax.Array]:
    """A jitted function from rows and matrices to the head's scores."""

    def scores(x, matrices):
        layers, table = matrices
        for wide, narrow in layers:
            x = x + product(jax.nn.silu(product(x, wide, False)), narrow, False)
        return product(x, table, True)

    return jax.jit(scores)


def measure(options: FewRowsOptions) -> dict[str, dict[str, float]]:
    """By the number of rows: milliseconds of both ways, and how many times as fast the kernel is."""
    drawn = lambda seed, *shape: 0.02 * jax.random.normal(jax.random.key(seed), shape)
    sizes = options.hidden, options.intermediate
    layers = [(drawn(2 * i, *sizes), drawn(2 * i + 1, *sizes[::-1])) for i in range(options.layers)]
    matrices = layers, drawn(99, options.vocab, options.hidden)
    found = {}
    for rows in map(int, options.rows.split(",")):
        x = drawn(100, rows, options.hidden)
        if not takes(x, matrices[1]):
            raise ValueError(f"the kernel does not take {rows} rows here: it needs Numba, and at most 12 rows")
        runs, seconds = {"xla": forward(plain), "kernel": forward(few_rows)}, {"xla": [], "kernel": []}
        for turn in range(options.repeats + 1):
            for name, run in runs.items():
                began = time.perf_counter()
                jax.block_until_ready(run(x, matrices))
                seconds[name] += [time.perf_counter() - began] if turn else []  # the first one compiles
        xla, kernel = (1000 * statistics.median(seconds[name]) for name in ("xla", "kernel"))
        found[f"{rows} rows"] = {
            "xla_ms": round(xla, 2),
            "kernel_ms": round(kernel, 2),
            "ratio": round(xla / kernel, 2),
        }
    return found


def command(options: FewRowsOptions) -> int:
    """Measures and prints."""
    with bad_input():
        check_least(options, flag)
        found = measure(options)
    said = lambda own: (
        f"{own['xla_ms']:8.2f} ms by XLA {own['kernel_ms']:8.2f} ms by the kernel   {own['ratio']:.2f} times as fast"
    )
    return printed(found, options.json, said)


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    name = "python -m experiments.costs.few_rows"
    return run_program(name, "Products of a few rows on a CPU, beside XLA's.", FewRowsOptions, command, argv)


if __name__ == "__main__":
    sys.exit(main())
