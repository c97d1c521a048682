"""Claims of papers on the shipped models: a folder's `config.toml` says which decoders are asked, this asks them.

python -m experiments.claims FOLDER           # of this one; writes results.json, the picture and the tables of README.md
python -m experiments.claims FOLDER --show    # the picture and the tables again, of the results that are there

All decoders of a run answer the same held-out questions, in rounds that alternate between them (`specjax bench`). A config has
the options of `specjax bench`, which `[[runs]]` may change; `[[decoders]]`, each with a drafter's `line` and what it is called
by; and `[[pairs]]`, which ask how many more tokens per step one has than another. Seconds are those that the process
itself had the processor for: other work on the machine hardly changes them.
"""

import argparse
import dataclasses
import json
import re
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from specjax.bench.command import prepare
from specjax.bench.options import BenchOptions
from specjax.bench.run import Lap, Ours, measure, summarise
from specjax.serve.engine import Engine
from specjax.tasks import FAMILIES
from specjax.viz.picture import Picture

HERE = Path(__file__).resolve().parent
MARKED = re.compile(r"<!-- measured -->\n.*?<!-- end -->", re.DOTALL)
RESAMPLED = 2000
"""Draws of as many questions, with replacement, that the intervals of 95% are of."""
FIGURES = ("line", "nodes", "tokens_per_step", "low", "high", "tokens_per_second", "ratio_to_plain", "step_ratio")
FIGURES += ("identical_text", "acceptance_by_depth", "families")
"""What a row measures; whatever else it has says what it is."""

Drafters = Callable[[Any], Mapping[str, Any]]


@dataclasses.dataclass(frozen=True)
class OwnSeconds:
    """A contestant whose seconds are those of all of this process's threads."""

    contestant: Ours

    def warm(self) -> None:
        self.contestant.warm()

    def lap(self) -> Lap:
        began = time.process_time()
        lap = self.contestant.lap()
        seconds = time.process_time() - began
        return dataclasses.replace(lap, seconds=seconds, decode_seconds=lap.decode_seconds * seconds / lap.seconds)


# ---- what is asked ----------------------------------------------------------------------------------------------------


def config_of(folder: Path) -> dict[str, Any]:
    return tomllib.loads((folder / "config.toml").read_text())


def run(config: Mapping[str, Any], made: Drafters = lambda model: {}) -> dict[str, Any]:
    """The report of a config.

    Args:
      config: see this file's beginning.
      made: makes drafters (each with its parameters) that no line names, of the target; by what the config calls their line.
    """
    rows, pairs = [], []
    for own in config.get("runs", [{}]):
        words = own.pop("called", {})
        options = BenchOptions(**config.get("options", {}) | own)
        found, between = compared(options, config["decoders"], config.get("pairs", []), made)
        rows += [words | row for row in found]
        pairs += [words | pair for pair in between]
    return {"options": config.get("options", {}), "rows": rows, "pairs": pairs}


