"""Tokens per step of a switch and of its members, family by family: `python -m experiments.switch` writes results.json.

A job of similar questions for each family. `--table` prints the table of the page.
"""

import dataclasses
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import specjax
from specjax.bench.prompts import questions
from specjax.serve.request import needs_of
from specjax.serve.slots import in_order

SETS = (("iad", "suffix", "draft:length=4"),)
FAMILIES = "json", "code", "edit", "lists", "math", "translate"
PROMPTS = 40
NEW = 96
CAPACITY = 800
"""Text slots, the same for all jobs so that programs are compiled once."""
RESULTS = Path(__file__).with_name("results.json")


def measured(model, sets=SETS, prompts: int = PROMPTS, families=FAMILIES) -> Iterator[dict]:
    """A row for every decoder and family; each job begins with nothing known."""
    first: dict[str, list] = {}
    for number, members in enumerate(sets):
        switch = f"switch:drafters=({'+'.join(members)})"
        for line in (*members, f"{switch},watch=False", switch):
            engine = specjax.Engine(model, drafter=line)
            for family in families:
                asked = questions(prompts, [family])
                records = completed(engine, asked)
                texts = [record.tokens for record in records]
                new, steps = (sum(getattr(record, name) for record in records) for name in ("new_tokens", "steps"))
                row = {"set": number, "family": family, "decoder": line, "tokens_per_step": round(new / steps, 4)}
                yield row | {"identical_text": texts == first.setdefault(family, texts)}


def completed(engine: specjax.Engine, asked: list) -> list:
    """The records of a job of eight rows, with one program for a step: how many nodes it reads changes no text and no step."""
    requests = [engine.request(prompt, max_new_tokens=NEW) for prompt in asked]
    needs = dataclasses.replace(needs_of(requests), brief=True)
    return list(in_order(engine.turns(requests, capacity=CAPACITY, needs=needs)))


def table(rows: list[dict], number: int) -> list[str]:
    """The lines of a set's table: its members, the switch without and with look-ups judged in every step, and its ratio to the
    best member."""
    own = [row for row in rows if row["set"] == number]
    names, families = (list(dict.fromkeys(row[key] for row in own)) for key in ("decoder", "family"))
    found = {(row["decoder"], row["family"]): row["tokens_per_step"] for row in own}
    heads = "family", *(f"`{name}`" for name in names[:-2]), "`switch`, `watch=False`", "`switch`", "to the best"
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for family in families:
        each = [found[name, family] for name in names]
        cells = family, *(f"{value:.2f}" for value in each), f"{each[-1] / max(each[:-2]):.2f}"
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def main() -> None:
    """Measures, or prints the tables of what was measured."""
    if "--table" not in sys.argv:
        found = []
        for row in measured(specjax.load("tiny")):
            found.append(row)
            print(json.dumps(row), file=sys.stderr, flush=True)
        RESULTS.write_text(json.dumps({"prompts": PROMPTS, "rows": found}, indent=1) + "\n")
    rows = json.loads(RESULTS.read_text())["rows"]
    for number in sorted({row["set"] for row in rows}):
        print("\n".join(table(rows, number)), end="\n\n")


if __name__ == "__main__":
    main()
