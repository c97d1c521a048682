"""How many tokens change with the batch and the tree, by the type of the numbers: `python experiments/reproducibility/run.py`.

The same questions are answered in other batches and with other trees, in every type, and compared with plain decoding of
one row at a time in that type. Writes `results.json` and `reproducibility.png` beside this file, and prints the tables of
`README.md`.
"""

import argparse
import itertools
import json
import pathlib
from typing import Any

import specjax
from specjax.tasks import FAMILIES, generate, messages
from specjax.viz.picture import Picture

HERE = pathlib.Path(__file__).resolve().parent
DTYPES = ("bfloat16", "layercast", "float32")
SETTINGS = {
    "batch 8": {"drafter": "none", "batch_size": 8},
    "batch 40": {"drafter": "none", "batch_size": 40},
    "chain of 12": {"drafter": "draft:length=12", "batch_size": 1},
    "tree of 48": {"drafter": "draft:expander=top_k,k=6,depth=6,nodes=48", "batch_size": 1},
}


def prompts(count: int, seed: int) -> list[dict[str, Any]]:
    """Held-out questions of level 2, families in turn, as prompts with names."""
    asked = (question for family in FAMILIES for question in generate(family, 2, seed=seed, count=count))
    return [{"prompt": messages(question), "id": str(i)} for i, question in enumerate(asked)]


def written(model: Any, asked: list[dict[str, Any]], temperature: float, setting: dict[str, Any]) -> list[list[int]]:
    """The tokens of every answer."""
    records = specjax.generate(model, asked, temperature=temperature, max_new_tokens=128, **setting)
    return [list(record.tokens) for record in records]


def difference(texts: list[list[int]], plain: list[list[int]]) -> dict[str, Any]:
    """How many texts are others, and what share of plain decoding's tokens lies after the first that differs."""
    same = lambda a, b: sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))
    kept = [same(a, b) for a, b in zip(texts, plain, strict=True)]
    total = sum(map(len, plain))
    return {
        "texts": len(plain),
        "other_texts": sum(a != b for a, b in zip(texts, plain, strict=True)),
        "tokens": total,
        "tokens_behind_a_difference": total - sum(kept),
    }


def measured(count: int, seed: int, temperature: float) -> list[dict[str, Any]]:
    """A row a type and setting."""
    asked, rows = prompts(count, seed), []
    for dtype in DTYPES:
        model = specjax.models.load("tiny", dtype=dtype)
        plain = written(model, asked, temperature, {"drafter": "none", "batch_size": 1})
        for name, setting in SETTINGS.items():
            found = difference(written(model, asked, temperature, setting), plain)
            rows.append({"dtype": dtype, "temperature": temperature, "setting": name, **found})
            print(rows[-1], flush=True)
    return rows


def table(rows: list[dict[str, Any]], temperature: float) -> str:
    """Other texts, and the share of tokens after a difference, as lines of a table."""
    lines = [f"| beside plain decoding of one row | {' | '.join(DTYPES)} |", "| --- |" + " --- |" * len(DTYPES)]
    for name in SETTINGS:
        found = {r["dtype"]: r for r in rows if r["setting"] == name and r["temperature"] == temperature}
        cell = lambda r: f"{r['other_texts']} ({100 * r['tokens_behind_a_difference'] / r['tokens']:.1f}%)"
        lines.append(f"| {name} | {' | '.join(cell(found[dtype]) for dtype in DTYPES)} |")
    return "\n".join(lines)


def picture(rows: list[dict[str, Any]]) -> Picture:
    """A bar a type and setting, and on it how many texts are others: a bar without height is a figure too."""
    temperatures = list(dict.fromkeys(row["temperature"] for row in rows))
    figure = Picture(7.5 * len(temperatures), 4)
    panels = figure.subplots(1, len(temperatures), squeeze=False)[0]
    for axes, temperature in zip(panels, temperatures, strict=True):
        for index, dtype in enumerate(DTYPES):
            own = [r for r in rows if r["dtype"] == dtype and r["temperature"] == temperature]
            shares = [100 * r["other_texts"] / r["texts"] for r in own]
            bars = axes.bar([i + 0.3 * (index - 1) for i in range(len(own))], shares, width=0.28, label=dtype)
            axes.bar_label(
                bars, [f"{r['other_texts']} of {r['texts']}" for r in own], fontsize=7, padding=2, rotation=90
            )
        axes.set_xticks(range(len(SETTINGS)), list(SETTINGS))
        axes.set_ylim(0, max(1.25 * axes.get_ylim()[1], 5))
        axes.set_ylabel("texts that are others, %")
        axes.set_title(f"temperature {temperature:g}", fontsize=10)
    figure.legend(*panels[0].get_legend_handles_labels(), fontsize=8, loc="outside right upper")
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=8, help="questions per family")
    parser.add_argument("--seed", type=int, default=61)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0])
    parser.add_argument(
        "--show", action="store_true", help="measure nothing: the picture and the tables of results.json"
    )
    options = parser.parse_args()
    if not options.show:
        rows = [row for t in options.temperatures for row in measured(options.count, options.seed, t)]
        (HERE / "results.json").write_text(json.dumps({"seed": options.seed, "rows": rows}, indent=1) + "\n")
    rows = json.loads((HERE / "results.json").read_text())["rows"]
    picture(rows).savefig(HERE / "reproducibility.png", dpi=100)
    for temperature in dict.fromkeys(row["temperature"] for row in rows):
        print(f"\nTemperature {temperature:g}:\n\n{table(rows, temperature)}")


if __name__ == "__main__":
    main()
