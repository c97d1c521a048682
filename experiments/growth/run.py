"""`python -m experiments.growth.run [AXIS ...]`: what time, memory and compiling cost as each size of the work grows.

Writes `growth.json`, `growth.png` and the table of `README.md`. Axes that are not named keep what `growth.json` has of them.
"""

import dataclasses
import json
import math
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from experiments.growth import jobs, steps
from specjax.serve.options import option
from specjax.terminal import bad_input, run_program
from specjax.viz.picture import Picture

HERE = Path(__file__).resolve().parent
CONSTANT, LINEAR = 0, 1
SHOULD = {CONSTANT: "constant", LINEAR: "linear"}
QUANTITIES = {"seconds": "seconds", "bytes": "memory", "operations": "operations", "compile": "compile seconds"}
Found = dict[str, float]


@dataclasses.dataclass(frozen=True)
class Axis:
    """One size that grows.

    Attributes:
      what: the size, in words.
      points: its values.
      small: few and small values, for a test.
      measure: from a value to quantities by name.
      should: the exponent that each quantity should have at most.
    """

    what: str
    points: tuple[int, ...]
    small: tuple[int, ...]
    measure: Callable[[int], Found]
    should: Mapping[str, int]


def of_step(name: str, what: str, points: tuple[int, ...], small: tuple[int, ...], **others: Any) -> Axis:
    """An axis of `steps.Sizes`. Compiling may grow with the layers alone."""
    should = {"seconds": LINEAR, "bytes": LINEAR, "operations": LINEAR, "compile": CONSTANT}
    should |= {"compile": LINEAR} if name == "layers" else {}
    return Axis(what, points, small, lambda value: steps.measured(steps.Sizes(**{**others, name: value})), should)


def of_job(what: str, points: tuple[int, ...], measure: Callable[[int], Found]) -> Axis:
    """An axis of a job's lines."""
    return Axis(what, points, (4, 8), measure, {"seconds": LINEAR, "bytes": CONSTANT})


def of_devices() -> Axis:
    """Four rows for each device; memory and operations are those of one device, which share the machine's cores."""
    should = {"seconds": LINEAR, "bytes": CONSTANT, "operations": CONSTANT, "compile": CONSTANT}
    measure = lambda value: steps.measured(steps.Sizes(rows=4, devices=value))
    return Axis("devices, 4 rows each", (1, 2, 4, 8), (1, 2), measure, should)


AXES: dict[str, Axis] = {
    "batch": of_step("rows", "rows of a batch", (1, 8, 64, 256), (1, 4), context=512),
    "context": of_step("context", "tokens of context", (128, 1024, 8192, 32768), (64, 128), rows=4),
    "nodes": of_step("nodes", "verified nodes", (1, 4, 16, 64), (1, 4)),
    "vocabulary": of_step("vocabulary", "vocabulary", (1024, 8192, 65536, 262144), (64, 128)),
    "layers": of_step("layers", "layers", (1, 4, 16), (1, 2)),
    "devices": of_devices(),
    "rows": of_job("lines of a job", (10, 100, 1000, 10000, 100000), jobs.job),
    "resume": of_job("lines of a job that goes on", (10, 100, 1000, 10000, 100000), jobs.resumed),
    "text": Axis("tokens of a text", (1000, 4000, 16000, 64000), (100, 200), jobs.text, {"seconds": LINEAR}),
}  # fmt: skip


def exponents(points: Sequence[float], values: Sequence[float]) -> list[float]:
    """The slopes between successive points where both scales are logarithmic: 0 for a constant, 1 for a line.

    >>> exponents([1, 2, 4], [3, 6, 24])
    [1.0, 2.0]
    """
    pairs = zip(zip(points, values, strict=True), zip(points[1:], values[1:], strict=True), strict=False)
    return [round(math.log(y / v) / math.log(x / u), 2) if v and y else 0.0 for (u, v), (x, y) in pairs]


def shown(quantity: str, value: float) -> str:
    """A value with its unit.

    >>> [shown("seconds", 0.0012), shown("bytes", 3 << 20), shown("operations", 2.5e6)]
    ['1.2 ms', '3.0 MiB', '2.5 M']
    """
    if quantity == "bytes":
        return f"{value / 2**20:.1f} MiB" if value >= 2**20 else f"{value / 2**10:.1f} KiB"
    if quantity == "operations":
        return f"{value / 1e6:.1f} M"
    return f"{value:.1f} s" if value >= 1 else f"{1000 * value:.2g} ms"


