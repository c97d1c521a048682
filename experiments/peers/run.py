"""Our decoders beside transformers and llama.cpp: `OMP_NUM_THREADS=1 taskset -c 0 python experiments/peers/run.py`.

Each file is one `specjax bench`, whose contestants take turns in one process and on one core; beside the seconds on the wall it
holds those that the process had the core for. `--show` draws and tabulates the files that are there.
"""

import argparse
import dataclasses
import importlib.metadata
import json
import re
import statistics
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from specjax import score
from specjax.bench.command import prepare
from specjax.bench.options import BenchOptions
from specjax.bench.run import Lap, measure, summarise
from specjax.viz.picture import Picture

HERE = Path(__file__).resolve().parent
MARKED = re.compile(r"<!-- measured -->\n.*?<!-- end -->", re.DOTALL)
SURE = "draft:expander=early_stop,length=11,threshold=0.3"
USUAL = {"model": "tiny", "dtype": "float32", "peer": ("transformers,llama.cpp",), "drafter": ("draft", SURE, "eagle3")}
RUNS = {
    "batch_1": {"batch_size": 1, "prompts": 10, "repeats": 3},
    "batch_1_wide": {"batch_size": 1, "prompts": 5, "repeats": 3, "widen": 4},
    "batch_8": {"batch_size": 8, "prompts": 16, "repeats": 3},
    "batch_8_wide": {"batch_size": 8, "prompts": 8, "repeats": 2, "widen": 4},
}
TITLES = {
    "batch_1": "One row, the shipped size",
    "batch_1_wide": "One row, four times as wide",
    "batch_8": "Eight rows, the shipped size",
    "batch_8_wide": "Eight rows, four times as wide",
}
PACKAGES = ("jax", "torch", "transformers", "llama-cpp-python")


@dataclasses.dataclass
class Clocked:
    """A contestant whose laps are timed by the seconds of all of this process's threads as well."""

    contestant: Any
    speeds: list[float] = dataclasses.field(default_factory=list)

    def warm(self) -> None:
        self.contestant.warm()

    def lap(self) -> Lap:
        began = time.process_time()
        lap = self.contestant.lap()
        self.speeds.append(lap.count / (time.process_time() - began))
        return lap


def compare(name: str) -> dict[str, Any]:
    """One file."""
    options = BenchOptions(**USUAL, **RUNS[name])
    contestants, peers, about, _ = prepare(options)
    clocked = {who: Clocked(contestant) for who, contestant in contestants.items()}
    laps = measure(clocked, options.repeats, lambda who: print(name, who, flush=True))
    found = summarise(laps, peers, about).to_json()
    named = [row["decoder"] for row in found["rows"]] + [f"{row['peer']} {row['mode']}" for row in found["peers"]]
    plain = clocked[named[0]].contestant
    for row, who in zip(found["rows"] + found["peers"], named, strict=True):
        row["tokens_per_cpu_second"] = round(statistics.median(clocked[who].speeds), 2)
        row["gaps"] = gaps(plain.engine.model, plain.requests, laps[named[0]][0].tokens, laps[who][0].tokens)
    return {"about": about, "options": RUNS[name], "versions": versions()} | found


def gaps(model: Any, requests: list[Any], texts: list[list[int]], others: list[list[int]]) -> list[float]:
    """For every text that is another one, by how many nats the model prefers its own token to the other's where they part."""
    found = []
    for request, text, other in zip(requests, texts, others, strict=True):
        at = next((i for i, pair in enumerate(zip(text, other, strict=False)) if pair[0] != pair[1]), None)
        if at is not None:
            before = [*request.ids, *text[:at]]
            own, theirs = score(model, [before, before], [[text[at]], [other[at]]])
            found.append(round(own.logprob - theirs.logprob, 5))
    return found


def versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:  # one that was put beside others without its records
            found[package] = getattr(__import__("llama_cpp"), "__version__", "?")
    return found


def report(name: str) -> dict[str, Any]:
    return json.loads((HERE / f"{name}.json").read_text())


