"""A narrower draft by PAT against one of fewer layers, of as many parameters in the layers: `python -m experiments.pat.run`.

Both learn the same batches of text for as many updates. Folders that stand in `out/pat` are not made again.
"""

import contextlib
import dataclasses
import io
import itertools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import specjax
from specjax import cli, models
from specjax.tasks import Mixture, generate
from specjax.train.data import read_rows
from specjax.train.evopress.fitness import Divergence

FOLDER = Path(__file__).resolve().parent
WORK = FOLDER.parent.parent / "out" / FOLDER.name
WIDTH, LAYERS, STEPS, LENGTH, DRAFTED = 192, 6, 120, 128, 4
"""Channels of 256 and layers of 8 that are kept, updates, tokens per row, and draft tokens in a step."""
FAMILIES = "math", "json", "code", "edit", "qa", "lists"
COMMON = ("--target", "tiny", "--steps", STEPS, "--batch-size", 8, "--length", LENGTH, "--learning-rate", "1e-3")


def text() -> Path:
    """Questions with their right answers, a file of `--data`."""
    WORK.mkdir(parents=True, exist_ok=True)
    file, mixture = WORK / "text.jsonl", Mixture(5, levels=(2,))
    turns = lambda one: [{"role": "user", "content": one.prompt}]
    asked = (mixture[i] for i in range(600))
    lines = ({"prompt": turns(one), "completion": one.answers[0]} for one in asked)
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return file


def shallow(target: Any, file: Path) -> Path:
    """`target` without the two layers in a row whose absence changes its distributions of the text least."""
    layers = target.lm.num_layers
    kept = [
        tuple(i for i in range(layers) if not begin <= i < begin + layers - LAYERS)
        for begin in range(1, LAYERS)  # the first and the last layer stay
    ]
    skips = [np.asarray([[i not in own] * 2 for i in range(layers)]) for own in kept]
    rows = read_rows([file], target, LENGTH)
    fitness = Divergence(target.lm, target.params, lambda one: (target.params, jnp.asarray(one)), rows)
    chosen = [(i, fitness.lengths[i]) for i in range(16)]
    best = kept[int(np.argmin(fitness(skips, chosen)))]
    print("layers that are kept, from 0 on:", *best, flush=True)
    config = target.lm.config
    lm = dataclasses.replace(
        target.lm, config=dataclasses.replace(config, layers=tuple(config.layers[i] for i in best))
    )
    params = target.params | {"layers": {new: target.params["layers"][i] for new, i in enumerate(best)}}
    models.save(WORK / "layers", lm, params, "float32", target.tokenizer, target.eos_ids, generation=target.generation)
    return WORK / "layers"


def trained(line: str, name: str, *words: Any) -> Path:
    """The folder that `specjax train` wrote, or writes now."""
    folder = WORK / name
    if not (folder / "config.json").exists():
        asked = ("train", line, *COMMON, *words, "--data", WORK / "text.jsonl", "--output", folder)
        assert cli.main([str(word) for word in asked]) == 0
    return folder


def written(target: Any, line: str) -> list[Any]:
    """Records of held-out questions, four of each family, greedy."""
    questions = [one for family in FAMILIES for one in generate(family, 2, 11, 4)]
    with contextlib.redirect_stderr(io.StringIO()):
        return specjax.generate(
            target, [one.prompt for one in questions], chat=True, decode=line, temperature=0, max_new_tokens=48,
            batch_size=24, progress=False,
        )  # fmt: skip


def main() -> None:
    """Makes the drafts, and prints a row for each."""
    target, file = models.load("tiny"), text()
    layers = shallow(target, file)
    drafts = {
        "PAT": trained(f"pat:width={WIDTH},rank=64,reach=2", "narrow"),
        "fewer layers": trained("lm", "shallow", "--draft", layers),
        "fewer layers, untrained": layers,
    }
    plain = [one.tokens for one in written(target, "none")]
    rng, seen = np.random.default_rng(0), {}
    at = rng.integers(len(plain), size=(2000, len(plain)))
    for name, folder in drafts.items():
        model = models.load(folder)
        records = written(target, f"draft:model={folder},length={DRAFTED}")
        assert [one.tokens for one in records] == plain
        seen[name] = np.asarray([(one.new_tokens, one.steps) for one in records])
        sums = seen[name][at].sum(axis=1)
        low, high = np.percentile(sums[:, 0] / sums[:, 1], (2.5, 97.5))
        size = sum(leaf.size for leaf in jax.tree.leaves(model.params["layers"]))
        tokens, steps = seen[name].sum(axis=0)
        print(f"| {name} | {size / 1e6:.2f} | {tokens / steps:.2f} | {low:.2f} to {high:.2f} |", flush=True)
    for one, other in itertools.combinations(seen, 2):
        rates = [own[at].sum(axis=1) for own in (seen[one], seen[other])]
        low, high = np.percentile(rates[0][:, 0] / rates[0][:, 1] - rates[1][:, 0] / rates[1][:, 1], (2.5, 97.5))
        print(f"{one} - {other}: {low:+.2f} to {high:+.2f}")


if __name__ == "__main__":
    main()
