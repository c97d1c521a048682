"""Right answers and speed of decoders from the same runs: a folder's `config.toml` says which are asked, this asks them.

python -m experiments.answers FOLDER              # writes results.json, the picture and the tables of README.md
python -m experiments.answers FOLDER --pieces 1   # so many decoders more, and stops
python -m experiments.answers FOLDER --limit 2    # a look with two questions per family; writes nothing
python -m experiments.answers FOLDER --show       # the picture and the tables again, of the results that are there

A decoder is a piece: what is measured is kept, and the next run goes on with the others, unless the config's `[eval]` or the
weights are others now. A config has the options of `specjax eval` in `[eval]`; `[[groups]]`, each with a name, `decoders` as
`specjax eval --compare` takes them, and where they differ options of its own; and `[[pairs]]`, which compare two decoders of
the `[eval]` alone. Of groups with the same options the first decoder of the first one is what the others are compared with.

Speed is tokens per second of CPU time, of all threads, prefill included and compiling not: other work on the machine
counts little.
"""

import argparse
import dataclasses
import json
import math
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from matplotlib.patches import Patch

from experiments.claims import HERE, MARKED, by_line, config_of, interval, samples, table
from specjax import models
from specjax.evaluate.decoders import changed
from specjax.evaluate.options import DecoderOptions, EvalOptions
from specjax.evaluate.run import prepare
from specjax.evaluate.statistics import Paired, paired, verdict, wilson
from specjax.serve.options import take
from specjax.viz.picture import Picture

MARGIN = 1.0
"""Points of accuracy that what is called free may cost at most."""

Row = dict[str, Any]


# ---- what is asked ----------------------------------------------------------------------------------------------------


def pieces(config: Mapping[str, Any]) -> list[tuple[str, dict[str, Any], str]]:
    """Every decoder: its group's name, the group's own options and its line; one of several groups is there for each."""
    return [(own["called"], own.get("eval", {}), line) for own in config["groups"] for line in own["decoders"]]


def key(own: Mapping[str, Any], line: str) -> tuple[str, str]:
    """What tells measured rows apart."""
    return json.dumps(own, sort_keys=True), line


def measured(options: Mapping[str, Any], own: Mapping[str, Any], line: str, model: Any) -> Row:
    """What a decoder answers, and what that took.

    Args:
      options: of the config.
      own: of its group.
      line: of the decoder.
      model: loaded.
    """
    base = EvalOptions(**{"model": model, **options, **own, "families": tuple((options | own).get("families", ()))})
    asked = dataclasses.replace(base, **vars(changed(take(DecoderOptions, vars(base)), line)))
    prepared = prepare(asked)
    contestant = prepared.contestants[0]
    contestant.warm()
    began = time.process_time()
    records, cost = contestant.lap(range(len(prepared.items)), lambda count: None)
    cpu = time.process_time() - began
    pairs = list(zip(prepared.items, records, strict=True))
    return {
        "line": line,
        "eval": dict(own),
        "cpu_seconds": round(cpu, 2),
        "seconds": round(cost.seconds, 2),
        "tokens": [record.new_tokens for record in records],
        "passes": [record.steps for record in records],
        "right": "".join(str(int(record.error is None and item.right(record.text or ""))) for item, record in pairs),
        "families": [item.family for item in prepared.items],
        "texts": "".join(f"{zlib.crc32((record.text or '').encode()):08x}" for record in records),
    }


def digest(params: Any) -> str:
    """Tells weights apart."""
    found = 0
    for leaf in jax.tree.leaves(params):
        found = zlib.crc32(np.asarray(leaf).tobytes(), found)
    return f"{found:08x}"


def run(folder: Path, most: int | None = None, limit: int | None = None) -> dict[str, Any]:
    """The report, with up to so many decoders more; each is saved as it is done, unless a `limit` of questions is given."""
    config = config_of(folder)
    options = config["eval"] | ({} if limit is None else {"limit": limit})
    model = models.load(options["model"])
    settings = {"eval": config["eval"], "weights": digest(model.params)}
    path, report = folder / "results.json", {"settings": settings, "rows": []}
    if limit is None and path.exists():
        before = json.loads(path.read_text())
        report = before if before["settings"] == settings else report
    done = {key(row["eval"], row["line"]) for row in report["rows"]}
    todo = dict.fromkeys(key(own, line) for _, own, line in pieces(config))
    wanted = [each for each in todo if each not in done]
    for number, (own, line) in enumerate(wanted[:most]):
        print(f"{number + 1} of {len(wanted)}: {line} {own if own != '{}' else ''}", flush=True)
        given = json.loads(own) | ({} if limit is None else {"limit": limit})
        report["rows"].append(measured(options, given, line, model) | {"eval": json.loads(own)})
        if limit is None:
            path.write_text(written(report))
        jax.clear_caches()  # many programs
    return report


