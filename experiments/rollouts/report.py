"""The tables and the picture of `results.json`."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from experiments.claims import MARKED, by_line, table
from specjax.viz.picture import Picture

HERE = Path(__file__).resolve().parent
Report = Mapping[str, Any]


def timed_rows(report: Report) -> list[Any]:
    """The updates after those in which programs were compiled."""
    return report["rows"][report["untimed"] :]


def mean(rows: list[Any], name: str, figure: str) -> float:
    """Of a decoder."""
    return float(np.mean([row["decoders"][name][figure] for row in rows]))


def over_time(report: Report) -> Iterator[str]:
    """Rewards, and seconds of a rollout, in quarters of the run."""
    rows, names = timed_rows(report), list(report["rows"][0]["decoders"])
    lines = []
    for at in np.array_split(np.arange(len(rows)), min(4, len(rows))):
        own = [rows[i] for i in at]
        seconds = [f"{mean(own, name, 'seconds'):.2f}" for name in names]
        tokens = [f"{mean(own, name, 'tokens_per_step'):.2f}" for name in names[1:]]
        reward = np.mean([row["reward"] for row in own])
        lines.append([f"{own[0]['update']} to {own[-1]['update']}", f"{reward:.3f}", *seconds, *tokens])
    head = ["updates", "reward", *(f"{name}: seconds" for name in names)]
    yield from table([*head, *(f"{name}: tokens per step" for name in names[1:])], lines)


def by_decoder(report: Report) -> Iterator[str]:
    """The decoders side by side, over all timed updates."""
    rows, lines = timed_rows(report), []
    total = {name: mean(rows, name, "seconds") * len(rows) for name in rows[0]["decoders"]}
    texts = len(rows) * report["sizes"]["prompts"] * report["sizes"]["group"]
    for name, seconds in total.items():
        figures = [f"{mean(rows, name, 'passes'):.1f}", f"{mean(rows, name, 'tokens_per_step'):.2f}"]
        other = sum(row["decoders"][name]["other_texts"] for row in rows)
        lines.append([name, f"{seconds:.1f}", f"{total['plain'] / seconds:.2f}", *figures, f"{other} of {texts:,}"])
    head = ["decoder", "seconds of rollouts", "plain's over these", "passes of a rollout", "tokens per step"]
    yield from table([*head, "texts unlike plain's"], lines)


def learning(report: Report) -> str:
    """The held-out answers, with a paired 95% interval, and what learning cost."""
    before, after = (np.asarray(report["held_out"][name], float) for name in ("before", "after"))
    change = after - before
    wide = 1.96 * change.std() / len(change) ** 0.5
    rows = timed_rows(report)
    updates, refreshes = (sum(row.get(f"{name}_seconds", 0.0) for row in rows) for name in ("update", "refresh"))
    return (
        f"Of {len(change)} held-out questions {before.mean():.1%} were answered before and {after.mean():.1%} after:"
        f" {100 * change.mean():+.1f} points, 95% interval {100 * (change.mean() - wide):+.1f} to"
        f" {100 * (change.mean() + wide):+.1f}. Updates took {updates:.1f} s, refreshes of the head {refreshes:.1f} s."
    )


def written(page: str, report: Report) -> str:
    """A page with the tables of a report between its marks."""
    own = [learning(report), "", *by_decoder(report), "", *over_time(report)]
    return MARKED.sub(lambda _: "\n".join(["<!-- measured -->", "", *own, "", "<!-- end -->"]), page)


def picture(report: Report) -> Picture:
    """The reward, and the seconds of each decoder's rollouts; a point for as many updates as lie between refreshes."""
    figure, rows = Picture(7.2, 5.0), timed_rows(report)
    above, below = figure.subplots(2, 1, sharex=True)
    parts = [rows[i : i + report["sizes"]["every"]] for i in range(0, len(rows), report["sizes"]["every"])]
    at = [np.mean([row["update"] for row in part]) for part in parts]
    above.plot(at, [np.mean([row["reward"] for row in part]) for part in parts], "o-", color="0.2")
    above.set_ylabel("reward")
    for name in rows[0]["decoders"]:
        below.plot(at, [mean(part, name, "seconds") for part in parts], "o-", label=name)
    below.set(ylabel="seconds of a rollout", xlabel="update", ylim=(0, None))
    figure.legend(*below.get_legend_handles_labels(), loc="outside upper center", ncols=4, frameon=False)
    return figure


def finish(folder: Path, report: Report) -> None:
    """Writes the results, their picture, and their tables where the folder has a page."""
    parts = [f'"{name}": {by_line(value)}' for name, value in report.items()]
    (folder / "results.json").write_text("{\n" + ",\n".join(parts) + "\n}\n")
    shown(folder)


def shown(folder: Path) -> None:
    """Writes the picture and the tables of a folder's results."""
    report, page = json.loads((folder / "results.json").read_text()), folder / "README.md"
    picture(report).savefig(folder / "rollouts.png", dpi=110)
    if page.exists():
        page.write_text(written(page.read_text(), report))
    print(written("<!-- measured --><!-- end -->".replace("><", ">\n<"), report))
