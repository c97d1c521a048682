"""`python experiments/lossy/report.py` draws `lossy.png` of the JSON files here, and prints their tables."""

import json
from pathlib import Path
from typing import Any

from specjax.assembly.line import settings
from specjax.decode.lines import read_decode
from specjax.viz.picture import Picture

FOLDER = Path(__file__).parent


def rows(found: dict[str, Any]) -> list[dict[str, Any]]:
    """Of every rule what it wrote, and beside those after the first how that differs from the first's."""
    against = {one["decoder"]: one for one in found["comparisons"]}
    decoders = [found, *found["decoders"]]
    rule = lambda one: read_decode(settings(one["decoder"])["drafter"]).verifier
    return [{**one, "rule": rule(one), **_points(against, one)} for one in decoders]


def _points(against: dict[str, dict], one: dict[str, Any]) -> dict[str, Any]:
    differs = against.get(one["decoder"])
    return (
        {} if differs is None else {"points": [100 * differs[key] for key in ("low", "high")], "p": differs["p_value"]}
    )


def table(found: dict[str, Any]) -> str:
    """The rules as lines of a table."""
    lines = ["| rule | tokens per step | right | points against `coupled` | p |", "| --- | --- | --- | --- | --- |"]
    for row in rows(found):
        low, middle, high = (100 * row[key] for key in ("low", "accuracy", "high"))
        points = "{:+.1f} to {:+.1f}".format(*row["points"]) if "points" in row else ""
        chance = f"{row['p']:.2g}" if "p" in row else ""
        right = f"{middle:.1f}% ({low:.1f} to {high:.1f})"
        lines.append(f"| `{row['rule']}` | {row['tokens_per_step']:.2f} | {right} | {points} | {chance} |")
    return "\n".join(lines)


def main() -> None:
    """A panel a file."""
    files = sorted(FOLDER.glob("*_*.json"))
    figure = Picture(5 * len(files), 4.5)
    panels = figure.subplots(1, len(files), squeeze=False)[0]
    for axes, file in zip(panels, files, strict=True):
        found = json.loads(file.read_text())
        drafter, temperature = file.stem.split("_")
        print(f"\n{drafter}, temperature {temperature} ({found['about']}):\n\n{table(found)}")
        for index, row in enumerate(rows(found)):
            low, middle, high = (100 * row[key] for key in ("low", "accuracy", "high"))
            bars = [[middle - low], [high - middle]]
            axes.errorbar(
                row["tokens_per_step"], middle, yerr=bars, fmt="s" if index == 0 else "o", capsize=3, label=row["rule"]
            )
        axes.set_xlabel("tokens per step")
        axes.set_ylabel("right answers, % (Wilson, 95%)")
        axes.set_title(f"{drafter}, temperature {temperature}", fontsize=10)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7)
    figure.savefig(str(FOLDER / "lossy.png"), dpi=100)


if __name__ == "__main__":
    main()
