"""Passes of an any-subset model by who drafts: `python -m experiments.any_subset.run FOLDER`.

`FOLDER` is what the README's command trained on the lines that `python -m experiments.any_subset.run --lines` prints.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from specjax import models
from specjax.decode.lines import read_decode
from specjax.decoder import run
from specjax.models import Model
from specjax.prompts import OPEN, Prompts
from specjax.sampling import SamplingArrays
from specjax.tasks import generate

FAMILIES, TRAINED, COUNT, LENGTH = ("lists", "edit", "json"), 2000, 16, 64
"""Families of questions; of each, at the first level, the texts to train on and to fill in; the most tokens of one."""
GREEDY = ("assd:drafts=1", "assd", "assd:drafter=context_ngram")
WAYS = (*GREEDY, "assd:rule=rejection", "assd:rule=rejection,drafter=context_ngram")


def texts(split: str, count: int) -> Iterator[str]:
    """Questions with their right answers, one text each."""
    for family in FAMILIES:
        for one in generate(family, 1, 0, count, split):
            yield f"{one.prompt}\n{one.answers[0]}"


def given(model: Model, share: float) -> tuple[np.ndarray, np.ndarray]:
    """Held-out texts `[R, L]` with open positions, and their lengths `[R]`."""
    rng = np.random.default_rng(0)
    rows = np.zeros((COUNT * len(FAMILIES), LENGTH), np.int32)
    lengths = np.zeros(len(rows), np.int32)
    for row, text in enumerate(texts("held_out", COUNT)):
        ids = np.asarray(model.tokenizer.encode(text)[:LENGTH], np.int32)
        opened = rng.permutation(len(ids))[: int(share * len(ids))]
        ids[opened] = OPEN
        rows[row, : len(ids)], lengths[row] = ids, len(ids)
    return rows, lengths


def filled(model: Model, line: str, rows: np.ndarray, lengths: np.ndarray, temperature: float) -> Any:
    """The state after all positions are filled in."""
    decoder, params = read_decode(line).bind(model)
    keys = jax.vmap(lambda i: jax.random.fold_in(jax.random.key(0, impl="threefry2x32"), i))(np.arange(len(rows)))
    prompts = Prompts(rows, lengths, keys, lengths, SamplingArrays.make(len(rows), temperature=temperature))
    return run(decoder, params, decoder.init(params, prompts, capacity=LENGTH))


def interval(opened: np.ndarray, passes: np.ndarray) -> list[float]:
    """Open positions per pass, with 95% of 2,000 draws of as many texts."""
    chosen = np.random.default_rng(0).integers(0, len(opened), (2000, len(opened)))
    low, high = np.percentile(opened[chosen].sum(1) / passes[chosen].sum(1), [2.5, 97.5])
    return [round(float(x), 3) for x in (opened.sum() / passes.sum(), low, high)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", help="the trained model")
    parser.add_argument("--lines", action="store_true", help="print the lines to train on")
    parser.add_argument("--share", type=float, default=0.5, help="the share of each text that is open")
    parser.add_argument("--temperature", type=float, default=0.0)
    asked = parser.parse_args()
    if asked.lines:
        for text in texts("train", TRAINED):
            print(json.dumps({"text": text}))
        return
    if not asked.folder:
        sys.exit("give the folder of the trained model")
    model = models.load(asked.folder)
    rows, lengths = given(model, asked.share)
    opened, alone = (rows == OPEN).sum(axis=1), None
    for line in WAYS if asked.temperature else GREEDY:
        state = filled(model, line, rows, lengths, asked.temperature)
        tokens, passes = np.asarray(state.tokens), np.asarray(state.stats.steps)
        alone = tokens if alone is None else alone
        same = int((tokens == alone).all(axis=1).sum())
        row = {"share": asked.share, "temperature": asked.temperature, "decode": line, "same": same, "rows": len(rows)}
        row |= {"passes": round(float(passes.mean()), 2), "tokens_per_pass": interval(opened, passes)}
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
