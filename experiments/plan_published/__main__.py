"""Published step times of other systems beside the range of `specjax plan`.

python -m experiments.plan_published           # plans what plans.json lacks, then writes the table of docs/plan.md
python -m experiments.plan_published --show    # prints the table of the files that are there

`published.json` has the figures, each with its source and what was read there. A plan needs the extra `aot` and takes between
ten CPU seconds and some minutes.
"""

import contextlib
import io
import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from specjax import cli
from specjax.sharding.aot import chip_of

HERE = Path(__file__).resolve().parent
PUBLISHED, PLANS = HERE / "published.json", HERE / "plans.json"
PAGE = HERE.parents[1] / "docs" / "plan.md"
MARKED = re.compile(r"<!-- published -->\n.*?<!-- end -->", re.DOTALL)
OPTIONS = ("model", "topology", "weights", "cache_dtype", "batch", "context")
"""Fields of a published figure that are options of the plan beside it."""


def published() -> list[dict[str, Any]]:
    """The figures, in the order of the table."""
    return json.loads(PUBLISHED.read_text())


def plans() -> dict[str, dict[str, float]]:
    """What was planned, by command."""
    return json.loads(PLANS.read_text()) if PLANS.exists() else {}


def step_ms(row: Mapping[str, Any]) -> float:
    """A published step in milliseconds: as it stands, rows over tokens per second, or a text's seconds over its tokens."""
    if "milliseconds" in row:
        return row["milliseconds"]
    return 1e3 * (
        row["batch"] / row["tokens_per_second"] if "tokens_per_second" in row else row["seconds"] / row["tokens"]
    )


def words(row: Mapping[str, Any]) -> list[str]:
    """The command of the plan beside a figure."""
    given = [(name, row[name]) for name in OPTIONS if name in row]
    return [
        "plan",
        *(word for name, value in given for word in (f"--{name.replace('_', '-')}", str(value))),
        "--drafter",
        "none",
    ]


def command(row: Mapping[str, Any]) -> str:
    return "specjax " + " ".join(words(row))


def planned(row: Mapping[str, Any]) -> dict[str, float]:
    """Milliseconds of a step: by a count of bytes alone (`bytes`), at least (`least`) and at most (`most`).

    Raises:
      ValueError: if nothing was compiled: the compiler is missing, or the plan does not fit.
    """
    with contextlib.redirect_stdout(io.StringIO()) as said:
        status = cli.main([*words(row), "--json"])
    record = json.loads(said.getvalue()) if status == 0 else {}
    if "seconds" not in record or not record["fits"]:
        raise ValueError(f"{command(row)} gives no times")
    bandwidth = chip_of(row["topology"]).hbm_bandwidth
    seconds = record["ideal_bytes"] / bandwidth, record["seconds"]["step"], record["serial_seconds"]["step"]
    return {name: float(f"{1e3 * own:.4g}") for name, own in zip(("bytes", "least", "most"), seconds, strict=True)}


def verdict(ms: float, plan: Mapping[str, float]) -> str:
    """Where a published step lies beside the planned range."""
    if ms < plan["least"]:
        return "faster than the bound"
    return "within the range" if ms <= plan["most"] else f"{ms / plan['most']:.1f} times the longest"


def table(rows: Sequence[Mapping[str, Any]], known: Mapping[str, Mapping[str, float]]) -> str:
    """The table in Markdown."""
    head = "model chips weights,_cache batch context system published,_ms bytes_alone plan,_ms published_is"
    names = [name.replace("_", " ") for name in head.split()]
    lines: list[Sequence[str]] = [names, ["---"] * len(names)]
    for row in rows:
        plan, ms = known[command(row)], step_ms(row)
        kinds = ", ".join(row.get(name, "bfloat16") for name in ("weights", "cache_dtype"))
        model, system = row["model"].partition("/")[2], f"[{row['system']}]({row['source']})"
        times = f"{ms:.1f}", f"{plan['bytes']:.1f}", f"{plan['least']:.1f} to {plan['most']:.1f}"
        lines.append(
            (model, row["topology"], kinds, str(row["batch"]), f"{row['context']:,}", system, *times, verdict(ms, plan))
        )
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main(given: Sequence[str]) -> None:
    """Plans what is missing and writes the table, or shows it."""
    rows, known = published(), plans()
    if given:
        print(table(rows, known))
        return
    for row in rows:
        if command(row) not in known:
            known[command(row)] = planned(row)
            print(command(row), known[command(row)], file=sys.stderr, flush=True)
            PLANS.write_text(json.dumps(known, indent=1) + "\n")
    new = f"<!-- published -->\n{table(rows, known)}\n<!-- end -->"
    PAGE.write_text(MARKED.sub(lambda _: new, PAGE.read_text()))


if __name__ == "__main__":
    main(sys.argv[1:])