def contestants_of(found: Mapping[str, Any], clock: str = "tokens_per_cpu_second") -> list[dict[str, Any]]:
    """Ours and the peers' modes, with their speed over that of each peer's fastest mode and over our plain decoding."""
    plain, best = found["rows"][0][clock], {}
    for peer in found["peers"]:
        best[peer["peer"]] = max(best.get(peer["peer"], 0.0), peer[clock])
    rows = [{"name": f"`{row['decoder']}`", "ours": True} | row for row in found["rows"]]
    rows += [{"name": f"{row['peer']}, {row['mode']}", "ours": False} | row for row in found["peers"]]
    over = {"our plain decoding": plain} | {f"{peer}'s best": speed for peer, speed in best.items()}
    return [row | {"over": {who: row[clock] / speed for who, speed in over.items()}} for row in rows]


def tables() -> Iterator[str]:
    """A table a file: ratios by the core's seconds, and in brackets by those on the wall."""
    for name, title in TITLES.items():
        if not (HERE / f"{name}.json").exists():
            continue
        rows, wall = contestants_of(report(name)), contestants_of(report(name), "tokens_per_second")
        yield f"\n{title}, {report(name)['options']['prompts']} questions (`{name}.json`):\n"
        heads = ["decoder", "tokens per step", *(f"over {who}" for who in rows[0]["over"]), "plain's text"]
        yield "| " + " | ".join(heads) + " |"
        yield "| " + " | ".join(["---"] * len(heads)) + " |"
        for row, other in zip(rows, wall, strict=True):
            steps = f"{row['tokens_per_step']:.2f}" if row["ours"] else ""
            over = [f"{ratio:.2f} ({other['over'][who]:.2f})" for who, ratio in row["over"].items()]
            yield "| " + " | ".join([row["name"], steps, *over, said(row["gaps"])]) + " |"


def said(gaps: list[float]) -> str:
    """Whether texts are plain decoding's, in a word or two.

    >>> said([]), said([0.0001])
    ('yes', 'but for 1, by 0.0001 nats')
    """
    return f"but for {len(gaps)}, by {max(gaps)} nats" if gaps else "yes"


def written(page: str) -> str:
    return MARKED.sub(lambda _: "\n".join(["<!-- measured -->", *tables(), "", "<!-- end -->"]), page)


def picture(path: Path) -> None:
    """A panel a file: every contestant's speed over our plain decoding."""
    names = [name for name in TITLES if (HERE / f"{name}.json").exists()]
    figure = Picture(3.4 * len(names) + 2.5, 3.6)
    panels = figure.subplots(1, len(names), squeeze=False, sharey=True)[0]
    everyone = {row["name"]: None for name in names for row in contestants_of(report(name))}
    places = {who: place for place, who in enumerate(everyone)}
    for axes, name in zip(panels, names, strict=True):
        for row in contestants_of(report(name)):
            colour = "#2e7d32" if row["ours"] else "#a9cce3"
            axes.barh(places[row["name"]], row["over"]["our plain decoding"], color=colour)
        axes.axvline(1, color="grey", linewidth=0.8)
        axes.set_title(TITLES[name], fontsize=9)
        axes.set_xlabel("speed over our plain decoding")
    labels = [who.strip("`").replace(SURE, "draft, while it is sure") for who in places]
    panels[0].set_yticks(list(places.values()), labels, fontsize=8)
    panels[0].invert_yaxis()
    figure.savefig(str(path), dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="*", metavar="RUN", help=f"of {', '.join(RUNS)} (default: all)")
    parser.add_argument("--show", action="store_true", help="measure nothing")
    asked = parser.parse_args()
    for name in [] if asked.show else asked.runs or RUNS:
        (HERE / f"{name}.json").write_text(json.dumps(compare(name), indent=1) + "\n")
    picture(HERE / "peers.png")
    page = HERE / "README.md"
    if page.exists():
        page.write_text(written(page.read_text()))
    print("\n".join(tables()))


if __name__ == "__main__":
    main()
