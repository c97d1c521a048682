"""How fast SmolLM2 reads prompts and weights: `python -m experiments.smollm2.times` writes times.json and its tables.

Prompts of a few lengths are read by this library, by transformers and, one row, by llama.cpp, in turn in one process. The clock
runs from token ids to the first new token, since transformers and llama.cpp make that one with the prompt. The last table has
the seconds of a plain step, and what this machine takes to read as many bytes as the step reads of weights.
"""

import argparse
import functools
import gzip
import json
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from experiments.smollm2.page import filled, keep, report, show, table
from experiments.smollm2.train import TEXTS
from specjax.bench.engines import engines_of
from specjax.bench.options import BenchOptions
from specjax.bench.peers import PEERS
from specjax.bench.spec_run import ours
from specjax.bench.weights_read import weights_read

LENGTHS = {1: (40, 100, 250, 500, 1000, 2000), 8: (40, 250, 1000)}
"""Tokens of a prompt, by the number of rows."""
ROUNDS = {1: 5, 8: 2}
STEPS = 64
"""Plain steps of a measurement."""


def texts(tokenizer: Any, rows: int, length: int) -> list[list[int]]:
    """As many rows of token ids, from SmolLM2's own text."""
    lines = iter(gzip.decompress(TEXTS.read_bytes()).decode().splitlines())
    found: list[list[int]] = [[] for _ in range(rows)]
    for row in found:
        while len(row) < length:
            line = json.loads(next(lines))
            row += tokenizer("\n".join(said["content"] for said in line["prompt"]))["input_ids"]
    return [row[:length] for row in found]


def clocked(run: Callable[[], Any]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def first_tokens(rows: int, lengths: tuple[int, ...]) -> Iterator[dict[str, Any]]:
    """For every length the median seconds of each contestant, and how often their first tokens are ours."""
    peers = ("transformers", "llama.cpp") if rows == 1 else ("transformers",)
    options = BenchOptions(model="smollm2", dtype="float32", batch_size=rows, peer=peers, drafter=("none",))
    engine = next(iter(engines_of(options)[0].values()))
    for length in lengths:
        requests = [
            engine.request(ids, max_new_tokens=1, ignore_eos=True)
            for ids in texts(engine.model.tokenizer, rows, length)
        ]
        capacity = -(-(length + 1 + engine.decoder.slack) // 128) * 128
        runs: dict[str, Callable[[list[Any]], Any]] = {"specjax": ours(engine, options, capacity)}
        for name in peers:
            modes = PEERS[name](options, {"none": engine}, length + 1)
            runs[name] = modes["greedy"].complete
        written = {name: run(requests) for name, run in runs.items()}  # compiles, and warms up
        own = [record.tokens for record in written.pop("specjax")]
        seconds = {name: [] for name in runs}
        for _ in range(ROUNDS[rows]):
            for name, run in runs.items():
                seconds[name].append(clocked(functools.partial(run, requests)))
        yield {
            "rows": rows,
            "tokens": length,
            "seconds": {name: round(statistics.median(own), 5) for name, own in seconds.items()},
            "same": {name: sum(a == b for a, b in zip(own, other, strict=True)) for name, other in written.items()},
        }


def reading() -> dict[str, float]:
    """The seconds of a plain step at one row, the bytes of weights that it reads, and the most bytes a second that
    either a sum of as many bytes or a product with them reads here."""
    options = BenchOptions(model="smollm2", dtype="float32", drafter=("none",))
    engine = next(iter(engines_of(options)[0].values()))
    (ids,) = texts(engine.model.tokenizer, 1, 40)
    request = engine.request(ids, max_new_tokens=STEPS, ignore_eos=True)
    read = weights_read(engine.decoder, engine.params)
    width = 4096
    matrix = jnp.ones((int(read) // 4 // width, width), jnp.float32)
    kinds = {
        "sum": jax.jit(lambda matrix: matrix.sum()),
        "product": jax.jit(lambda matrix: matrix @ jnp.ones((width,), jnp.float32)),
    }
    steps, rates = [], {name: [] for name in kinds}
    for _ in range(ROUNDS[1] + 1):
        before = engine.timing.decode_seconds
        list(engine.run([request], batch_size=1))
        steps.append((engine.timing.decode_seconds - before) / STEPS)
        for name, kind in kinds.items():
            rates[name].append(clocked(lambda kind=kind: kind(matrix).block_until_ready()))
    step, fastest = statistics.median(steps[1:]), min(statistics.median(own[1:]) for own in rates.values())
    return {"step_seconds": round(step, 5), "bytes": int(read), "reading_seconds": round(fastest, 5)}


def first_token_table() -> Iterator[tuple[str, ...]]:
    """Milliseconds to the first token, and prompt tokens a second over those of each other library."""
    yield "rows", "prompt tokens of each", "specjax, ms", "transformers, ms", "over transformers", "over llama.cpp"
    for row in report("times")["first_tokens"]:
        own = row["seconds"]["specjax"]
        over = [
            f"{row['seconds'][name] / own:.2f}" if name in row["seconds"] else ""
            for name in ("transformers", "llama.cpp")
        ]
        shown = [f"{1e3 * row['seconds'][name]:.0f}" for name in ("specjax", "transformers")]
        yield str(row["rows"]), str(row["tokens"]), *shown, *over


def tables() -> Iterator[str]:
    yield ""
    yield from table(first_token_table())
    found = report("times")["reading"]
    share = found["reading_seconds"] / found["step_seconds"]
    step, reading = 1e3 * found["step_seconds"], 1e3 * found["reading_seconds"]
    yield (
        f"\nA plain step takes {step:.1f} ms and reads {found['bytes'] / 1e9:.3f} GB of weights. Reading as many bytes takes "
        f"{reading:.1f} ms here, so a step runs at {share:.2f} of the memory's speed."
    )


def written(page: str) -> str:
    return filled(page, "times", [*tables(), ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--show", action="store_true", help="measure nothing")
    if not parser.parse_args().show:
        rows = []
        for count, lengths in LENGTHS.items():
            for row in first_tokens(count, lengths):
                rows.append(row)
                print(json.dumps(row), flush=True)
        keep("times", {"first_tokens": rows, "reading": reading()})
    show(written)
    print("\n".join(tables()))


if __name__ == "__main__":
    main()
