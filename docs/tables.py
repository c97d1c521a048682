"""`python docs/tables.py` writes the registry's tables into the pages, between `<!-- table: NAME -->` and `<!-- end -->`.

A row a method, in the registry's order; the measured figures are those that the folders of experiments hold.
"""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from specjax.spec import registry
from specjax.spec.registry import Entry

FOLDER = Path(__file__).resolve().parent
NEEDS = {
    "model": "a model of the same vocabulary",
    "diffusion_model": "a diffusion model of the same vocabulary",
    "head": "a trained head",
    "own_head": "a target with such a layer",
    "datastore": "a datastore",
    "guide": "an autoregressive model of the same vocabulary",
    "filter": "a trained filter",
}
BEGIN = re.compile(r"<!-- table: (\w+) -->\n.*?<!-- end -->", re.DOTALL)


def measured(name: str, row: str, figure: str) -> dict[str, float]:
    """A figure of a committed report, by what its rows call themselves up to the first colon."""
    rows = json.loads((FOLDER.parent / "experiments" / name).read_text())["rows"]
    return {found[row].partition(":")[0]: found[figure] for found in rows}


def needs(entries: Mapping[str, Entry]) -> dict[str, str]:
    """What is loaded beside the target for each method."""
    return {name: NEEDS.get(entry.loads, "nothing") for name, entry in entries.items()}


def drafters() -> Iterator[tuple[str, ...]]:
    """Every drafter but the one that drafts nothing, with tokens a step, greedy and at temperature 1."""
    greedy, sampled = (
        measured(f"drafters/{name}.json", "decoder", "tokens_per_step") for name in ("greedy", "sampled")
    )
    entries = {name: entry for name, entry in registry.DRAFTERS.items() if name != "none"}
    yield "name", "drafts with", "needs", "tokens a step, greedy", "at temperature 1", "source"
    for name, entry in entries.items():
        shown = (f"{found[name]:.2f}" if name in found else "" for found in (greedy, sampled))
        yield f"`{name}`", entry.summary, needs(entries)[name], *shown, entry.source


def listed(entries: Mapping[str, Entry], what: str) -> Iterator[tuple[str, ...]]:
    """Every entry with what its text is worth, where any of them says so."""
    worth = any(entry.guarantee for entry in entries.values())
    yield "name", what, *(["text"] if worth else []), "source"
    for name, entry in entries.items():
        yield f"`{name}`", entry.summary, *([entry.guarantee] if worth else []), entry.source


TABLES = {
    "drafters": drafters,
    "rules": lambda: listed(registry.RULES, "a chain ends"),
    "expanders": lambda: listed(registry.EXPANDERS, "grows"),
    "verifiers": lambda: listed(registry.VERIFIERS, "keeps"),
    "unmask": lambda: listed(registry.UNMASKS, "commits"),
    "samplers": lambda: listed(registry.SAMPLERS, "commits"),
    "caches": lambda: listed(registry.CACHES, "reuses"),
}


def written(name: str) -> str:
    """A table as Markdown."""
    head, *rows = ([cell.replace("|", "\\|") for cell in row] for row in TABLES[name]())
    return "".join(f"| {' | '.join(row)} |\n" for row in (head, ["---"] * len(head), *rows))


def filled(page: str) -> str:
    """A page with its tables as the registry has them now."""
    return BEGIN.sub(lambda found: f"<!-- table: {found[1]} -->\n\n{written(found[1])}\n<!-- end -->", page)


def main() -> None:
    """Writes the tables of all pages."""
    for page in sorted(FOLDER.glob("*.md")):
        page.write_text(filled(page.read_text()))


if __name__ == "__main__":
    main()
