"""What merging a batch's prompts costs in right answers: `python -m experiments.merged_prompts.run`.

A trained network that stands in `out/merged_prompts` is not trained again.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np

from specjax import cli, models
from specjax.decode import MergedPrompts
from specjax.evaluate.statistics import wilson
from specjax.tasks import Mixture, check, generate

FOLDER = Path(__file__).resolve().parent
WORK = FOLDER.parent.parent / "out" / FOLDER.name
FAMILIES, COUNT, BATCH, STEPS = ("code", "translate", "math", "lists"), 12, 12, 60
"""What is asked, how many questions of each family, prompts of a batch, and updates."""


def trained() -> Path:
    """The folder of the network; the text is questions with their right answers."""
    WORK.mkdir(parents=True, exist_ok=True)
    file, folder, mixture = WORK / "text.jsonl", WORK / "network", Mixture(5, levels=(2,))
    turns = lambda one: [{"role": "user", "content": one.prompt}]
    lines = ({"prompt": turns(one), "completion": one.answers[0]} for one in (mixture[i] for i in range(600)))
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    if not (folder / "config.json").exists():
        words = ("train", "merged_prompts", "--target", "tiny", "--data", file, "--output", folder, "--steps", STEPS)
        assert cli.main([str(word) for word in (*words, "--length", 128, "--learning-rate", "1e-3")]) == 0
    return folder


def right(model: Any, method: MergedPrompts) -> np.ndarray:
    """By question: right or not, tokens of the prompt, and how many were read. `[N, 3]`."""
    found = []
    for family in FAMILIES:
        questions = generate(family, 2, 11, COUNT)
        asked = [[{"role": "user", "content": one.prompt}] for one in questions]
        for one, own in zip(
            questions, method(model, asked, max_new_tokens=64, batch_size=BATCH, temperature=0.0), strict=True
        ):
            found.append((check(one, own.text or ""), own.prompt_tokens, own.prompt_read))
    return np.asarray(found, np.float64)


def main() -> None:
    """Prints a row for each way, and the differences from plain prompts."""
    model, network = models.load("tiny"), str(trained())
    ways = {"none": (0, None)}
    ways |= {"mean": (1000, None), "trained": (1000, network)}
    rng, plain = np.random.default_rng(0), None
    for name, (merges, embedder) in ways.items():
        own = right(model, MergedPrompts(merges, embedder))
        plain = own if plain is None else plain
        low, high = wilson(own[:, 0])
        at = rng.integers(len(own), size=(2000, len(own)))
        less = np.percentile((own[at, 0] - plain[at, 0]).mean(axis=1), (2.5, 97.5))
        read = own[:, 2].sum() / own[:, 1].sum()
        print(
            f"| {name} | {read:.3f} | {own[:, 0].mean():.1%} | {low:.1%} to {high:.1%} | {less[0]:+.1%} to {less[1]:+.1%} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