def written(report: Mapping[str, Any]) -> str:
    """JSON, a line per row."""
    return "{\n" + ",\n".join(f'"{name}": {by_line(value)}' for name, value in report.items()) + "\n}\n"


# ---- what follows from it ---------------------------------------------------------------------------------------------


def bits(row: Row) -> np.ndarray:
    """`[Q]`, 1.0 where an answer is right."""
    return np.asarray([float(bit) for bit in row["right"]])


def speed(row: Row) -> float:
    """Tokens a second of CPU time."""
    return sum(row["tokens"]) / max(row["cpu_seconds"], 1e-9)


def texts(row: Row) -> list[str]:
    """What tells the answers' texts apart."""
    return [row["texts"][at : at + 8] for at in range(0, len(row["texts"]), 8)]


def same(one: Row, other: Row) -> int:
    """How many answers have the same text."""
    return sum(a == b for a, b in zip(texts(one), texts(other), strict=True))


def needed(found: Paired, count: int) -> int:
    """Questions of which the paired interval reaches one point to each side, where so many of them are discordant."""
    return math.ceil((1.96 / 0.01) ** 2 * (found.better + found.worse) / count)


def said(row: Row, first: Row) -> tuple[Paired, str]:
    """How a decoder differs from another on the same questions, and the words for it."""
    found, count = paired(bits(first), bits(row)), len(row["right"])
    words = verdict(found, same(first, row) == count, MARGIN)
    if words.startswith("not resolved") and (more := needed(found, count)) > count:
        words += f"; ask {more}"
    return found, words


def grouped(config: Mapping[str, Any], report: Mapping[str, Any]) -> Iterator[tuple[str, Row | None, list[Row]]]:
    """The measured rows of every group, and the one that they are compared with."""
    known = {key(row["eval"], row["line"]): row for row in report["rows"]}
    firsts: dict[str, Row | None] = {}
    for group in config["groups"]:
        keys = [key(group.get("eval", {}), line) for line in group["decoders"]]
        first = firsts.setdefault(keys[0][0], known.get(keys[0]))
        yield group["called"], first, [known[each] for each in keys if each in known]


def between(pair: Mapping[str, str], report: Mapping[str, Any]) -> Row | None:
    """How many passes and tokens per second one decoder has against another; None where one is not measured yet."""
    rows = {row["line"]: row for row in report["rows"] if not row["eval"]}
    one, other = (rows.get(pair[side]) for side in ("of", "against"))
    if one is None or other is None:
        return None
    low, high = interval(np.sum(samples(other["passes"]), axis=1) / np.sum(samples(one["passes"]), axis=1))
    found, words = said(one, other)
    return {
        "passes": sum(other["passes"]) / sum(one["passes"]), "low": low, "high": high, "speed": speed(one) / speed(other),
        "points": found, "same": same(one, other), "verdict": words,
    }  # fmt: skip


# ---- what is said of it -----------------------------------------------------------------------------------------------


def percent(row: Row) -> str:
    low, high = wilson(bits(row))
    return f"{100 * np.mean(bits(row)):.1f}% ({100 * low:.1f} to {100 * high:.1f})"


def points(found: Paired) -> str:
    return f"{100 * found.difference:+.1f} ({100 * found.low:+.1f} to {100 * found.high:+.1f})"


def tables(config: Mapping[str, Any], report: Mapping[str, Any]) -> Iterator[str]:
    """The tables of a README: one per group, and one of pairs."""
    head = ["decoder", "right (95%)", "tokens per pass", "passes", "tokens/s", "ratio", "points (95%)", "verdict"]
    for called, first, rows in grouped(config, report):
        if not rows:
            continue
        lines = []
        for row in rows:
            cells = [f"`{row['line']}`", percent(row), f"{sum(row['tokens']) / sum(row['passes']):.2f}"]
            cells += [f"{np.mean(row['passes']):.1f}", f"{speed(row):.1f}"]
            if first is None or row is first:
                lines.append([*cells, "1.00" if row is first else "", "", ""])
                continue
            found, words = said(row, first)
            lines.append([*cells, f"{speed(row) / speed(first):.2f}", points(found), words])
        yield f"{called}, {len(rows[0]['right'])} questions:"
        yield ""
        yield from table(head, lines)
        yield ""
    lines = []
    for pair in config.get("pairs", []):
        if (found := between(pair, report)) is not None:
            cells = [f"`{pair['of']}`", f"`{pair['against']}`", f"{found['passes']:.2f}"]
            cells += [f"{found['low']:.2f} to {found['high']:.2f}", f"{found['speed']:.2f}", points(found["points"])]
            lines.append([*cells, f"{found['same']}/{len(report['rows'][0]['right'])}", found["verdict"]])
    if lines:
        head = ["decoder", "against", "times fewer passes", "95%", "tokens/s", "points (95%)", "same text", "verdict"]
        yield from table(head, lines)
        yield ""


