"""EvoPress against SWIFT's search, both with the same number of forward tokens: `python -m experiments.evopress.run`."""

import itertools
import json
import random
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax import models
from specjax.draft import skip_search
from specjax.lm import Block
from specjax.tasks import Mixture, generate
from specjax.train.data import Rows, read_rows
from specjax.train.evopress.fitness import Divergence, divergence, logits
from specjax.train.evopress.population import Candidate, Drops, Evolution, Stage

FOLDER = Path(__file__).resolve().parent
COUNT, SEEDS, WINDOW, LENGTH = 2, 1, 32, 128
"""Sublayers of each type that are left out, runs of each search, tokens of a SWIFT trial, and tokens per row."""
GENERATIONS, OFFSPRING, STAGES, INITIAL = 8, 4, (Stage(2, 256), Stage(1, 1024)), (8, 256)


def rows_of(target: Any, questions: Any) -> Rows:
    """Questions with their right answers, as rows of text."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "text.jsonl"
        turns = lambda one: [{"role": "user", "content": one.prompt}]
        lines = ({"prompt": turns(one), "completion": one.answers[0]} for one in questions)
        file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        return read_rows([file], target, LENGTH)


def evopress(target: Any, rows: Rows, seed: int) -> tuple[Any, int]:
    """The sublayers `[L, 2]` that EvoPress leaves out, and how many tokens its candidates read."""
    layers = target.lm.num_layers
    compress = lambda candidate: (target.params, jnp.asarray(candidate, bool).T)
    fitness = Divergence(target.lm, target.params, compress, rows)
    inner = (False, *(True,) * (layers - 2), False)  # as SWIFT has it
    evolution = Evolution(Drops(COUNT, (inner, inner)), fitness.lengths, fitness, OFFSPRING, STAGES, INITIAL)
    last = next(itertools.islice(evolution.run(random.Random(seed)), GENERATIONS, None))
    best: Candidate = last.population[0]
    return compress(best)[1], last.read


def swift(target: Any, rows: Rows, seed: int, tokens: int) -> tuple[Any, int]:
    """The same by SWIFT's search: random sets and a Gaussian process, each trial a window of another row.

    A window's tokens see the whole model's keys and values before it, as they do in decoding.
    """
    lm, size = target.lm, 2 * COUNT
    rng = np.random.default_rng(seed)
    few = rng.choice(len(rows), 24, replace=False)
    text = jnp.asarray(np.asarray(rows.tokens)[few])
    mask = np.asarray(rows.mask)[few]

    @jax.jit
    def caches(params, text):
        positions = jnp.broadcast_to(jnp.arange(LENGTH)[None], text.shape)
        block, cache = Block(text, positions, jnp.zeros(len(text), jnp.int32)), lm.init_cache(len(text), LENGTH)
        _, delta = lm.layers(params, lm.embed(params, text), 0, lm.num_layers, block, None)
        return lm.commit(cache, delta, None, jnp.zeros(len(text), jnp.int32))

    @jax.jit
    def trial(params, search, caches, text, row, begin, due):
        own = jax.tree.map(lambda x: x[row][None], caches)
        positions = begin + jnp.arange(WINDOW)[None]
        block = Block(text[row][positions], positions, begin[None])

        def matchness(chosen):
            h = lm.embed(params, block.tokens)
            h, _ = lm.layers(params, h, 0, lm.num_layers, block, own, None, skip_search.mask(chosen))
            hits = jnp.argmax(lm.unembed(params, lm.norm(params, h)), axis=-1) == text[row][positions + 1]
            return (hits & due[None]).sum() / jnp.maximum(due.sum(), 1).astype(jnp.float32)

        return skip_search.advance(search, matchness, size, 25)

    kept, search, read = caches(target.params, text), skip_search.start(lm.num_layers, 64), 0
    while read + WINDOW <= tokens:
        row = int(rng.integers(len(few)))
        ends = np.flatnonzero(mask[row])
        begin = int(np.clip(ends[0] - 1, 0, LENGTH - WINDOW - 1))
        due = mask[row][begin + 1 : begin + WINDOW + 1]
        search = trial(target.params, search, kept, text, row, jnp.int32(begin), jnp.asarray(due))
        read += WINDOW
    return skip_search.mask(search.best), read


def judged(target: Any, rows: Rows, skip: Any) -> np.ndarray:
    """By held-out row: the divergence from the whole model, tokens where both would draw the same, and tokens. `[N, 3]`."""
    fitness = Divergence(target.lm, target.params, lambda one: (target.params, one), rows)

    @jax.jit
    def measured(params, batch, skip):
        whole, own = logits(target.lm, params, None, batch)[:, :-1], logits(target.lm, params, skip, batch)[:, :-1]
        due = batch.due(1)
        same = jnp.argmax(whole, axis=-1) == jnp.argmax(own, axis=-1)
        found = jnp.stack([divergence(whole, own), same.astype(jnp.float32), jnp.ones(due.shape)], axis=2)
        return jnp.where(due[..., None], found, 0.0).sum(axis=1)

    parts = []
    for begin in range(0, len(rows), 8):
        chosen = [(i, fitness.lengths[i]) for i in range(begin, min(begin + 8, len(rows)))]
        parts.append(np.asarray(measured(target.params, fitness._batch(chosen, 8, LENGTH), skip))[: len(chosen)])
    return np.concatenate(parts)


def main() -> None:
    """Prints a line per run, then the comparison."""
    target = models.load("tiny")
    mixture = Mixture(5, levels=(2,))
    text = rows_of(target, (mixture[i] for i in range(150)))
    questions = [
        one for family in ("math", "json", "code", "edit", "qa", "lists") for one in generate(family, 2, 11, 8)
    ]
    held_out = rows_of(target, questions)
    found: dict[str, list[np.ndarray]] = {"evopress": [], "swift": []}
    for seed in range(SEEDS):
        chosen, tokens = evopress(target, text, seed)
        for name, (skip, read) in (("evopress", (chosen, tokens)), ("swift", swift(target, text, seed, tokens))):
            own = judged(target, held_out, skip)
            found[name].append(own)
            total, hits, count = own.sum(axis=0)
            left_out = " ".join(("-", "attn", "mlp", "both")[a + 2 * b] for a, b in np.asarray(skip).tolist())
            print(f"| {name} | {seed} | {read} | {left_out} | {total / count:.3f} | {hits / count:.3f} |", flush=True)
    rng, sums = np.random.default_rng(0), {name: np.mean(own, axis=0) for name, own in found.items()}
    means = lambda own, at: own[at].sum(axis=0)[:2] / own[at].sum(axis=0)[2]
    draws = []
    for _ in range(2000):
        at = rng.integers(len(held_out), size=len(held_out))
        draws.append(means(sums["evopress"], at) - means(sums["swift"], at))
    whole = np.arange(len(held_out))
    difference, spread = (
        means(sums["evopress"], whole) - means(sums["swift"], whole),
        np.percentile(draws, (2.5, 97.5), axis=0),
    )
    for name, own, low, high in zip(("divergence", "same token"), difference, *spread, strict=True):
        print(
            f"evopress - swift, {name}: {own:+.3f} ({low:+.3f} to {high:+.3f}), {len(held_out)} rows of held-out text"
        )


if __name__ == "__main__":
    main()
