"""Spec-Bench on SmolLM2 beside transformers and llama.cpp: `python -m experiments.smollm2.spec --input question.jsonl`.

Each file is what one `specjax bench spec` printed, whose contestants answer the same turns in turn in one process. `--show`
draws and tabulates the files that are there, and the curves of training.
"""

import argparse
import json
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from experiments.smollm2.page import HERE, filled, keep, report, show, table
from specjax.bench.spec import TASKS, label, overview
from specjax.viz.picture import Picture

DEPTHS = "", "_2", "_3"
UNTRAINED = "prompt_lookup,suffix,sam,ngram_mod,iad,aded,token_recycling,stand,lookahead"
TRAINED = "draft,medusa,eagle3"
RUNS = {
    "peers": "--samples 2 --max-new-tokens 64 --drafter prompt_lookup,eagle3 --peer transformers,llama.cpp",
    "one_row": f"--samples 2 --max-new-tokens 64 --drafter {UNTRAINED},{TRAINED} --peer transformers,llama.cpp",
    "eight_rows": f"--samples 8 --max-new-tokens 64 --batch-size 8 --drafter prompt_lookup,suffix,{TRAINED} "
    "--peer transformers",
    "sampled": f"--samples 2 --max-new-tokens 64 --temperature 1 --drafter prompt_lookup,{TRAINED}",
}
TITLES = {
    "peers": "One row, greedy, nothing beside",
    "one_row": "One row, greedy, every drafter",
    "eight_rows": "Eight rows, greedy",
    "sampled": "One row, temperature 1",
}
SHIPPED = ("eagle3", "draft", "medusa")
HEADS = (*SHIPPED, "fspad")


def measured(asked: Sequence[str], questions: Path) -> dict[str, Any]:
    """What `specjax bench spec` prints with these words, and the command."""
    words = ["bench", "spec", "--model", "smollm2", "--dtype", "float32", "--repeats", "1", "--json", *asked]
    said = shlex.join(("specjax", *words))
    print("$", said, flush=True)
    command = [sys.executable, "-m", "specjax", *words, "--input", str(questions)]
    found = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return {"command": said, **json.loads(found)}


def there() -> list[str]:
    """The files that are there."""
    return [name for name in RUNS if (HERE / f"{name}.json").exists()]


def by_task(name: str) -> Iterator[tuple[str, ...]]:
    """Tokens per step, and in brackets the ratio to plain decoding, by task."""
    yield "decoder", *(task.replace("_", " ") for task in TASKS)
    for row in report(name)["rows"]:
        cells = []
        for task in TASKS:
            own = row["tasks"][task]
            steps = "" if own["mean_accepted"] is None else f"{own['mean_accepted']:.2f} "
            cells.append(f"{steps}({own['speedup']:.2f})")
        yield label(row["decoder"]), *cells


def tables() -> Iterator[str]:
    """Two tables a file."""
    for name in there():
        found = report(name)
        yield f"\n{TITLES[name]} (`{name}.json`):\n\n```\n{found['command']} --input question.jsonl\n```\n"
        yield from table(overview(found["rows"]))
        yield "\nThe same by task: tokens per step, and in brackets the ratio to plain decoding.\n"
        yield from table(by_task(name))


def curve(head: str) -> list[dict[str, Any]]:
    """The held-out records of a head's training."""
    return [json.loads(line) for line in (HERE / f"{head}.jsonl").read_text().splitlines()]


def of_training(head: str) -> Iterator[tuple[str, ...]]:
    """Held-out acceptance by what was read."""
    records = curve(head)
    depths = [depth for depth in DEPTHS if f"held_out_acceptance{depth}" in records[0]]
    at = f" at depth {', '.join(map(str, range(1, len(depths) + 1)))}" if len(depths) > 1 else ""
    yield "answer tokens read", f"acceptance{at}", f"agreement{at}"
    for record in records:
        kept = " ".join(f"{record[f'held_out_acceptance{depth}']:.2f}" for depth in depths)
        agreed = [value for name, value in record.items() if name.startswith("held_out_agreement")]
        yield f"{record['tokens']:,}", kept, " ".join(f"{value:.2f}" for value in agreed)


def written(page: str) -> str:
    """A page with the tables of the files that are there."""
    for head in HEADS:
        page = filled(page, f"curve: {head}", table(of_training(head)))
    return filled(page, "measured", [*tables(), ""])


def picture(path: Path) -> None:
    """Left: speed over plain decoding. Right: acceptance of held-out text by tokens read in training."""
    figure = Picture(11, 4.2)
    left, right = figure.subplots(1, 2)
    rows = report("one_row")["rows"]
    for place, row in enumerate(rows):
        colour = "#a9cce3" if " " in row["decoder"] else "#2e7d32"
        left.barh(place, row["overall"]["speedup"], color=colour)
    left.set_yticks(range(len(rows)), [row["decoder"] for row in rows], fontsize=8)
    left.invert_yaxis()
    left.axvline(1, color="grey", linewidth=0.8)
    left.set_xlabel("speed over our plain decoding, one row")
    for head in HEADS:
        for number, depth in enumerate(DEPTHS, start=1):
            if f"held_out_acceptance{depth}" not in curve(head)[0]:
                continue
            tokens = [record["tokens"] / 1e6 for record in curve(head)]
            kept = [record[f"held_out_acceptance{depth}"] for record in curve(head)]
            right.plot(tokens, kept, marker="o", label=f"{head}, depth {number}")
    right.set_xlabel("million answer tokens read in training")
    right.set_ylabel("acceptance of a drafted token, held-out text")
    right.legend()
    figure.savefig(str(path), dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="*", metavar="RUN", help=f"of {', '.join(RUNS)} (default: all)")
    parser.add_argument("--input", type=Path, help="Spec-Bench's question.jsonl")
    parser.add_argument("--show", action="store_true", help="measure nothing")
    asked = parser.parse_args()
    if not asked.show and asked.input is None:
        parser.error("give --input question.jsonl, or --show")
    for name in [] if asked.show else asked.runs or RUNS:
        keep(name, measured(RUNS[name].split(), asked.input))
    picture(HERE / "smollm2.png")
    show(written)
    print("\n".join(tables()))


if __name__ == "__main__":
    main()
