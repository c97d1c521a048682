"""What reading only the union of a step's experts saves: `python -m experiments.union` writes results.json and prints tables.

The first has times and bytes of one feed-forward of BlockFFN (`specjax.kernels.union_mlp`) beside those of all its experts.
The second has unions that a model's tokens make, as a chain and as siblings; `--model FOLDER` takes another model than a
random one.
"""

import argparse
import functools
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import specjax
from specjax import models
from specjax.kernels.union_mlp import union_mlp, union_size
from specjax.lm import Block, Wants
from specjax.models.block_ffn import BlockFFNConfig, blocks_of, router_logits
from specjax.models.layer import LayerConfig

SIZES = ((64, 8, 16), (1536, 48, 128))
"""Width, experts and an expert's width: a test's, and those of BlockFFN with 0.8B parameters."""
ROWS = (1, 8, 32)
"""Nodes of a step."""
SHARES = (0.125, 0.25, 0.5, 0.75)
"""The union's share of all experts; more than half is more than the usual capacity."""
REPEATS = 10
RESULTS = Path(__file__).with_name("results.json")


def given(width: int, experts: int, size: int, rows: int, used: int) -> tuple[jax.Array, ...]:
    """Random rows, weights of `used` experts in all, and matrices, in float32."""
    rng = np.random.default_rng(0)
    weights = rng.random((rows, experts)) * (rng.permutation(experts) < used)
    made = rng.normal(size=(rows, width)), weights, rng.normal(size=(width, experts * size)) / width**0.5
    return tuple(jnp.asarray(x, jnp.float32) for x in (*made, rng.normal(size=(experts * size, width)) / size**0.5))


def costs(sizes=SIZES, repeats: int = REPEATS) -> Iterator[dict[str, Any]]:
    """A row for every size, number of rows and union: each path's least time, in turns, and the bytes of matrices it reads."""
    for width, experts, size in sizes:
        for rows in ROWS:
            ways = {way: jax.jit(functools.partial(union_mlp, implementation=way)) for way in ("dense", None)}
            for share in SHARES:
                used = round(share * experts)
                operands = given(width, experts, size, rows, used)
                times: dict[Any, list[float]] = {way: [] for way in ways}
                found = {way: jax.block_until_ready(dot(*operands)) for way, dot in ways.items()}
                np.testing.assert_allclose(found[None], found["dense"], rtol=1e-3, atol=1e-3)
                for _ in range(repeats):
                    for way, dot in ways.items():
                        begin = time.perf_counter()
                        jax.block_until_ready(dot(*operands))
                        times[way].append(time.perf_counter() - begin)
                read = used if used <= experts // 2 else experts
                yield {
                    "width": width, "experts": experts, "size": size, "rows": rows, "union": used,
                    "dense_us": round(1e6 * min(times["dense"])), "union_us": round(1e6 * min(times[None])),
                    "dense_bytes": 8 * width * experts * size, "union_bytes": 8 * width * read * size,
                }  # fmt: skip


def random_model() -> Any:
    """`tiny` with a random BlockFFN of 48 experts in every layer: whose tokens use half of them by chance."""
    target = specjax.load("tiny")
    config = target.lm.config.every(LayerConfig, feed=BlockFFNConfig(48, 8))
    lm = models.LlamaLM(config)
    return specjax.models.Model(lm, lm.init(jax.random.key(0)), tokenizer=target.tokenizer, eos_ids=target.eos_ids)


def routed(lm: Any, params: Any, block: Block) -> tuple[jax.Array, jax.Array]:
    """The logits `[T, V]` of one row, and whether each layer's token has a weight for each expert, `[L, T, X]`."""
    with router_logits() as found:
        logits = lm(params, block, None, wants=Wants(logits=True)).logits
    return logits[0], jnp.stack([x[0] > 0 for x in found])


def unions(model: Any, ids: list[int]) -> Iterator[dict[str, Any]]:
    """A row for every number of nodes: the mean number of a layer's experts in the union of a chain, and of siblings.

    Chains are all runs of the text. Siblings are the likeliest tokens after it, which do not see each other."""
    blocks_of(model.lm.config)
    run, length = jax.jit(functools.partial(routed, model.lm)), len(ids)
    slots = jnp.arange(length, dtype=jnp.int32)[None]
    logits, used = run(model.params, Block(jnp.asarray([ids]), slots, jnp.zeros((1,), jnp.int32)))
    most = max(ROWS)
    best = jax.lax.top_k(logits[-1], most)[1]
    places = jnp.concatenate([slots, jnp.full((1, most), length, jnp.int32)], axis=1)
    at = jnp.arange(length + most)
    seen = (at[None] <= at[:, None]) & ((at[None] < length) | (at[None] == at[:, None]))
    after = Block(jnp.concatenate([jnp.asarray(ids), best])[None], places, jnp.zeros((1,), jnp.int32), seen[None])
    siblings = run(model.params, after)[1][:, length:]
    size = jax.vmap(union_size)
    for rows in ROWS:
        chains = [size(used[:, start : start + rows]).mean() for start in range(0, length - rows + 1, rows)]
        yield {
            "experts": used.shape[2], "rows": rows, "chain": round(float(np.mean(chains)), 1),
            "siblings": round(float(size(siblings[:, :rows]).mean()), 1),
        }  # fmt: skip


def table(rows: list[dict[str, Any]]) -> list[str]:
    """The lines of a table of all rows, with a ratio of the times where there are times."""
    heads = [name for name in rows[0] if not name.startswith("dense_") and not name.startswith("union_")]
    timed = "dense_us" in rows[0]
    names = [*heads, *(("dense, us", "union, us", "times faster", "dense, MB", "union, MB") if timed else ())]
    lines = ["| " + " | ".join(names) + " |", "|---" * len(names) + "|"]
    for row in rows:
        cells = [f"{row[name]}" for name in heads]
        if timed:
            cells += [f"{row['dense_us']:,}", f"{row['union_us']:,}", f"{row['dense_us'] / row['union_us']:.2f}"]
            cells += [f"{row[name] / 1e6:.2f}" for name in ("dense_bytes", "union_bytes")]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def main() -> None:
    """Measures and prints, or prints what was measured."""
    parser = argparse.ArgumentParser(prog="python -m experiments.union", description=__doc__)
    parser.add_argument("--model", help="the folder of a BlockFFN whose unions are counted; nothing is written")
    parser.add_argument("--text", help="the text whose tokens they are")
    parser.add_argument("--table", action="store_true", help="print the tables of results.json")
    options = parser.parse_args()
    text = (
        options.text
        or "A counter shows 24. Subtract 17. Add 9. What does the counter show? Work it out, then say it. " * 4
    )
    if options.table:
        found = json.loads(RESULTS.read_text())
    else:
        model = random_model() if options.model is None else specjax.load(options.model)
        found = {"unions": list(unions(model, list(model.tokenizer.encode(text))))}
        if options.model is None:
            found = {"costs": list(costs())} | found
            RESULTS.write_text(json.dumps(found, indent=1) + "\n")
    for rows in found.values():
        print("\n".join(table(rows)), end="\n\n")


if __name__ == "__main__":
    main()
