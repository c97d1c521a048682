"""What lossy ways to decode change in SmolLM2's texts: `python -m experiments.smollm2.lossy` writes lossy.json and its table.

All ways answer the same prompts, at temperature 1 and greedily: held-out questions of SmolLM2's own text, which have no right
answer, and short tasks of copying, sums and formats, which have one. The plain target in float32 scores every text.
"""

import argparse
import gzip
import json
import random
import re
from collections.abc import Iterator
from typing import Any

import numpy as np

import specjax
from experiments.smollm2 import page as pages
from experiments.smollm2.train import TEXTS
from specjax.evaluate.statistics import wilson

OPEN, EACH, TOKENS = 12, 6, 40
"""Questions without a right answer, tasks of each of three kinds, and new tokens at most."""
RULES = "typical", "ears", "fly:window=1", "lantern", "lenient", "reflective", "reverse"
WAYS: dict[str, dict[str, Any]] = {
    "coupled": {"drafter": "eagle3"},
    **{rule: {"drafter": f"eagle3:verifier=({rule})"} for rule in RULES},
    "weights=int8": {"weights": "int8", "drafter": "none"},
    "weights=int4": {"weights": "int4", "drafter": "none"},
}
"""What differs from the first way, which writes plain decoding's text."""
TEMPERATURES = 0.0, 1.0
ANIMALS = ("cat", "dog", "horse", "cow", "goat", "sheep", "duck", "hen", "pig", "fox", "bear", "wolf")


def tasks(seed: int = 0) -> list[tuple[str, str]]:
    """Prompts, and the words that a right answer has.

    >>> [wanted for _, wanted in tasks()][:3]
    ['duck wolf cat goat', '17', '{"word": "duck"}']
    """
    rng, made = random.Random(seed), []
    for _ in range(EACH):
        words = rng.sample(ANIMALS, 4)
        a, b = rng.randint(2, 9), rng.randint(2, 9)
        made.append((f"Repeat these words in the same order, and nothing else: {' '.join(words)}", " ".join(words)))
        made.append((f"What is {a} plus {b}? Answer with the number.", str(a + b)))
        made.append((f'Write the word {words[0]} as a JSON object with the key "word".', f'{{"word": "{words[0]}"}}'))
    return made


def is_right(text: str, wanted: str) -> bool:
    """Whether a text has these words, in any white space and any case, and no other number in their place.

    >>> is_right("It is 12.", "12"), is_right("It is 121.", "12")
    (True, False)
    """
    flat = " ".join(text.lower().split())
    return re.search(rf"(?<!\d){re.escape(wanted)}(?!\d)", flat) is not None


def questions() -> list[str]:
    """Held-out questions of SmolLM2's own text: the last of every fifty."""
    lines = gzip.decompress(TEXTS.read_bytes()).decode().splitlines()[49::50]
    return [json.loads(line)["prompt"][0]["content"] for line in lines[:OPEN]]


def measured(way: dict[str, Any], temperature: float, target: Any) -> dict[str, Any]:
    """The tokens of all texts of a way, and what they are worth to the target."""
    asked = [*questions(), *(prompt for prompt, _ in tasks())]
    own = dict(way)
    model = specjax.load("smollm2", weights=own.pop("weights")) if "weights" in own else target
    how = {"chat": True, "max_new_tokens": TOKENS, "temperature": temperature, "seed": 0, "batch_size": 8}
    records = specjax.generate(model, asked, **own, **how)
    chats = [[{"role": "user", "content": prompt}] for prompt in asked]
    scores = specjax.score(target, chats, [record.tokens for record in records])
    checked = [is_right(record.text, wanted) for record, (_, wanted) in zip(records[OPEN:], tasks(), strict=True)]
    new, steps = (sum(getattr(record, name) for record in records) for name in ("new_tokens", "steps"))
    return {
        "tokens_per_step": round(new / steps, 3),
        "nll_per_token": round(-sum(score.logprob for score in scores) / new, 4),
        "right": checked,
        "texts": [record.tokens for record in records],
    }


def table(temperature: float) -> Iterator[tuple[str, ...]]:
    """A row for every way."""
    yield "way", "tokens per step", "the target's nats per token", "other texts", "right"
    for row in pages.report("lossy")["rows"]:
        if row["temperature"] == temperature:
            low, high = (100 * end for end in wilson(np.asarray(row["right"], float)))
            shown = f"{np.mean(row['right']):.0%} ({low:.0f} to {high:.0f})"
            yield (
                f"`{row['way']}`",
                f"{row['tokens_per_step']:.2f}",
                f"{row['nll_per_token']:.2f}",
                f"{row['changed']:.0%}",
                shown,
            )


def tables() -> Iterator[str]:
    for temperature in TEMPERATURES:
        yield f"\nTemperature {temperature:g}:\n"
        yield from pages.table(table(temperature))


def written(page: str) -> str:
    return pages.filled(page, "lossy", [*tables(), ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--show", action="store_true", help="measure nothing")
    if not parser.parse_args().show:
        target, rows = specjax.load("smollm2"), []
        for temperature in TEMPERATURES:
            plain = None
            for name, way in WAYS.items():
                found = measured(way, temperature, target)
                texts = found.pop("texts")
                plain = plain or texts
                changed = np.mean([own != other for own, other in zip(texts, plain, strict=True)])
                rows.append({"way": name, "temperature": temperature, "changed": round(float(changed), 4)} | found)
                print(json.dumps(rows[-1]), flush=True)
        pages.keep("lossy", {"rows": rows})
    pages.show(written)


if __name__ == "__main__":
    main()
