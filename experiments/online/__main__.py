"""Drafts that learn while a job runs: `python -m experiments.online WORK` writes results.json and the picture.

A draft model of the shipped draft's shape is distilled on questions of other families. Then a job of 2,000 questions from two
families runs for every way: the draft as it is, one draft that learns, and a draft for each family. `--ways` names some of
them, and `--table` prints the table.
"""

import argparse
import json
import random
import subprocess
import sys
from pathlib import Path

import numpy as np

from specjax import models
from specjax.tasks import FAMILIES, generate

DOMAINS, EACH, NEW, WINDOW = ("code", "translate"), 1000, 64, 100
BEGINS_ON, UPDATES = 60, 300
"""Questions of each other family that the draft begins with, and its updates."""
RESULTS = Path(__file__).with_name("results.json")
PICTURE = Path(__file__).with_name("online.png")
WAYS = {"as it is": ("plain", None), "learns": ("plain", "one"), "learns, one for each domain": ("named", "each")}
RESAMPLED = 2000


def chat(question, **more) -> str:
    return json.dumps({"messages": [{"role": "user", "content": question.prompt}], **more}) + "\n"


def run(*words: object) -> None:
    """Runs a command. One that was stopped goes on."""
    subprocess.run([sys.executable, "-m", "specjax", *map(str, words)], check=True)


def begun(work: Path) -> Path:
    """The draft with which all jobs begin."""
    draft = work / "draft"
    if not draft.exists():
        lines = [
            chat(q) for family in FAMILIES if family not in DOMAINS for q in generate(family, 1, 0, BEGINS_ON, "train")
        ]
        (work / "others.jsonl").write_text("".join(lines))
        shape = models.load("tiny-draft").path / "config.json"
        how = ["--steps", UPDATES, "--length", 256, "--max-new-tokens", NEW, "--learning-rate", 1e-3]
        run("train", "distill", "--draft-config", shape, "--prompts", work / "others.jsonl", "--output", draft, *how)
    return draft


def asked(work: Path) -> None:
    """The job's lines, with and without their domains."""
    lines = [(domain, q) for domain in DOMAINS for q in generate(domain, 1, 1, EACH, "train")]
    random.Random(0).shuffle(lines)
    (work / "plain.jsonl").write_text("".join(chat(q, id=f"{domain}-{i}") for i, (domain, q) in enumerate(lines)))
    named = [chat(q, id=f"{domain}-{i}", domain=domain) for i, (domain, q) in enumerate(lines)]
    (work / "named.jsonl").write_text("".join(named))


def measure(work: Path, ways: list[str]) -> dict:
    work.mkdir(parents=True, exist_ok=True)
    draft, found, texts = begun(work), {}, {}
    asked(work)
    for name in ways:
        lines, learn = WAYS[name]
        output = work / f"{learn or 'as-it-is'}.jsonl"
        own = [] if learn is None else ["--learn", work / learn]
        how = ["--max-new-tokens", NEW, "--batch-size", 8, "--drafter", f"draft:model={draft},length=4"]
        run("generate", "--input", work / f"{lines}.jsonl", "--output", output, *how, *own)
        records = [json.loads(line) for line in output.read_text().splitlines()]
        texts[name] = {record["id"]: record["tokens"] for record in records}
        found[name] = {
            "same texts": texts[name] == texts[ways[0]],
            "domains": {
                domain: [[r["new_tokens"], r["steps"]] for r in records if r["id"].startswith(domain)]
                for domain in DOMAINS
            },
        }
    return found


def per_step(pairs) -> float:
    tokens, steps = np.asarray(pairs).sum(axis=0)
    return float(tokens / steps)


def interval(pairs, rng) -> tuple[float, float]:
    pairs = np.asarray(pairs)
    sums = pairs[rng.integers(len(pairs), size=(RESAMPLED, len(pairs)))].sum(axis=1)
    low, high = np.quantile(sums[:, 0] / sums[:, 1], (0.025, 0.975))
    return float(low), float(high)


def table(found: dict) -> str:
    rng = np.random.default_rng(0)
    parts = {"the first 100": slice(None, WINDOW), "the last 100": slice(-WINDOW, None), "all": slice(None)}
    heads = "domain", "draft", *(f"tokens per step, {name}" for name in parts), "same texts"
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for domain in DOMAINS:
        for name, own in found.items():
            pairs = own["domains"][domain]
            cells = []
            for part in parts.values():
                low, high = interval(pairs[part], rng)
                cells.append(f"{per_step(pairs[part]):.2f} ({low:.2f} to {high:.2f})")
            same = "yes" if own["same texts"] else "no"
            lines.append(f"| {domain} | {name} | {' | '.join(cells)} | {same} |")
    return "\n".join(lines)


def draw(found: dict) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.4), layout="constrained")
    for axes, domain in zip(figure.subplots(1, 2, sharey=True), DOMAINS, strict=True):
        for name, own in found.items():
            pairs = np.asarray(own["domains"][domain])
            means = [per_step(pairs[at : at + WINDOW]) for at in range(0, len(pairs), WINDOW)]
            axes.plot(np.arange(len(means)) * WINDOW + WINDOW / 2, means, label=name)
        axes.set(title=domain, xlabel="questions of this domain")
    figure.axes[0].set_ylabel("tokens per step")
    figure.axes[0].legend()
    figure.savefig(PICTURE, dpi=110)


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("work", nargs="?", type=Path, help="a folder for the drafts and texts")
    options.add_argument("--table", action="store_true", help="print the table of results.json")
    options.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), help="some of the ways (default: all)")
    chosen = options.parse_args()
    if not chosen.table:
        if chosen.work is None:
            options.error("name a folder for the drafts and texts, or give --table")
        RESULTS.write_text(json.dumps(measure(chosen.work, chosen.ways)) + "\n")
        draw(json.loads(RESULTS.read_text()))
    print(table(json.loads(RESULTS.read_text())))
