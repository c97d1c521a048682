"""Experts in two precisions: what they cost in quality, and what a cache of them moves. `python -m experiments.hobbit.run`.

It makes and trains the model (`experiments.hobbit.model`), unless a folder of it is given, and prints the tables of
README.md.
"""

import argparse
import dataclasses
import json
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.hobbit import model as small
from specjax import models
from specjax.lm import Block, Wants
from specjax.models.formats import read_format
from specjax.models.hobbit.cache import Policy, simulated
from specjax.models.hobbit.routing import of_texts
from specjax.models.hobbit.tiers import Tiers
from specjax.plan.held import chip_bytes
from specjax.tasks import generate
from specjax.train.data import read_rows

FAMILIES = "math", "json", "code", "edit", "qa", "retrieve", "lists", "translate", "fill"
QUESTIONS, LENGTH, TEXT = 4, 160, 64
"""Held-out questions of each family, tokens of a row, and tokens of a text whose routing is followed."""
LINES = (
    "hobbit:high=1,low=1", "hobbit:high=0.6,low=1", "hobbit:high=0.6,low=0.95", "hobbit:high=0,low=1",
    "hobbit:high=0.3,low=0.6",
)  # fmt: skip
SHARE = 4  # a quarter of all experts has room on the device
POLICIES = {
    "LRU": Policy(1, 0, 0, 0), "LFU": Policy(0, 1, 0, 0), "LHU": Policy(0, 0, 1, 0), "all four": Policy(1, 1, 1, 1),
}  # fmt: skip


def rows_of(target: Any, folder: Path) -> Any:
    """Held-out questions with right answers."""
    turns = lambda one: [{"role": "user", "content": one.prompt}]
    asked = [one for family in FAMILIES for one in generate(family, 2, 23, QUESTIONS)]
    lines = ({"prompt": turns(one), "completion": one.answers[0]} for one in asked)
    (folder / "held_out.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return read_rows([folder / "held_out.jsonl"], target, LENGTH)


def judged(lm: Any, whole: Any, own: Any, rows: Any) -> np.ndarray:
    """By row: the divergence from the whole model in nats, tokens where both would draw the same, and tokens, `[N, 3]`."""

    @jax.jit
    def measured(whole, own, tokens, mask):
        at = jnp.broadcast_to(jnp.arange(tokens.shape[1])[None], tokens.shape)
        block = Block(tokens, at, jnp.zeros(len(tokens), jnp.int32), None, causal=True)
        scores = [lm(params, block, None, wants=Wants(logits=True)).logits[:, :-1] for params in (whole, own)]
        logs = [jax.nn.log_softmax(part, axis=-1) for part in scores]
        far = jnp.sum(jnp.exp(logs[0]) * (logs[0] - logs[1]), axis=-1)
        same = scores[0].argmax(axis=-1) == scores[1].argmax(axis=-1)
        found = jnp.stack([far, same.astype(jnp.float32), jnp.ones_like(far)], axis=2)
        return jnp.where(mask[:, 1:, None], found, 0).sum(axis=1)

    batches = range(0, len(rows) - 7, 8)
    return np.concatenate(
        [np.asarray(measured(whole, own, rows.tokens[i : i + 8], rows.mask[i : i + 8])) for i in batches]
    )


def mean(found: np.ndarray, column: int) -> str:
    """A mean over tokens, with an interval of 95% over rows."""
    rng = np.random.default_rng(0)
    at = rng.integers(len(found), size=(2000, len(found)))
    draws = found[at, column].sum(axis=1) / found[at, 2].sum(axis=1)
    low, high = np.percentile(draws, (2.5, 97.5))
    return f"{found[:, column].sum() / found[:, 2].sum():.4f} ({low:.4f} to {high:.4f})"


def quality(target: Any, rows: Any, routing: Any) -> None:
    """Prints the divergence of each line's model from the whole one."""
    print(
        "| `weights` | many, few, none of chosen experts | divergence in nats | same next token |\n| --- | --- | --- | --- |"
    )
    for line in LINES:
        form = read_format(line)
        tiers = np.asarray(Tiers(form.high, form.low).of(routing.weights.reshape(-1, small.EACH)))
        shares = ", ".join(f"{(tiers == tier).mean():.0%}" for tier in range(3))
        found = judged(target.lm, target.params, form.params(target.params), rows)
        print(f"| `{line}` | {shares} | {mean(found, 0)} | {mean(found, 1)} |", flush=True)


def bytes_of(lm: Any) -> tuple[int, int]:
    """Bytes of an expert in bfloat16 and in int4."""
    shapes = lm.abstract("bfloat16")
    experts = read_format("hobbit").shapes(shapes)["layers"][0]["mlp"]["experts"]
    kernels = [part["kernel"] for part in experts.values()]
    return tuple(sum(chip_bytes(part) for part in kind) // small.EXPERTS
                 for kind in ([one.many for one in kernels], [one.few for one in kernels]))  # fmt: skip


def moved(routing: Any, high: int, low: int) -> None:
    """Prints what caches of equal bytes move for each token."""
    tokens, layers = routing.experts.shape[0] * routing.experts.shape[1], routing.experts.shape[2]
    slots = layers * small.EXPERTS // SHARE
    few = max(small.EACH, slots // 2)
    many = slots - -(-few * low // high)
    print(f"\nrouters foretell {float(routing.foretold):.0%} of the next layer's experts; {high} and {low} bytes an expert; "
          f"{slots} slots, or {many} and {few}\n")  # fmt: skip
    print(
        "| experts | score | fetched ahead | kB moved for a token | hits | of fetched ahead, used |\n"
        + "| --- " * 6
        + "|"
    )
    kinds = {
        "whole": (Tiers(1, 1), True, slots, small.EACH),
        "two precisions, better if there": (Tiers(), True, many, few),
        "two precisions, by gates alone": (Tiers(), False, many, few),
    }
    for kind, (tiers, better, *room) in kinds.items():
        for name, policy in POLICIES.items():
            for ahead in (0, 1) if name == "all four" else (0,):
                own = dataclasses.replace(policy, ahead=ahead, better=better)
                counts = simulated(routing, tiers, own, small.EXPERTS, *room)
                fetched = counts.ahead_high + counts.ahead_low
                used = f"{counts.useful / fetched:.0%}" if fetched else "-"
                each = counts.moved(high, low) / tokens / 1e3
                print(f"| {kind} | {name} | {ahead} | {each:.1f} | {counts.hit_rate:.1%} | {used} |", flush=True)


def main() -> None:
    """See this module."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", help="a folder with the trained model, in place of training")
    parser.add_argument("--steps", type=int, default=small.STEPS, help="updates of training; 0: none")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        target = models.load(asked.model, "float32") if asked.model else small.trained(Path(folder), asked.steps)
        rows = rows_of(target, Path(folder))
        long = np.flatnonzero((rows.tokens[:, :TEXT] != 0).all(axis=1))
        texts = jnp.asarray(rows.tokens[long, :TEXT])
        routing = jax.jit(lambda params: of_texts(target.lm, params, texts, 2))(target.params)
        print(f"{len(rows)} rows of held-out text; {len(long)} texts of {TEXT} tokens for the cache\n")
        quality(target, rows, routing)
        moved(routing, *bytes_of(target.lm))


if __name__ == "__main__":
    main()
