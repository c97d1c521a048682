"""After training: the loss curve as a picture, the figures as JSON, and a check of both folders in `transformers`."""

import argparse
import json
import pathlib
import tomllib

import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import torch
import transformers

from experiments.pretrain.train import HERE, REPOSITORY, logits_of
from specjax import models
from specjax.bench import stdlib


def curve(path: pathlib.Path) -> list[dict]:
    """The records of one run; of steps that were run twice (a resume), the later ones."""
    records = [json.loads(line) for line in path.read_text().splitlines()]
    return [by_step for _, by_step in sorted({record["step"]: record for record in records}.items())]


def picture(curves: dict[str, list[dict]], path: pathlib.Path) -> None:
    """Bits per byte over tokens, both models."""
    figure, axes = plt.subplots(figsize=(7, 4.2))
    for i, (name, records) in enumerate(curves.items()):
        tokens = [record["tokens"] / 1e6 for record in records]
        axes.plot(tokens, [r["train_bits_per_byte"] for r in records], f"C{i}:", label=f"{name}, training")
        axes.plot(tokens, [r["heldout_bits_per_byte"] for r in records], f"C{i}-", label=f"{name}, held out")
    axes.set(xlabel="tokens seen (millions)", ylabel="bits per byte", ylim=(0.8, 2.4))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def check(folder: pathlib.Path, prompt: str, new_tokens: int) -> dict:
    """Compares float32 logits with `transformers`' and writes on greedily."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ours = models.load(folder, dtype=jnp.float32)
    probe = stdlib.heldout_functions(1)[0]
    ids = tokenizer(probe, return_tensors="np")["input_ids"]
    with torch.no_grad():
        expected = theirs(torch.as_tensor(ids)).logits.numpy()
        start = torch.as_tensor(tokenizer(prompt, return_tensors="np")["input_ids"])
        written = theirs.generate(start, max_new_tokens=new_tokens, do_sample=False)[0]
    found = np.asarray(logits_of(ours.lm, ours.params, jnp.asarray(ids, jnp.int32)))
    return {"logits_max_difference": float(np.abs(found - expected).max()), "sample": tokenizer.decode(written)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--work", type=pathlib.Path, default=REPOSITORY / "out" / "pretrain", help="checkpoints and logs"
    )
    parser.add_argument(
        "--models", type=pathlib.Path, default=REPOSITORY / "models" / "pretrained", help="model folders"
    )
    parser.add_argument("--prompt", default="def fibonacci(n):")
    parser.add_argument("--new-tokens", type=int, default=96)
    args = parser.parse_args()
    recipe = tomllib.loads((HERE / "config.toml").read_text())
    names = [recipe["target"]["name"], recipe["draft"]["name"]]
    curves = {name: curve(args.work / f"{name}.jsonl") for name in names}
    picture(curves, HERE / "loss_curve.png")
    figures = json.loads((args.work / "figures.json").read_text())
    for name in names:
        checked = check(args.models / name, args.prompt, args.new_tokens)
        figures[name] |= checked
        print(f"{name}: logits differ by at most {checked['logits_max_difference']:.2e}\n{checked['sample']}\n")
    figures["curves"] = curves
    (HERE / "metrics.json").write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
