"""Right answers against target passes per question: `python experiments/selection/picture.py` writes two pictures."""

import json
from pathlib import Path

from specjax.viz.picture import Picture

FOLDER = Path(__file__).parent
NAMES = ("majority", "self_certainty", "borda", "first_finish", "reward:module=equations.right")
STEPWISE = ("astar", "spec_reason", "self_agreement", "entropy_adaptive")


def main() -> None:
    """Draws both."""
    selections()
    steps()


def selections() -> None:
    """Draws a panel a temperature."""
    files = sorted(FOLDER.glob("temperature_*.json"))
    figure = Picture(5 * len(files), 4)
    panels = figure.subplots(1, len(files), sharey=True)
    for axes, file in zip(panels, files, strict=True):
        found = json.loads(file.read_text())
        greedy, one = found["rows"][:2]
        for index, name in enumerate(NAMES):
            rows = [one, *(row for row in found["rows"] if row["name"] == name)]
            shift = 1 + 0.03 * (index - 2)  # so that intervals do not hide each other
            drawn(axes, rows, name, shift)
        against(axes, greedy)
        axes.set_title(f"temperature {found['options']['temperature']:g}", fontsize=10)
    panels[0].set_ylabel("right answers, % (95%)")
    panels[-1].legend(fontsize=8, loc="lower left")
    figure.savefig(str(FOLDER / "accuracy.png"), dpi=110)


def steps() -> None:
    """Draws the methods that go step by step; rows of one method are not joined, since more passes are not all that differs."""
    found = json.loads((FOLDER / "steps.json").read_text())
    whole = found["options"]["limit"]
    rows = [row for row in found["rows"] if row.get("questions", whole) == whole]
    figure = Picture(7, 4)
    axes = figure.subplots(1, 1)
    for name in STEPWISE:
        own = sorted((row for row in rows if row["name"].startswith(name)), key=lambda row: row["passes"])
        drawn(axes, own, name, lw=0, elinewidth=1)
    against(axes, rows[0])
    axes.set_ylabel("right answers, % (95%)")
    axes.legend(fontsize=8)
    figure.savefig(str(FOLDER / "steps.png"), dpi=110)


def drawn(axes, rows, name, shift=1.0, **look):
    """Rows with their intervals."""
    axes.errorbar(
        [row["passes"] * shift for row in rows],
        [100 * row["right"] for row in rows],
        yerr=[
            [100 * (row["right"] - row["low"]) for row in rows],
            [100 * (row["high"] - row["right"]) for row in rows],
        ],
        marker="o",
        capsize=2,
        label=name,
        **({"lw": 1} | look),
    )


def against(axes, greedy):
    """The greedy answer and its interval, and what both pictures have in common."""
    axes.axhline(100 * greedy["right"], color="black", lw=1)
    axes.axhspan(100 * greedy["low"], 100 * greedy["high"], color="black", alpha=0.07)
    axes.plot(greedy["passes"], 100 * greedy["right"], "k*", ms=12, label="greedy")
    axes.set_xscale("log", base=2)
    axes.set_xlabel("target passes per question")
    axes.grid(alpha=0.3)


if __name__ == "__main__":
    main()