def compared(
    options: BenchOptions, decoders: Sequence[Mapping[str, Any]], pairs: Sequence[Mapping[str, str]], made: Drafters
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Rows and pairs of one run of `specjax bench`; plain decoding is the first row."""
    contestants, own = contestants_of(options, [row["line"] for row in decoders], made)
    timed = {name: OwnSeconds(contestant) for name, contestant in contestants.items()}
    laps = measure(timed, options.repeats, lambda name: print(".", end="", flush=True))
    print()
    said = {row.decoder: row for row in summarise(laps, {}, "").rows}
    named = {"none": {"decoder": "none"}} | {
        row["line"]: {k: v for k, v in row.items() if k != "line"} for row in decoders
    }
    rows = []
    for line, words in named.items():
        row, lap = dataclasses.asdict(said[line]), laps[line][0]
        low, high = interval(lap.count / np.sum(samples(lap.each), axis=1) * rescaled(lap))
        found = {"nodes": contestants[line].engine.decoder.drafter.nodes, "low": low, "high": high}
        found["families"] = by_family(lap, options)
        del row["decoder"]
        rows.append({"decoder": line.partition(":")[0]} | words | {"line": line} | row | found)
    return rows, [paired(pair, {label(row): laps[row["line"]][0] for row in rows}) for pair in pairs]


def contestants_of(
    options: BenchOptions, lines: Sequence[str], made: Drafters
) -> tuple[dict[str, Ours], dict[str, Any]]:
    """Plain decoding, the lines that the registry knows, and those that are made."""
    plain = prepare(dataclasses.replace(options, drafter=("none",)))[0]["none"]
    own = dict(made(plain.engine.model))
    known = tuple(line for line in lines if line not in own)
    contestants = prepare(dataclasses.replace(options, drafter=known))[0] if known else {"none": plain}
    for line in lines:
        if line in own:
            engine = Engine(plain.engine.model, drafter=own[line])
            contestants[line] = dataclasses.replace(plain, engine=engine, capacity=engine.capacity(plain.requests))
    return contestants, own


def label(row: Mapping[str, Any]) -> str:
    """What a row is called, in a word for each thing that it says of itself.

    >>> label({"decoder": "medusa", "tree": "2 | 1", "nodes": 4})
    'medusa 2 | 1'
    """
    return " ".join(str(value) for name, value in row.items() if name not in FIGURES)


# ---- what follows from it ---------------------------------------------------------------------------------------------


def samples(each: Sequence[Any]) -> np.ndarray:
    """`[RESAMPLED, M]`: figures of M questions, drawn with replacement, the same questions for every decoder."""
    values = np.asarray(each, float)
    return values[np.random.default_rng(0).integers(0, len(values), (RESAMPLED, len(values)))]


def rescaled(lap: Lap) -> np.ndarray:
    """How many tokens the drawn questions have, over those of all of them."""
    return np.sum(samples([len(row) for row in lap.tokens]), axis=1) / lap.count


def interval(values: np.ndarray) -> tuple[float, float]:
    low, high = np.quantile(values, (0.025, 0.975))
    return round(float(low), 4), round(float(high), 4)


def paired(pair: Mapping[str, str], laps: Mapping[str, Lap]) -> dict[str, Any]:
    """Tokens a step of one decoder over those of another on the same questions, whose texts are the same."""
    one, other = (laps[pair[name]] for name in ("of", "against"))
    ratio = rescaled(one) / rescaled(other) * one.count / other.count
    ratio = ratio * np.sum(samples(other.each), axis=1) / np.sum(samples(one.each), axis=1)
    low, high = interval(ratio)
    middle = one.count / one.steps / (other.count / other.steps)
    return {**pair, "ratio": round(middle, 4), "low": low, "high": high}


def by_family(lap: Lap, options: BenchOptions) -> dict[str, float]:
    """Tokens a step of each family's questions, which take turns."""
    families = options.tasks.split(",") if options.tasks else list(FAMILIES)
    found = {}
    for at, family in enumerate(families):
        steps = sum(lap.each[at :: len(families)])
        if steps:
            found[family] = round(sum(map(len, lap.tokens[at :: len(families)])) / steps, 4)
    return found


# ---- what is said of it -----------------------------------------------------------------------------------------------


def table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> Iterator[str]:
    """Markdown."""
    for row in (head, ["---"] * len(head), *rows):
        yield "| " + " | ".join(str(cell).replace("|", "\\|") for cell in row) + " |"


def tables(report: Mapping[str, Any], show: Mapping[str, Any]) -> Iterator[str]:
    """The tables of a README.

    Args:
      report: of `run`.
      show: of the config: whether `speed`, `families` and `depths` are shown too.
    """
    rows = report["rows"]
    words = list(dict.fromkeys(name for row in rows for name in row if name not in FIGURES))
    head = [*words, "nodes", "tokens per step", "95%"]
    head += ["ratio to plain", "step ratio"] if show.get("speed") else []
    head += ["accepted at least 1, 2, 3 ..."] if show.get("depths", True) else []
    lines = []
    for row in rows:
        cells = [row.get(word, "") for word in words] + [row["nodes"], f"{row['tokens_per_step']:.2f}"]
        cells += [f"{row['low']:.2f} to {row['high']:.2f}"]
        cells += [f"{row['ratio_to_plain']:.2f}", f"{row['step_ratio']:.2f}"] if show.get("speed") else []
        depths = " ".join(f"{share:.2f}" for share in row["acceptance_by_depth"])
        lines.append(cells + ([depths] if show.get("depths", True) else []))
    yield from table(head, lines)
    if report["pairs"]:
        yield ""
        first = [name for name in report["pairs"][0] if name not in ("of", "against", "ratio", "low", "high")]
        yield from table(
            [*first, "tokens per step of", "over those of", "ratio", "95%"],
            [
                [
                    *(pair[name] for name in first), pair["of"], pair["against"], f"{pair['ratio']:.3f}",
                    f"{pair['low']:.3f} to {pair['high']:.3f}",
                ]
                for pair in report["pairs"]
            ],
        )  # fmt: skip
    if show.get("families"):
        yield ""
        families = list(rows[0]["families"])
        mine = [row for row in rows if row["decoder"] != "none"]
        yield from table(
            ["family", *(label(row) for row in mine)],
            [[name, *(f"{row['families'][name]:.2f}" for row in mine)] for name in families],
        )


def written(page: str, report: Mapping[str, Any], show: Mapping[str, Any]) -> str:
    """A page with the tables of a report between its marks."""
    return MARKED.sub(lambda _: "\n".join(["<!-- measured -->", "", *tables(report, show), "", "<!-- end -->"]), page)


def picture(report: Mapping[str, Any], show: Mapping[str, Any], path: Path) -> None:
    """Tokens a step with their intervals, and where they are asked for those of each family beside."""
    rows = [row for row in report["rows"] if row["decoder"] != "none"]
    if "x" in show:
        return lines(rows, show, path)
    figure = Picture(14 if show.get("families") else 7, max(1.2 + 0.34 * len(rows), 3 * ("families" in show)))
    panels = figure.subplots(1, 2 if show.get("families") else 1, squeeze=False)[0]
    at = np.arange(len(rows))[::-1]
    middle = np.asarray([row["tokens_per_step"] for row in rows])
    sides = np.asarray([[row["tokens_per_step"] - row["low"], row["high"] - row["tokens_per_step"]] for row in rows]).T
    panels[0].barh(at, middle, xerr=np.abs(sides), color="#a9cce3", ecolor="#555555", capsize=2)
    panels[0].set_yticks(at, [label(row) for row in rows], fontsize=8)
    panels[0].set_xlabel("tokens per step (bars: 95% over questions)")
    panels[0].set_xlim(left=1)
    if show.get("families"):
        families = list(rows[0]["families"])
        for row in rows:
            panels[1].plot(families, [row["families"][name] for name in families], "o", label=label(row))
        panels[1].set_ylabel("tokens per step")
        panels[1].tick_params(axis="x", rotation=45)
        panels[1].legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.01, 1))
    figure.savefig(str(path), dpi=110)


