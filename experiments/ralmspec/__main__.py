"""Retrieval while decoding, plain and speculated, over 100,000 passages: `python -m experiments.ralmspec` writes results.json.

All ways write the texts of the same prompts, one prompt at a time, in turns. `--table` prints the table of the page.
"""

import argparse
import dataclasses
import json
import sys
import time
from pathlib import Path

import numpy as np
import scipy.sparse

import specjax
from specjax.bench.prompts import questions
from specjax.search import Bm25, Dense, Ralm

PASSAGES, TOPICS, WORDS = 100_000, 2_000, 48
"""Passages, the topics that they are about, and the words of each."""
WIDTH = 768
NEW, PROMPTS, ROUNDS = 64, 4, 2
WAYS = {
    "plain": {"ahead": 1},
    "3 ahead, no prefetch": {"ahead": 3, "prefetch": 1},
    "3 ahead": {"ahead": 3},
    "3 ahead, overlapped": {"ahead": 3, "overlap": True},
    "OS3": {"ahead": "os3"},
    "OS3, overlapped": {"ahead": "os3", "overlap": True},
}
MEASURES = "retrievals", "guesses", "matches", "passes", "tokens"
RESAMPLED = 2000
"""Draws of as many prompts, with replacement, that the intervals of 95% are of."""
RESULTS = Path(__file__).with_name("results.json")


def passages(tokenizer, count: int, seed: int = 0) -> list[str]:
    """Passages of words of the model's own vocabulary. A topic has 60 words, and every third word is from anywhere."""
    rng = np.random.default_rng(seed)
    pieces = {tokenizer.decode([token]) for token in range(len(tokenizer))}
    words = np.asarray(
        sorted(piece[1:] for piece in pieces if piece[0] == " " and piece[1:].isalpha() and len(piece) > 3)
    )
    often = 1 / np.arange(1, len(words) + 1) ** 0.7
    often = rng.permutation(often / often.sum())
    topics = np.stack([rng.choice(len(words), 60, replace=False) for _ in range(TOPICS)])
    own = topics[rng.integers(TOPICS, size=count)[:, None], rng.integers(60, size=(count, WORDS))]
    other = rng.choice(len(words), size=(count, WORDS), p=often)
    chosen = np.where(rng.random((count, WORDS)) < 1 / 3, other, own)
    return [" ".join(row) + "." for row in words[chosen]]


class Bags:
    """Vectors of texts: the sum of a random direction for each word, those of rare words longer, of length 1."""

    def __init__(self, texts, seed: int = 1):
        bags = [self.words(text) for text in texts]
        self.known = {word: number for number, word in enumerate(sorted({word for bag in bags for word in bag}))}
        counts = self._counts(bags)
        seen = np.asarray((counts > 0).sum(axis=0)).reshape(-1)
        ways = np.random.default_rng(seed).standard_normal((len(self.known), WIDTH))
        self.ways = (ways * np.log(len(texts) / seen)[:, None]).astype(np.float32)
        self.vectors = self._embedded(counts)

    @staticmethod
    def words(text):
        return ["".join(filter(str.isalpha, word)) for word in text.lower().split()]

    def _counts(self, bags):
        """`[texts, words]`, sparse."""
        known = [[self.known[word] for word in bag if word in self.known] for bag in bags]
        rows = np.repeat(np.arange(len(bags)), [len(own) for own in known])
        columns = np.asarray([word for own in known for word in own], int)
        return scipy.sparse.csr_array((np.ones(len(rows), np.float32), (rows, columns)), (len(bags), len(self.known)))

    def _embedded(self, counts):
        found = counts @ self.ways
        return found / np.maximum(np.linalg.norm(found, axis=1, keepdims=True), 1e-6)

    def __call__(self, queries):
        return self._embedded(self._counts([self.words(query) for query in queries]))


