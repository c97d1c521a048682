"""`python -m experiments.costs.kernels`: every implementation of the kernels on this device, over its copy bandwidth.

Each operation is timed alone, jitted, at the shape of one decoding step. Its bytes are the least that it can move: attention
reads the used part of the cache, the cache write reads and writes the path, the argmax reads the scores. A share of 1 is what a
device could do whose arithmetic and launches were free.
"""

import dataclasses
import functools
import statistics
import sys
import time
import typing
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from specjax.jobs import jsonl
from specjax.kernels.kv_commit import kv_commit
from specjax.kernels.tree_attention import tree_attention
from specjax.kernels.verify import gumbel_argmax
from specjax.serve.options import check_least, option, take
from specjax.terminal import bad_input, flag, run_program

OPERATIONS = {"tree_attention": tree_attention, "kv_commit": kv_commit, "verify": gumbel_argmax}


@dataclasses.dataclass(frozen=True)
class Shape:
    """The sizes of one step: names are those of the options."""

    batch: int
    nodes: int
    depth: int
    heads: int
    kv_heads: int
    width: int
    slots: int
    filled: int
    vocab: int
    dtype: str

    def check(self) -> None:
        """Raises ValueError where the numbers do not fit together."""
        for name, value in dataclasses.asdict(self).items():
            if name != "dtype" and value < (0 if name in ("depth", "filled") else 1):
                raise ValueError(
                    f"--{name.replace('_', '-')} must be at least {0 if name in ('depth', 'filled') else 1}"
                )
        if self.heads % self.kv_heads:
            raise ValueError(f"--heads {self.heads} must be a multiple of --kv-heads {self.kv_heads}")
        if self.depth >= self.nodes:
            raise ValueError(f"--depth {self.depth} must be below --nodes {self.nodes}")
        if self.filled + self.nodes > self.slots:
            raise ValueError(f"--filled {self.filled} and {self.nodes} nodes need --slots of at least their sum")


@dataclasses.dataclass(frozen=True)
class Row:
    """One measurement.

    Attributes:
      operation: which.
      implementation: which; None is the one that the library picks by itself.
      ms: the median, or None where it does not run here.
      share: bytes over time over the copy's bandwidth.
      why: why it does not run.
    """

    operation: str
    implementation: str | None
    ms: float | None
    share: float | None
    why: str | None = None


def implementations(operation: Callable[..., Any]) -> list[str | None]:
    """The names that an operation's `implementation` may have, None first; not those of interpreters."""
    hint = typing.get_type_hints(operation)["implementation"]

    def names(hint: Any) -> Iterator[str]:
        for part in typing.get_args(hint):
            if isinstance(part, str):
                yield part
            else:
                yield from names(part)

    return [None, *(name for name in names(hint) if not name.endswith("interpreted"))]


def seconds(function: Callable[..., Any], state: Any, rest: Sequence[Any], repeats: int, calls: int) -> float:
    """The median over `repeats` of a call's time, each over `calls` calls; `function(state, *rest)` returns the next state."""
    state = jax.block_until_ready(function(state, *rest))  # compiles
    taken = []
    for _ in range(repeats):
        began = time.perf_counter()
        for _ in range(calls):
            state = function(state, *rest)
        jax.block_until_ready(state)
        taken.append((time.perf_counter() - began) / calls)
    return statistics.median(taken)