def lines(rows: Sequence[Mapping[str, Any]], show: Mapping[str, Any], path: Path) -> None:
    """A line for each `by`, over `x`, a panel for each of the figures `y`."""
    figures = show.get("y", ["tokens_per_step"])
    figure = Picture(5.5 * len(figures), 4)
    for axes, what in zip(figure.subplots(1, len(figures), squeeze=False)[0], figures, strict=True):
        for name in dict.fromkeys(row[show["by"]] for row in rows):
            mine = [row for row in rows if row[show["by"]] == name]
            x = [row[show["x"]] for row in mine]
            axes.plot(x, [row[what] for row in mine], "o-", label=str(name))
            if what == "tokens_per_step":
                axes.fill_between(x, [row["low"] for row in mine], [row["high"] for row in mine], alpha=0.15)
        if show.get("log", True):
            axes.set_xscale("log", base=2)
            ticks = sorted({row[show["x"]] for row in rows})
            axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.set_xlabel(show["x"])
        axes.set_ylabel(what.replace("_per_", " a ").replace("_", " "))
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8, title=show["by"])
    figure.savefig(str(path), dpi=110)


def finish(folder: Path, report: Mapping[str, Any], show: Mapping[str, Any]) -> None:
    """Writes the results, their picture, and their tables where the folder has a page."""
    parts = [f'"{name}": {by_line(value)}' for name, value in report.items()]
    (folder / "results.json").write_text("{\n" + ",\n".join(parts) + "\n}\n")
    shown(folder, show)


def by_line(value: Any) -> str:
    """JSON, the entries of a list a line each.

    >>> by_line([{"a": 1}, 2])
    '[\\n{"a": 1},\\n2\\n]'
    """
    return "[\n" + ",\n".join(map(json.dumps, value)) + "\n]" if isinstance(value, list) else json.dumps(value)


def shown(folder: Path, show: Mapping[str, Any]) -> None:
    report = json.loads((folder / "results.json").read_text())
    picture(report, show, folder / f"{folder.name}.png")
    page = folder / "README.md"
    if page.exists():
        page.write_text(written(page.read_text(), report, show))
    print("\n".join(tables(report, show)))


def main(folder: Path | None = None, made: Drafters = lambda model: {}) -> None:
    """The command line of a folder, or where none is given of any."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    if folder is None:
        parser.add_argument("folder", help="of experiments")
    parser.add_argument("--show", action="store_true", help="measure nothing")
    asked = parser.parse_args()
    folder = HERE / asked.folder if folder is None else folder
    config = config_of(folder)
    if asked.show:
        return shown(folder, config.get("show", {}))
    finish(folder, run(config, made), config.get("show", {}))


if __name__ == "__main__":
    main()
