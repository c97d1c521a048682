"""Trains every head of `config.toml` on `tiny` for the same processor seconds, and measures what each accepts.

python -m experiments.drafters.equal --work FOLDER [HEAD ...]

Writes `equal.json`, `equal_greedy.json` and `equal_sampled.json`; rows of heads that are not named stay. A head whose run has
ended is left as it is.
"""

import argparse
import dataclasses
import json
import pathlib
import statistics
import subprocess
import sys
import time
import tomllib
from typing import Any

from experiments.drafters.train import HERE, answered
from specjax.train import loop
from specjax.train.command import prepare
from specjax.train.options import TrainOptions

SECONDS, ROWS = 60.0, 4
"""Of training, of all threads, compiling left out; and rows of 256 tokens per update."""
TOGETHER = 6
"""Heads that a process measures."""
PROBE = range(3, 13)
"""The updates that are timed before, to know how many fit."""
BESIDES = {"hass": "eagle1:preset=hass", "dovetail": "dovetail", "dovetail_1": "dovetail:layers=1"}
"""Lines that the recipe of the shipped heads does not have."""


def heads(config: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Line and options by name."""
    names = config["heads"] | {name: {"line": line} for name, line in BESIDES.items()}
    return {name: {"line": name, **own} for name, own in names.items()}


def fitted(options: TrainOptions) -> tuple[Any, Any, list[float]]:
    """The task, trained parameters, and the processor's clock after each update."""
    task, batches, held_out, settings, run, mesh, _ = prepare(options)
    clock: list[float] = []
    with run:
        params = loop.fit(
            task.objective, task.params, task.frozen, batches, settings, run, checkpoint_every=options.steps,
            held_out=held_out, mesh=mesh, on_step=lambda record: clock.append(time.process_time()),
        )  # fmt: skip
    return task, params, clock


def trained(name: str, own: dict[str, Any], data: pathlib.Path, work: pathlib.Path) -> dict[str, Any]:
    """Trains a head in its folder under `work`; returns what was done."""
    folder, done = work / name, work / f"{name}.json"
    if done.exists():
        return json.loads(done.read_text())
    options = TrainOptions(
        drafter=own["line"], target="tiny", data=(str(data),), output=str(work / f"{name}_probe"), steps=PROBE[-1],
        batch_size=ROWS, length=256, learning_rate=own.get("learning-rate", 2e-3), seed=0, save_dtype="float16",
    )  # fmt: skip
    _, _, clock = fitted(options)
    update = statistics.median(clock[i] - clock[i - 1] for i in PROBE[:-1])
    steps = max(round(SECONDS / update), 20)
    task, params, clock = fitted(dataclasses.replace(options, output=str(folder), steps=steps))
    task.save(folder, params)
    spent = (clock[-1] - clock[0]) * steps / (steps - 1)  # the first one's were spent on compiling
    weights = (folder / "model.safetensors").stat().st_size
    told = {"head": name, "line": own["line"], "updates": steps, "seconds": round(spent, 1), "bytes": weights}
    done.write_text(json.dumps(told))
    return told


def measured(heads: list[dict[str, Any]], work: pathlib.Path, prompts: int, temperature: int) -> list[dict[str, Any]]:
    """A row of `specjax bench` for each head."""
    command = [
        sys.executable,
        "-m",
        "specjax",
        "bench",
        "--model",
        "tiny",
        "--prompts",
        prompts,
        "--repeats",
        1,
        "--json",
    ]
    command += ["--temperature", temperature]
    for head in heads:
        command += ["--drafter", f"{head['line'].partition(':')[0]}:model={work / head['head']}"]
    report = json.loads(subprocess.run([*map(str, command)], check=True, capture_output=True, text=True).stdout)
    plain, *rows = report["rows"]
    assert plain["decoder"] == "none"
    return [{**row, "decoder": head["head"]} for row, head in zip(rows, heads, strict=True)]  # no folders of a machine


def placed(new: list[dict[str, Any]], old: list[dict[str, Any]], key: str, order: list[str]) -> list[dict[str, Any]]:
    """New rows and those of other heads, in the recipe's order."""
    rows = {row[key]: row for row in (*old, *new)}
    return [rows[name] for name in order if name in rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "heads", nargs="*", metavar="HEAD", help="of the recipe's, hass, dovetail or dovetail_1 (default: all)"
    )
    parser.add_argument("--work", type=pathlib.Path, required=True, help="data, checkpoints and heads")
    parser.add_argument("--prompts", type=int, default=20, help="questions of the measurement")
    args = parser.parse_args()
    config = tomllib.loads((HERE / "config.toml").read_text())
    args.work.mkdir(parents=True, exist_ok=True)
    order, rows = list(heads(config)), []
    if unknown := sorted({*args.heads} - {*order}):
        parser.error(f"there is no head {unknown[0]!r}: choose of {', '.join(order)}")
    data = answered(args.work, config["data"]["questions"])
    for name, own in heads(config).items():
        if not args.heads or name in args.heads:
            rows.append(trained(name, own, data, args.work))
            print(*rows[-1].values(), flush=True)
    files = {how: HERE / f"equal_{how}.json" for how in ("greedy", "sampled")}
    made = HERE / "equal.json"
    made.write_text(json.dumps(placed(rows, json.loads(made.read_text()), "head", order), indent=1) + "\n")
    for how, temperature in (("greedy", 0), ("sampled", 1)):
        found = [
            row
            for at in range(0, len(rows), TOGETHER)
            for row in measured(rows[at : at + TOGETHER], args.work, args.prompts, temperature)
        ]
        old = json.loads(files[how].read_text())["rows"]
        files[how].write_text(json.dumps({"rows": placed(found, old, "decoder", order)}) + "\n")


if __name__ == "__main__":
    main()
