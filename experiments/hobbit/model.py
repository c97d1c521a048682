"""A small mixture of experts, made of `tiny`: its MLPs cut into experts, with routers, and trained for a short time.

No shipped model has experts. An MLP's inner channels are ordered by what their gates have most in common (the first principal
component), and cut into experts of equal width. An expert's column of the router is the mean of its gates. So a token first
chooses experts whose gates open. Weights of a token sum to 1, and the matrices `down` are multiplied by the number of experts
per token, so that a chosen expert counts as it did.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np

from specjax import cli, models
from specjax.models import ExpertsConfig, Model
from specjax.tasks import Mixture

EXPERTS, EACH = 8, 4
STEPS, BATCH, LENGTH, RATE = 20, 8, 160, 1e-3
TEXTS = 2000


def cut(target: Model) -> tuple[Any, Any]:
    """The model with experts and its parameters, untrained."""
    config = target.lm.config
    width = config.layers[0].feed.intermediate_size
    experts = ExpertsConfig(EXPERTS, EACH, width // EXPERTS)
    layers = tuple(dataclasses.replace(layer, feed=experts) for layer in config.layers)
    lm = dataclasses.replace(target.lm, config=dataclasses.replace(config, layers=layers))
    own = {i: {**layer, "mlp": _of_mlp(layer["mlp"])} for i, layer in target.params["layers"].items()}
    return lm, {**target.params, "layers": own}


def _of_mlp(mlp: Any) -> Any:
    gate, up, down = (np.asarray(mlp[name]["kernel"], np.float32) for name in ("gate", "up", "down"))
    centred = gate - gate.mean(axis=1, keepdims=True)
    common = np.linalg.svd(centred, full_matrices=False)[2][0]
    parts = np.split(np.argsort(common), EXPERTS)
    router = np.stack([gate[:, part].mean(axis=1) for part in parts], axis=1)
    stacked = lambda matrix, axis: {"kernel": np.stack([np.take(matrix, part, axis) for part in parts])}
    of_each = {"gate": stacked(gate, 1), "up": stacked(up, 1), "down": stacked(EACH * down, 0)}
    return {"router": {"kernel": router}, "experts": of_each}


def trained(folder: Path, steps: int = STEPS) -> Model:
    """The model after some updates on training questions with right answers, in float32.

    Args:
      folder: where files go.
      steps: how many updates; 0: the model as it was cut.
    """
    target = models.load("tiny", "float32")
    models.save(folder / "cut", *cut(target), "float32", target.tokenizer, target.eos_ids, generation=target.generation)
    if not steps:
        return models.load(folder / "cut", "float32")
    mixture = Mixture(17)
    turns = lambda one: [{"role": "user", "content": one.prompt}]
    lines = ({"prompt": turns(one), "completion": one.answers[0]} for one in (mixture[i] for i in range(TEXTS)))
    (folder / "text.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    asked = {
        "--target": folder / "cut", "--data": folder / "text.jsonl", "--output": folder / "model", "--steps": steps,
        "--batch-size": BATCH, "--length": LENGTH, "--learning-rate": RATE, "--save-dtype": "float32",
    }  # fmt: skip
    if cli.main(["train", "lm", *(str(word) for pair in asked.items() for word in pair)]):
        raise SystemExit("training stopped")
    return models.load(folder / "model", "float32")