def copy_bandwidth(count: int, dtype: str, repeats: int, calls: int) -> float:
    """Bytes a second, read and written, of adding one in place to an array of so many numbers, or more that no cache holds."""
    array = jnp.zeros((max(count, 2**25) // 128, 128), dtype)
    bump = jax.jit(lambda x: x + jnp.ones((), x.dtype), donate_argnums=0)
    return 2 * array.nbytes / seconds(bump, array, (), repeats, calls)


@dataclasses.dataclass(frozen=True)
class Case:
    """What is timed: `function(state, *rest, implementation=)` returns the next state, and moves `bytes` at least.

    `state` is made anew for every measurement, since the function may consume it.
    """

    function: Callable[..., Any]
    state: Callable[[], Any]
    rest: tuple[Any, ...]
    bytes: float


def cases(shape: Shape) -> dict[str, Case]:
    """A case for every operation."""
    batch, nodes, dtype = shape.batch, shape.nodes, jnp.dtype(shape.dtype)
    draw = lambda seed, *size: jax.random.normal(jax.random.key(seed), size, jnp.float32).astype(dtype)
    cache = lambda seed: draw(seed, batch, shape.kv_heads, shape.slots, shape.width)
    block = lambda seed: draw(seed, batch, nodes, shape.kv_heads, shape.width)
    everyone = lambda row: jnp.broadcast_to(row[None], (batch, *row.shape))
    length = jnp.full((batch,), shape.filled, jnp.int32)
    slot = batch * shape.kv_heads * shape.width * dtype.itemsize
    path = jnp.arange(shape.depth + 1, dtype=jnp.int32)
    words = jax.random.bits(jax.random.key(5), (batch, shape.depth + 1, 2), jnp.uint32)
    scores = (batch, nodes, shape.vocab)

    def attention(query, key, value, cache_key, cache_value, length, visible, implementation):
        return tree_attention(
            query, key, value, cache_key, cache_value, length, visible=visible, scale=shape.width**-0.5,
            implementation=implementation,
        )  # fmt: skip

    def verify(drawn, scores, words, which, noisy, implementation):
        keys = jax.random.wrap_key_data(words, impl="threefry2x32")
        return gumbel_argmax(scores, keys, which, noisy, implementation=implementation)[0]

    return {
        "tree_attention": Case(
            attention,
            lambda: draw(0, batch, nodes, shape.heads, shape.width),
            (block(1), block(2), cache(3), cache(4), length, everyone(jnp.tril(jnp.ones((nodes, nodes), bool)))),
            2.0 * slot * (shape.filled + nodes),
        ),
        "kv_commit": Case(
            kv_commit,
            lambda: (cache(3), cache(4)),
            ((block(1), block(2)), everyone(path), length),
            4.0 * slot * (shape.depth + 1),
        ),
        "verify": Case(
            verify,
            lambda: jnp.zeros((batch, nodes), jnp.int32),
            (
                jax.random.normal(jax.random.key(6), scores, jnp.float32),
                words,
                everyone(jnp.minimum(jnp.arange(nodes, dtype=jnp.int32), shape.depth)),
                jnp.ones(batch, bool),
            ),
            4.0 * batch * nodes * shape.vocab,
        ),
    }


def measure(shape: Shape, operations: Sequence[str], repeats: int, calls: int) -> tuple[float, list[Row]]:
    """The copy's bandwidth in bytes per second, and a row for every implementation of the operations."""
    count = 2 * shape.batch * shape.kv_heads * shape.slots * shape.width
    bandwidth = copy_bandwidth(count, shape.dtype, repeats, calls)
    rows = []
    for name, case in cases(shape).items():
        for kind in implementations(OPERATIONS[name]) if name in operations else ():
            function = jax.jit(functools.partial(case.function, implementation=kind), donate_argnums=0)
            try:
                taken = seconds(function, case.state(), case.rest, repeats, calls)
            except (ValueError, RuntimeError) as error:  # JAX's own among them
                said = str(error).strip() or type(error).__name__
                rows.append(Row(name, kind, None, None, said.splitlines()[0]))
                continue
            rows.append(Row(name, kind, round(taken * 1e3, 4), float(f"{case.bytes / taken / bandwidth:.4g}")))
    return bandwidth, rows


@dataclasses.dataclass(frozen=True, kw_only=True)
class KernelOptions:
    """See the help of each."""

    operations: str = option(",".join(OPERATIONS), f"a comma list of {', '.join(OPERATIONS)}")
    batch: int = option(2, "rows")
    nodes: int = option(16, "tree nodes")
    depth: int = option(4, "the deepest node; one more is written to the cache")
    heads: int = option(8, "attention heads")
    kv_heads: int = option(2, "heads of keys and values")
    width: int = option(64, "of a head")
    slots: int = option(2048, "cache slots a row")
    filled: int = option(1024, "cache slots that hold text")
    vocab: int = option(32000, "vocabulary")
    dtype: str = option("float32", "of the cache and the queries", choices=("float32", "bfloat16"))
    repeats: int = option(7, "measurements; the median counts", least=1)
    calls: int = option(5, "calls a measurement", least=1)
    json: bool = option(False, "print one line of JSON")


def command(options: KernelOptions) -> int:
    """Measures and prints."""
    with bad_input():
        operations = [word.strip() for word in options.operations.split(",")]
        unknown = [name for name in operations if name not in OPERATIONS]
        if unknown:
            raise ValueError(f"--operations: unknown {unknown[0]!r}; there are {', '.join(OPERATIONS)}")
        shape = take(Shape, vars(options))
        shape.check()
        check_least(options, flag)
    bandwidth, rows = measure(shape, operations, options.repeats, options.calls)
    device = jax.devices()[0].device_kind
    if options.json:
        content = {
            "device": device, "shape": dataclasses.asdict(shape), "copy_bytes_per_second": round(bandwidth),
            "rows": [dataclasses.asdict(row) for row in rows],
        }  # fmt: skip
        sys.stdout.write(jsonl.dumps(content) + "\n")
        return 0
    sys.stdout.write(f"{device}: copies {bandwidth / 1e9:.1f} GB/s, read and written\n")
    for row in rows:
        name = f"{row.operation:<15} {row.implementation or 'default':<8}"
        if row.ms is None or row.share is None:
            sys.stdout.write(f"{name}          -  {row.why}\n")
        else:
            sys.stdout.write(f"{name} {row.ms:10.3f} ms  {row.share:8.4f} of the copy's bandwidth\n")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    about = "The kernels against the copy's bandwidth."
    return run_program("python -m experiments.costs.kernels", about, KernelOptions, command, argv)


if __name__ == "__main__":
    sys.exit(main())
