"""Settings chosen by speed on half of Spec-Bench's tasks and shown on the other half, on SmolLM2.

`python -m experiments.smollm2.settings --input question.jsonl` writes settings.json and its table. All lines answer the same
turns in turn in one process, as `experiments.smollm2.spec` has it.
"""

import argparse
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from experiments.smollm2.page import filled, keep, report, show, table
from experiments.smollm2.spec import measured

CHOSEN_ON = "mt_bench", "summarization", "math_reasoning"
SHOWN_ON = "translation", "qa", "rag"
LINES = {
    "prompt_lookup": ("", "min_ngram=1", "length=5", "rule=online,cost=0.2"),
    "suffix": ("", "min_prob=0.5"),
    "token_recycling": ("", "tree=1 | 1 | 1"),
    "stand": ("", "tree=1 | 1"),
}
"""The settings of a drafter; the first one is its default."""


def line(drafter: str, setting: str) -> str:
    return f"{drafter}:{setting}" if setting else drafter


def words() -> list[str]:
    """What `specjax bench spec` is told of them."""
    drafters = [
        word for drafter, settings in LINES.items() for own in settings for word in ("--drafter", line(drafter, own))
    ]
    return ["--samples", "2", "--max-new-tokens", "64", *drafters]


def speed(row: dict[str, Any], tasks: tuple[str, ...]) -> float:
    """Tokens a second, the mean of tasks with as many questions each."""
    return statistics.fmean(row["tasks"][task]["tokens_per_second"] for task in tasks)


def compared() -> Iterator[tuple[str, ...]]:
    """A row for every setting: its speed over plain decoding's on both halves, and which setting is the first half's best."""
    yield "drafter", "setting", "tokens per step", "ratio to plain, where it is chosen", "on the other half"
    plain, *rows = report("settings")["rows"]
    lines = iter(rows)
    for drafter, settings in LINES.items():
        own = [next(lines) for _ in settings]
        best = max(range(len(own)), key=lambda place: speed(own[place], CHOSEN_ON))
        for place, (setting, row) in enumerate(zip(settings, own, strict=True)):
            first, second = (f"{speed(row, half) / speed(plain, half):.2f}" for half in (CHOSEN_ON, SHOWN_ON))
            cells = f"{row['overall']['mean_accepted']:.2f}", first, second
            setting = f"`{setting.replace('|', chr(92) + '|')}`" if setting else "default"
            yield f"`{drafter}`", setting, *(f"**{cell}**" if place == best else cell for cell in cells)


def written(page: str) -> str:
    return filled(page, "settings", ["", *table(compared()), ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--input", type=Path, help="Spec-Bench's question.jsonl")
    parser.add_argument("--show", action="store_true", help="measure nothing")
    asked = parser.parse_args()
    if not asked.show and asked.input is None:
        parser.error("give --input question.jsonl, or --show")
    if not asked.show:
        keep("settings", measured(words(), asked.input))
    show(written)
    print("\n".join(table(compared())))


if __name__ == "__main__":
    main()