def table(report: Mapping[str, Any]) -> str:
    """A line for each axis and quantity."""
    head = "| as it grows | | at the ends | exponents between successive points | should be at most |"
    lines = [head, "| --- " * 5 + "|"]
    for name, own in report.items():
        points = own["points"]
        for quantity, should in AXES[name].should.items():
            values = own[quantity]
            ends = f"{shown(quantity, values[0])} to {shown(quantity, values[-1])}"
            slopes = ", ".join(f"{slope:.2f}" for slope in exponents(points, values))
            what = f"{AXES[name].what}, {points[0]:,} to {points[-1]:,}"
            lines.append(f"| {what} | {QUANTITIES[quantity]} | {ends} | {slopes} | {SHOULD[should]} |")
    return "\n".join(lines)


def page(text: str, report: Mapping[str, Any]) -> str:
    """The page with the table of these figures."""
    return re.sub(r"(?<=<!-- measured -->\n\n).*(?=\n\n<!-- end -->)", lambda _: table(report), text, flags=re.DOTALL)


def picture(report: Mapping[str, Any]) -> Picture:
    """A panel for each quantity, with a curve for each axis: how many times the smallest point's value, by how many times
    its size."""
    figure = Picture(13, 4)
    names = [name for name in QUANTITIES if name != "operations"]
    panels = figure.subplots(1, len(names))
    most = max(own["points"][-1] / own["points"][0] for own in report.values())
    for axes, quantity in zip(panels, names, strict=True):
        for index, (name, own) in enumerate(report.items()):
            if quantity in own:
                times = [[value / values[0] for value in values] for values in (own["points"], own[quantity])]
                axes.plot(*times, marker=".", label=name, color=f"C{index}")
        axes.plot([1, most], [1, most], linestyle=":", color="grey", label="linear")
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlabel("times the size")
        axes.set_title(f"{QUANTITIES[quantity]}, times those of the smallest", fontsize=10)
    figure.legend(*panels[0].get_legend_handles_labels(), fontsize=8, loc="outside right upper")
    return figure


def measured(axis: Axis, points: Sequence[int], say: Callable[[str], None] = lambda line: None) -> dict[str, Any]:
    """The quantities at every point, as lists."""
    found = []
    for point in points:
        found.append(axis.measure(point))
        say(f"{axis.what} {point:,}: {', '.join(f'{name} {value:.4g}' for name, value in found[-1].items())}")
    return {"points": list(points), **{name: [own[name] for own in found] for name in found[0]}}


@dataclasses.dataclass(frozen=True, kw_only=True)
class GrowthOptions:
    """See the help of each."""

    axes: tuple[str, ...] = option(
        (), f"of {', '.join(AXES)} (default: all)", metavar="AXIS", nargs="*", positional=True
    )
    small: bool = option(False, "few and small points")
    most: int | None = option(None, "leave larger points out", metavar="N")
    output: str = option(str(HERE), "folder of growth.json, growth.png and README.md", metavar="FOLDER")


def command(options: GrowthOptions) -> int:
    """Measures and writes."""
    with bad_input():
        if unknown := [name for name in options.axes if name not in AXES]:
            raise ValueError(f"there is no axis {unknown[0]!r}: there are {', '.join(AXES)}")
        folder = Path(options.output)
        folder.mkdir(parents=True, exist_ok=True)
    file, readme = folder / "growth.json", folder / "README.md"
    before = json.loads(file.read_text()) if file.exists() else {}
    say = lambda line: print(line, file=sys.stderr, flush=True)
    for name in options.axes or AXES:
        axis = AXES[name]
        points = axis.small if options.small else axis.points
        before[name] = measured(axis, [own for own in points if options.most is None or own <= options.most], say)
        report = {own: before[own] for own in AXES if own in before}
        file.write_text(json.dumps(report, indent=1) + "\n")
    picture(report).savefig(folder / "growth.png", dpi=100)
    if readme.exists():
        readme.write_text(page(readme.read_text(), report))
    print(table(report))
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    about = "What time, memory and compiling cost as each size of the work grows."
    return run_program("python -m experiments.growth.run", about, GrowthOptions, command, argv)


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    jax.config.update("jax_enable_compilation_cache", False)
    sys.exit(main())
