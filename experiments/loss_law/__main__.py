"""Trains models of several sizes for several times, and fits their loss: `python -m experiments.loss_law`.

The models stand in `out/loss_law`; one whose run has ended is left as it is. Writes `results.json`, the picture and the
tables of the page; `--show` writes the tables and the picture alone.
"""

import dataclasses
import json
import re
import sys
from pathlib import Path
from typing import Any

import jax

from experiments.loss_law.fit import LossFit, Point, held_out, predicted
from specjax import cli, models
from specjax.tasks import FAMILIES, generate
from specjax.train.data import read_rows
from specjax.train.distill import Distill
from specjax.train.held_out import HeldOut
from specjax.viz.picture import Picture

HERE = Path(__file__).resolve().parent
WORK = HERE.parent.parent / "out" / HERE.name
WIDTHS, STEPS = (32, 64, 128), (40, 80, 160, 320)
ROWS, LENGTH = 8, 256
QUESTIONS = {"train": 2000, "held_out": 20}
"""Questions of every family."""


def shape(width: int) -> dict[str, Any]:
    """The config of a draft model: two layers, heads of 16 channels."""
    heads = width // 16
    sizes = {"hidden_size": width, "intermediate_size": 3 * width, "num_hidden_layers": 2, "head_dim": 16}
    return sizes | {"num_attention_heads": heads, "num_key_value_heads": heads, "tie_word_embeddings": True}


def written_data(work: Path) -> dict[str, Path]:
    """Questions and answers of level 2, as chats, in files for training and for what is held out."""
    found = {}
    for split, count in QUESTIONS.items():
        found[split] = work / f"{split}.jsonl"
        lines = []
        for family in FAMILIES:
            for question in generate(family, 2, seed=0, count=count, split=split):
                turns = ("user", question.prompt), ("assistant", question.answers[0])
                lines.append(json.dumps({"messages": [{"role": role, "content": text} for role, text in turns]}))
        found[split].write_text("\n".join(lines) + "\n")
    return found


def trained(width: int, steps: int, work: Path, files: dict[str, Path]) -> Path:
    """The folder of a draft model."""
    folder, config = work / f"{width}_{steps}", work / f"{width}.json"
    config.write_text(json.dumps(shape(width)))
    if (folder / "config.json").exists():
        return folder
    words = ["train", "lm", "--draft-config", config, "--data", files["train"], "--held-out", files["held_out"]]
    words += ["--output", folder, "--steps", steps, "--checkpoint-every", steps, "--learning-rate", 0.003]
    words += ["--batch-size", ROWS, "--length", LENGTH, *(["--resume"] if (folder / "training").exists() else [])]
    if cli.main([str(word) for word in words]):
        raise SystemExit(f"the training of {folder} failed")
    return folder


def measured(folder: Path, target: Any, rows: Any) -> Point:
    """What a draft model has learned."""
    last = json.loads((folder / "training" / "metrics.jsonl").read_text().splitlines()[-1])
    draft = models.load(str(folder), dtype="float32")
    found = HeldOut(rows, ROWS).metrics(Distill(target.lm, draft.lm), draft.params, target.params, jax.random.key(0))
    count = sum(leaf.size for leaf in jax.tree.leaves(draft.params))
    return Point(count, last["tokens"], round(last["held_out_loss"], 4), round(found["held_out_acceptance"], 4))


def tables(points: list[Point]) -> str:
    """The tables of the page."""
    own = held_out(points)
    fit = LossFit.fitted([point for point in points if point != own])
    lines = ["| parameters (k) | tokens (k) | loss | by the fit | accepted by `tiny` |", "| --- " * 5 + "|"]
    for point in points:
        at = point.parameters, point.tokens
        cells = f"{at[0] / 1e3:.0f}", f"{at[1] / 1e3:.0f}" + " (held out)" * (point == own)
        cells += f"{point.loss:.3f}", f"{fit.of(*at):.3f}", f"{point.acceptance:.3f}"
        lines.append(f"| {' | '.join(cells)} |")
    formula = f"`L = {fit.E:.3f} + {fit.A:.3g} / N^{fit.a:.3f} + {fit.B:.3g} / D^{fit.b:.3f}`"
    lines += ["", "| fitted without the point held out | it says | measured | error |", "| --- " * 4 + "|"]
    said = predicted(points)
    lines.append(f"| {formula} | {said:.3f} | {own.loss:.3f} | {said / own.loss - 1:+.1%} |")
    return "\n".join(lines)


def picture(points: list[Point]) -> Picture:
    """Losses by tokens, a colour for each size, with the curves of the fit."""
    own = held_out(points)
    fit = LossFit.fitted([point for point in points if point != own])
    figure = Picture(6.5, 4)
    axes = figure.subplots()
    for index, size in enumerate(dict.fromkeys(point.parameters for point in points)):
        same = [point for point in points if point.parameters == size]
        tokens = [point.tokens for point in same]
        axes.scatter(tokens, [point.loss for point in same], color=f"C{index}", label=f"{size / 1e3:.0f} k parameters")
        axes.plot(tokens, [fit.of(size, count) for count in tokens], color=f"C{index}")
    axes.scatter([own.tokens], [own.loss], s=120, facecolors="none", edgecolors="black", label="held out")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("training tokens")
    axes.set_ylabel("nats per held-out token")
    axes.legend()
    return figure


def page(text: str, points: list[Point]) -> str:
    """The page with the tables of these points."""
    return re.sub(r"(?<=<!-- measured -->\n\n).*?(?=\n\n<!-- end -->)", lambda _: tables(points), text, flags=re.DOTALL)


def read() -> list[Point]:
    """The points of `results.json`."""
    return [Point(**point) for point in json.loads((HERE / "results.json").read_text())["points"]]


def main() -> None:
    if "--show" not in sys.argv:
        WORK.mkdir(parents=True, exist_ok=True)
        files, target = written_data(WORK), models.load("tiny", dtype="float32")
        rows = read_rows((str(files["held_out"]),), target, LENGTH, 0)
        points = [measured(trained(width, steps, WORK, files), target, rows) for width in WIDTHS for steps in STEPS]
        said = {"points": [dataclasses.asdict(point) for point in points]}
        (HERE / "results.json").write_text(json.dumps(said, indent=1) + "\n")
    picture(read()).savefig(HERE / "loss_law.png", dpi=100)
    (HERE / "README.md").write_text(page((HERE / "README.md").read_text(), read()))


if __name__ == "__main__":
    main()
