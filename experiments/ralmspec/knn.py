"""A kNN-LM, plain and with guessed neighbours, over the text of docs/: `python -m experiments.ralmspec.knn` prints a table.

All ways write the texts of the same prompts, one prompt at a time, in turns.
"""

import argparse
import dataclasses
import time
from pathlib import Path

import numpy as np

import specjax
from specjax.bench.prompts import questions
from specjax.search import KnnLm, build_entries

WAYS = {"plain": 1, "2 ahead": 2, "4 ahead": 4, "8 ahead": 8}
NEW = 48
DOCS = Path(__file__).parents[2] / "docs"


def measured(count: int, prompts: int, rounds: int) -> list[dict]:
    """A row for every way, prompt and round."""
    model = dataclasses.replace(specjax.load("tiny"), eos_ids=())  # all texts are of one length
    text = "\n".join(path.read_text(encoding="utf-8") for path in sorted(DOCS.glob("*.md")))
    ids = model.tokenizer.encode(text, add_special_tokens=False)[: count + 1]
    entries = build_entries(model, ids)
    retriever = entries.nearest()
    print(f"{len(entries.tokens)} entries are ready", flush=True)
    ways = {way: KnnLm(entries, retriever, ahead=ahead) for way, ahead in WAYS.items()}
    lines = [text[at : at + 200] for at in np.linspace(0, 100_000, prompts).astype(int)]
    asked = [*lines, *(own if isinstance(own, str) else own[-1]["content"] for own in questions(prompts, ["code"]))]
    for prompt in asked:  # compiles
        for way in ways.values():
            way(model, [prompt], max_new_tokens=NEW)
    found = []
    for number in range(rounds):
        for at, prompt in enumerate(asked):
            for way in np.random.default_rng([number, at]).permutation(list(ways)).tolist():
                began = time.perf_counter()
                (own,) = ways[way](model, [prompt], max_new_tokens=NEW)
                seconds = time.perf_counter() - began
                found.append({"way": way, "prompt": at, "seconds": seconds, "own": own})
    return found


def table(rows: list[dict]) -> list[str]:
    """The lines of the page's table; the intervals of 95% are of draws of as many prompts, with replacement."""
    prompts = sorted({row["prompt"] for row in rows})
    draws = np.random.default_rng(0).integers(len(prompts), size=(2000, len(prompts)))
    mine = lambda way, at: [row for row in rows if (row["way"], row["prompt"]) == (way, at)]
    best = {way: np.asarray([min(row["seconds"] for row in mine(way, at)) for at in prompts]) for way in WAYS}
    lines = [
        "| way | times as fast as plain | retrievals of a token | right guesses | same texts |",
        "|---|---|---|---|---|",
    ]
    for way in WAYS:
        ratio = best["plain"].sum() / best[way].sum()
        low, high = np.quantile(best["plain"][draws].sum(axis=1) / best[way][draws].sum(axis=1), [0.025, 0.975])
        own = [mine(way, at)[0]["own"] for at in prompts]
        asked = sum(one.retrievals for one in own) / sum(len(one.tokens) for one in own)
        guesses = sum(one.guesses for one in own)
        right = f"{sum(one.matches for one in own) / guesses:.2f}" if guesses else ""
        same = all(one.tokens == mine("plain", at)[0]["own"].tokens for at, one in enumerate(own))
        lines.append(
            f"| {way} | {ratio:.2f} ({low:.2f} to {high:.2f}) | {asked:.2f} | {right} | {'yes' if same else 'NO'} |"
        )
    return lines


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, usual in (("entries", 100_000), ("prompts", 4), ("rounds", 2)):
        parser.add_argument(f"--{name}", type=int, default=usual)
    options = parser.parse_args()
    print("\n".join(table(measured(options.entries, options.prompts, options.rounds))))


if __name__ == "__main__":
    main()