def page(text: str, config: Mapping[str, Any], report: Mapping[str, Any], name: str) -> str:
    """A page with the tables of a report and the folder's picture between its marks."""
    lines = [
        "<!-- measured -->",
        "",
        *tables(config, report),
        f"![right answers and speed]({name}.png)",
        "",
        "<!-- end -->",
    ]
    return MARKED.sub(lambda _: "\n".join(lines), text)


def best(rows: Sequence[Row]) -> list[Row]:
    """Those that no other is both faster than and as often right, the fastest first."""
    found: list[Row] = []
    for row in sorted(rows, key=speed, reverse=True):
        if not found or np.mean(bits(row)) > np.mean(bits(found[-1])):
            found.append(row)
    return found


def picture(config: Mapping[str, Any], report: Mapping[str, Any]) -> Picture:
    """Tokens a second and right answers, a line per decoder, the fastest on top; two panels for each kind of question.

    In bold is the Pareto front: no other decoder is both faster and as often right.
    """
    kinds: dict[str, list[tuple[int, Row]]] = {}
    groups = list(zip(grouped(config, report), config["groups"], strict=True))
    for index, ((_, _, rows), group) in enumerate(groups):
        kinds.setdefault(json.dumps(group.get("eval", {}), sort_keys=True), []).extend((index, row) for row in rows)
    kinds = {own: sorted(rows, key=lambda pair: speed(pair[1])) for own, rows in kinds.items() if rows}
    heights = [1.2 + 0.18 * len(rows) for rows in kinds.values()]
    figure = Picture(11, 0.3 + 0.2 * len(groups) + sum(heights))
    panels = figure.subplots(len(kinds), 2, squeeze=False, sharey="row", height_ratios=heights)
    for (fast, right), pairs in zip(panels, kinds.values(), strict=True):
        rows, at = [row for _, row in pairs], np.arange(len(pairs))
        colours, front = [f"C{index}" for index, _ in pairs], best(rows)
        fast.barh(at, [speed(row) for row in rows], color=colours, height=0.7)
        fast.set_yticks(at, [row["line"] for row in rows], fontsize=7)
        for label, row in zip(fast.get_yticklabels(), rows, strict=True):
            label.set_fontweight("bold" if any(row is one for one in front) else "normal")
        low, high = 100 * np.asarray([wilson(bits(row)) for row in rows]).T
        right.hlines(at, low, high, colors=colours, linewidth=1)
        right.scatter([100 * np.mean(bits(row)) for row in rows], at, c=colours, s=16, zorder=3)
        right.tick_params(axis="y", left=False, labelleft=False)
        right.grid(alpha=0.3)
        fast.margins(y=0.02)
        fast.set_title(f"{len(rows[0]['right'])} questions", fontsize=9)
        fast.set_xlabel("tokens per second of CPU time")
        right.set_xlabel("right answers, % (bars: 95%)")
    handles = [Patch(color=f"C{index}", label=called) for index, ((called, _, rows), _) in enumerate(groups) if rows]
    title = "bold: none is both faster and as often right"
    figure.legend(handles=handles, title=title, fontsize=8, title_fontsize=8, loc="outside lower center")
    return figure


def shown(folder: Path) -> None:
    """The picture and the page again, of the results that are there."""
    config, report = config_of(folder), json.loads((folder / "results.json").read_text())
    picture(config, report).savefig(folder / f"{folder.name}.png", dpi=110)
    readme = folder / "README.md"
    readme.write_text(page(readme.read_text(), config, report, folder.name))
    print("\n".join(tables(config, report)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", help="of experiments")
    parser.add_argument("--pieces", type=int, help="measure at most so many decoders")
    parser.add_argument("--limit", type=int, help="questions per family, for a look; nothing is written")
    parser.add_argument("--show", action="store_true", help="measure nothing")
    asked = parser.parse_args()
    folder = HERE / asked.folder
    if not asked.show:
        report = run(folder, asked.pieces, asked.limit)
        if asked.limit is not None:
            return print("\n".join(tables(config_of(folder), report)))
    shown(folder)


if __name__ == "__main__":
    main()