def measured(count: int, prompts: int, rounds: int) -> list[dict]:
    """A row for every retriever, way, prompt and round."""
    model = specjax.load("tiny")
    model = dataclasses.replace(model, eos_ids=())  # all texts are of one length
    documents = passages(model.tokenizer, count)
    bags = Bags(documents)
    print(f"{count} passages are ready", file=sys.stderr, flush=True)
    asked = [
        own[-1]["content"] if not isinstance(own, str) else own for own in questions(prompts, ["code", "lists", "json"])
    ]
    found = []
    for name, retriever in {"dense": Dense(bags.vectors, bags), "bm25": Bm25(documents)}.items():
        ways = {way: Ralm(documents, retriever, **fields) for way, fields in WAYS.items()}
        for way in ("plain", "3 ahead"):
            for prompt in asked:  # compiles
                ways[way](model, [prompt], max_new_tokens=NEW)
        for number in range(rounds):
            for prompt, text in enumerate(asked):
                order = np.random.default_rng([number, prompt]).permutation(list(ways))
                for way in order.tolist():
                    began, spent = time.perf_counter(), time.process_time()
                    (own,) = ways[way](model, [text], max_new_tokens=NEW)
                    seconds, cpu = time.perf_counter() - began, time.process_time() - spent
                    measures = {name: getattr(own, name) for name in MEASURES}
                    spans = {"seconds": round(seconds, 5), "cpu": round(cpu, 5)}
                    found.append({"retriever": name, "way": way, "prompt": prompt, "round": number} | spans | measures)
    return found


def summary(rows: list[dict]) -> list[dict]:
    """A row for every retriever and way, with the ratio of plain's seconds to its own and an interval over prompts."""
    return [
        one
        for retriever in dict.fromkeys(row["retriever"] for row in rows)
        for one in _of_retriever([row for row in rows if row["retriever"] == retriever])
    ]


def _of_retriever(rows):
    prompts = sorted({row["prompt"] for row in rows})
    draws = np.random.default_rng(0).integers(len(prompts), size=(RESAMPLED, len(prompts)))

    def ratio(way, name):
        """Of plain's seconds to a way's, the best of each prompt's rounds, and the ends of the interval."""
        best = {
            own: np.asarray(
                [min(row[name] for row in rows if (row["way"], row["prompt"]) == (own, at)) for at in prompts]
            )
            for own in ("plain", way)
        }
        drawn = best["plain"][draws].sum(axis=1) / best[way][draws].sum(axis=1)
        found = best["plain"].sum() / best[way].sum(), np.quantile(drawn, 0.025), np.quantile(drawn, 0.975)
        return [round(float(one), 3) for one in found]

    texts = {way: {(row["prompt"], tuple(row["tokens"])) for row in rows if row["way"] == way} for way in WAYS}
    for way in WAYS:
        mine = [row for row in rows if row["way"] == way]
        sums = {
            name: sum(row[name] for row in mine) for name in ("retrievals", "guesses", "matches", "passes", "seconds")
        }
        new = sum(len(row["tokens"]) for row in mine)
        yield {
            "retriever": rows[0]["retriever"], "way": way, "tokens_per_second": round(new / sums["seconds"], 1),
            "wall": ratio(way, "seconds"), "cpu": ratio(way, "cpu"),
            "retrievals": round(sums["retrievals"] / len(mine), 1),
            "right": round(sums["matches"] / max(sums["guesses"], 1), 3),
            "passes_per_token": round(sums["passes"] / new, 3), "same_texts": texts[way] == texts["plain"],
        }  # fmt: skip


def table(rows: list[dict]) -> list[str]:
    """The lines of the page's table."""
    lines = [
        "| retriever | way | times as fast as plain | in CPU seconds | retrievals of a text | right guesses "
        "| passes of a token | same texts |",
        "|---" * 8 + "|",
    ]
    for row in rows:
        right = "" if row["way"] == "plain" else f"{row['right']:.2f}"
        wall, cpu = ("{:.2f} ({:.2f} to {:.2f})".format(*row[name]) for name in ("wall", "cpu"))
        cells = (
            row["retriever"], row["way"], wall, cpu, f"{row['retrievals']:.1f}", right,
            f"{row['passes_per_token']:.2f}", "yes" if row["same_texts"] else "NO",
        )  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def main() -> None:
    """Measures, or prints the table of what was measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--table", action="store_true", help="print the table of results.json")
    for name, usual in (("passages", PASSAGES), ("prompts", PROMPTS), ("rounds", ROUNDS)):
        parser.add_argument(f"--{name}", type=int, default=usual)
    options = parser.parse_args()
    if not options.table:
        rows = summary(measured(options.passages, options.prompts, options.rounds))
        asked = {name: getattr(options, name) for name in ("passages", "prompts", "rounds")}
        RESULTS.write_text(json.dumps({**asked, "new_tokens": NEW, "rows": rows}, indent=1) + "\n")
    print("\n".join(table(json.loads(RESULTS.read_text())["rows"])))


if __name__ == "__main__":
    main()
