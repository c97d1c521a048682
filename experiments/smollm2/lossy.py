"""What lossy ways to decode change in SmolLM2's texts: `python -m experiments.smollm2.lossy` writes lossy.json and its table.

All ways answer the same prompts, at temperature 1 and greedily: held-out questions of SmolLM2's own text, which have no right
answer, and short tasks of copying, sums and formats, which have one. Caches that forget answer the same after an earlier
conversation, greedily. The plain target in float32, with its whole cache, scores every text.
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
RULES = "typical", "ears", "judge", "fly:window=1", "lantern", "lenient", "reflective", "reverse"
WAYS: dict[str, dict[str, Any]] = {
    "coupled": {"drafter": "eagle3"},
    **{rule: {"drafter": f"eagle3:verifier=({rule})"} for rule in RULES},
    "weights=int8": {"weights": "int8", "drafter": "none"},
    "weights=int4": {"weights": "int4", "drafter": "none"},
}
"""What differs from the first way, which writes plain decoding's text."""
OLDS = "gear", "ems", "ems:budget=128", "spatten", "spatten:important=128,last=64"
CACHES: dict[str, dict[str, Any]] = {
    "whole": {"drafter": "none"},
    **{old: {"decode": f"plain:cache=({old})"} for old in OLDS},
}
"""The same, of ways that answer after an earlier conversation."""
TEMPERATURES = 0.0, 1.0
EARLIER = 600
"""Tokens of the earlier conversation, at least."""
ANIMALS = ("cat", "dog", "horse", "cow", "goat", "sheep", "duck", "hen", "pig", "fox", "bear", "wolf")


def tasks(seed: int = 0, each: int = EACH) -> list[tuple[str, str]]:
    """Prompts, and the words that a right answer has.

    >>> [wanted for _, wanted in tasks()][:3]
    ['duck wolf cat goat', '17', '{"word": "duck"}']
    """
    rng, made = random.Random(seed), []
    for _ in range(each):
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


def held_out() -> list[dict[str, Any]]:
    """Held-out conversations of SmolLM2's own text: the last of every fifty."""
    return [json.loads(line) for line in gzip.decompress(TEXTS.read_bytes()).decode().splitlines()[49::50]]


def conversation(tokenizer: Any) -> list[dict[str, str]]:
    """Held-out conversations that no question is taken from, one after the other."""
    said: list[dict[str, str]] = []
    for line in held_out()[OPEN:]:
        answer = tokenizer.decode(line["tokens"], skip_special_tokens=True)
        said += [*line["prompt"], {"role": "assistant", "content": answer}]
        if sum(len(tokenizer(turn["content"])["input_ids"]) for turn in said) >= EARLIER:
            break
    return said


def chats(earlier: list[dict[str, str]]) -> list[list[dict[str, str]]]:
    """What all ways are asked, after an earlier conversation."""
    asked = [*(line["prompt"][0]["content"] for line in held_out()[:OPEN]), *(prompt for prompt, _ in tasks())]
    return [[*earlier, {"role": "user", "content": prompt}] for prompt in asked]


def measured(way: dict[str, Any], temperature: float, target: Any, asked: list[Any]) -> dict[str, Any]:
    """The tokens of all texts of a way, and what they are worth to the target."""
    own = dict(way)
    model = specjax.load("smollm2", weights=own.pop("weights")) if "weights" in own else target
    how = {"max_new_tokens": TOKENS, "temperature": temperature, "seed": 0, "batch_size": 8}
    records = specjax.generate(model, asked, **own, **how)
    scores = specjax.score(target, asked, [record.tokens for record in records])
    checked = [is_right(record.text, wanted) for record, (_, wanted) in zip(records[OPEN:], tasks(), strict=True)]
    new, steps = (sum(getattr(record, name) for record in records) for name in ("new_tokens", "steps"))
    return {
        "tokens_per_step": round(new / steps, 3),
        "nll_per_token": round(-sum(score.logprob for score in scores) / new, 4),
        "right": checked,
        "texts": [record.tokens for record in records],
    }


def table(ways: dict[str, Any], temperature: float) -> Iterator[tuple[str, ...]]:
    """A row for every way."""
    yield "way", "tokens per step", "the target's nats per token", "other texts", "right"
    for row in pages.report("lossy")["rows"]:
        if row["temperature"] == temperature and row["way"] in ways:
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
        yield from pages.table(table(WAYS, temperature))
    yield f"\nCaches, after a conversation of at least {EARLIER} tokens, temperature 0:\n"
    yield from pages.table(table(CACHES, 0.0))


def written(page: str) -> str:
    return pages.filled(page, "lossy", [*tables(), ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--show", action="store_true", help="measure nothing")
    if not parser.parse_args().show:
        target, rows = specjax.load("smollm2"), []
        runs = [(WAYS, temperature, []) for temperature in TEMPERATURES]
        for ways, temperature, earlier in (*runs, (CACHES, 0.0, conversation(target.tokenizer))):
            plain, asked = None, chats(earlier)
            for name, way in ways.items():
                found = measured(way, temperature, target, asked)
                texts = found.pop("texts")
                plain = plain or texts
                changed = np.mean([own != other for own, other in zip(texts, plain, strict=True)])
                rows.append({"way": name, "temperature": temperature, "changed": round(float(changed), 4)} | found)
                print(json.dumps(rows[-1]), flush=True)
        pages.keep("lossy", {"rows": rows})
    pages.show(written)


if __name__ == "__main__":
    main()
