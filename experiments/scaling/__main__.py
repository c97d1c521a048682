"""A scaling law fitted to drafts of several sizes and trainings: `python -m experiments.scaling` writes the tables.

The drafts are those of `experiments/draft_size`, and of `experiments/drafters` for the one that was trained longest.
"""

import dataclasses
import json
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
OF = {"tokens per step": "tokens_per_step", "first token accepted": "first"}
SHIPPED = 492, 3.3
"""The parameters of `tiny-draft` in thousands, and its training tokens in millions (`experiments/pretrain`)."""


@dataclasses.dataclass(frozen=True)
class Point:
    """A draft model after its training.

    Attributes:
      parameters: N, in thousands.
      tokens: D, its training tokens in millions.
      tokens_per_step: of chains of four, greedy.
      first: the share of steps that accepted a first draft token.
    """

    parameters: float
    tokens: float
    tokens_per_step: float
    first: float


@dataclasses.dataclass(frozen=True)
class Fit:
    """`y = c + n ln N + d ln D`, linear in each logarithm as arXiv:2505.07858 finds acceptance to be; N and D as in `Point`."""

    c: float
    n: float
    d: float

    def of(self, point: Point) -> float:
        return self.c + self.n * float(np.log(point.parameters)) + self.d * float(np.log(point.tokens))

    @classmethod
    def to(cls, points: Sequence[Point], field: str) -> "Fit":
        """By least squares of one of the points' figures."""
        rows = np.array([[1.0, np.log(point.parameters), np.log(point.tokens)] for point in points])
        return cls(*np.linalg.lstsq(rows, np.array([getattr(point, field) for point in points]))[0].tolist())


def unseen(points: Sequence[Point], own: Point, field: str) -> float:
    """What a fit to all other points says of one point."""
    return Fit.to([point for point in points if point != own], field).of(own)


def largest(points: Sequence[Point]) -> Point:
    """The largest draft after the longest training."""
    return max(points, key=lambda point: (point.parameters, point.tokens))


def read() -> tuple[list[Point], Point]:
    """The points of one experiment, and `tiny-draft`, which was measured with other questions."""
    rows = json.loads((HERE.parent / "draft_size" / "results.json").read_text())["rows"]
    points = [
        Point(row["parameters (k)"], row["training tokens (M)"], row["tokens_per_step"], row["acceptance_by_depth"][0])
        for row in rows
        if row["decoder"] == "draft"
    ]
    shipped = json.loads((HERE.parent / "drafters" / "greedy.json").read_text())["rows"]
    (row,) = [row for row in shipped if row["decoder"] == "draft"]
    return points, Point(*SHIPPED, row["tokens_per_step"], row["acceptance_by_depth"][0])


def tables(points: Sequence[Point], shipped: Point) -> str:
    """The tables of the page."""
    heads = [f"{name} | by a fit to the others | error" for name in OF]
    lines = [f"| parameters (k) | training tokens (M) | {' | '.join(heads)} |", "| --- " * (2 + 3 * len(OF)) + "|"]
    for point in [*points, shipped]:
        cells = [f"{point.parameters}", f"{point.tokens}" + (" (`tiny-draft`)" if point == shipped else "")]
        for field in OF.values():
            said, was = unseen(points, point, field), getattr(point, field)
            cells += [f"{was:.2f}", f"{said:.2f}", f"{said / was - 1:+.1%}"]
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", "| of | fit to all six | fit without the largest |", "| --- | --- | --- |"]
    others = [point for point in points if point != largest(points)]
    for name, field in OF.items():
        fits = [Fit.to(own, field) for own in (points, others)]
        cells = [f"`{fit.c:.3f} + {fit.n:.3f} ln N + {fit.d:.3f} ln D`" for fit in fits]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def page(text: str, points: Sequence[Point], shipped: Point) -> str:
    """The page with the tables of these points."""
    made = lambda _: tables(points, shipped)
    return re.sub(r"(?<=<!-- measured -->\n\n).*(?=\n\n<!-- end -->)", made, text, flags=re.DOTALL)


def main() -> None:
    file = HERE / "README.md"
    file.write_text(page(file.read_text(), *read()))


if __name__ == "__main__":
    main()
