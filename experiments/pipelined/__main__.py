"""A draft model on a device of its own: `python -m experiments.pipelined` writes results.json.

Two devices of JAX stand for two chips, on a processor of two cores. The models are `tiny` and its draft model, made wider:
passes then take longer than what goes on around them, and texts stay. They are small enough for XLA to leave their products
on one core. All ways write the texts of the same prompts in turns. `--table` prints the table.
"""

import argparse
import json
import os
import time
from pathlib import Path

import numpy as np

from specjax import Engine, models
from specjax.assembly.registry import build_drafter
from specjax.bench.prompts import questions
from specjax.decode import Speculate
from specjax.draft.heads.widening import widen_head
from specjax.plan.pipeline import Pipeline
from specjax.serve.pipelined import PipelinedEngine
from specjax.tasks import FAMILIES

WIDER, DRAFT_WIDER, NEW, PROMPTS, ROUNDS, LENGTH = 2, 4, 64, 4, 3, 4
RESULTS = Path(__file__).with_name("results.json")
WAYS = {
    "plain": ("none", False),
    "draft, one device": (f"draft:expander=chain,length={LENGTH}", False),
    "draft, two devices": (f"draft:expander=chain,length={LENGTH}", True),
    "pearl, one device": (f"pearl:length={LENGTH}", False),
    "pearl, two devices": (f"pearl:length={LENGTH}", True),
    "saguaro, one device": (f"saguaro:length={LENGTH},fan=1", False),
    "saguaro, two devices": (f"saguaro:length={LENGTH},fan=1", True),
}
"""Each line of a drafter, and whether it has a device of its own."""


def engine_of(line: str, apart: bool, model, wide):
    """The engine of a way. Both models are wider."""
    drafter = "none" if line == "none" else widen_head(*build_drafter(line, model), DRAFT_WIDER)
    way = Speculate(drafter=drafter)
    if apart:
        return PipelinedEngine(wide, way, mesh="model=1", draft_mesh="model=1")
    return Engine(wide, way)


def written(engine, prompts):
    """Texts, passes and seconds of decoding, one prompt at a time."""
    requests = [engine.request(prompt, max_new_tokens=NEW, chat=True, ignore_eos=True) for prompt in prompts]
    texts, steps, seconds = [], 0, 0.0
    for request in requests:
        before = engine.timing.decode_seconds
        (record,) = engine.run([request], batch_size=1)
        seconds += engine.timing.decode_seconds - before
        texts.append(record.tokens)
        steps += record.steps
    return texts, steps, seconds


def seconds_of_a_pass(engine, prompts) -> float:
    """The seconds of a step of plain decoding, of the middle one of several runs."""
    found = []
    for _ in range(3):
        _, steps, seconds = written(engine, prompts[:2])
        found.append(seconds / steps)
    return float(np.median(found))


def measure() -> dict:
    model = models.load("tiny", dtype="float32")
    wide, prompts = models.widen(model, WIDER), questions(PROMPTS, list(FAMILIES))
    engines = {name: engine_of(*way, model, wide) for name, way in WAYS.items()}
    rounds: dict[str, list] = {name: [] for name in WAYS}
    for engine in engines.values():
        written(engine, prompts[:1])  # compiles
    for _ in range(ROUNDS):
        for name, engine in engines.items():
            rounds[name].append(written(engine, prompts))
    best = {name: min(own, key=lambda one: one[2]) for name, own in rounds.items()}
    rows = [
        {
            "way": name,
            "tokens per second": sum(map(len, texts)) / seconds,
            "tokens per step": sum(map(len, texts)) / steps,
            "times plain": best["plain"][2] / seconds,
            "same texts": texts == best["plain"][0],
        }
        for name, (texts, steps, seconds) in best.items()
    ]
    drafter, params = widen_head(*build_drafter("draft", model), DRAFT_WIDER)
    alone = Engine(models.Model(drafter.lm, params, name="draft", tokenizer=model.tokenizer), "none")
    draft, target = seconds_of_a_pass(alone, prompts), seconds_of_a_pass(engines["plain"], prompts)
    return {"draft": draft, "target": target, "rows": rows}


def accepted(tokens_per_step: float) -> float:
    """The chance that a drafted token is accepted, with which a chain of `LENGTH` commits so many."""
    chances = np.linspace(0, 1, 2001)
    committed = (chances[:, None] ** np.arange(LENGTH + 1)).sum(axis=1)
    return float(chances[np.abs(committed - tokens_per_step).argmin()])


def table(found: dict) -> str:
    by = {row["way"]: row for row in found["rows"]}
    chance = accepted(by["draft, one device"]["tokens per step"])
    pair = Pipeline(draft=found["draft"], target=found["target"], length=LENGTH, accepted=chance)
    planned = {"plain": pair.plain, "draft, one device": pair.serial, "pearl, two devices": pair.pearl}
    lines = [
        "| way | tokens per second | times plain | tokens per step | the estimate's times plain | same texts |",
        "|---|---|---|---|---|---|",
    ]
    for name, row in by.items():
        guess = f"{planned[name] / pair.plain:.2f}" if name in planned else ""
        same = "yes" if row["same texts"] else "no"
        numbers = f"{row['tokens per second']:.0f} | {row['times plain']:.2f} | {row['tokens per step']:.2f}"
        lines.append(f"| {name} | {numbers} | {guess} | {same} |")
    target, draft = 1e3 * found["target"], 1e3 * found["draft"]
    passes = f"A pass takes {target:.1f} ms, one of the draft model {draft:.1f} ms; a drafted token passes with {chance:.2f}."
    return "\n".join([*lines, "", passes])


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--table", action="store_true", help="print the table of results.json")
    if not options.parse_args().table:
        os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"  # before JAX looks for devices
        began = time.perf_counter()
        found = measure()
        RESULTS.write_text(json.dumps(found | {"took": round(time.perf_counter() - began)}, indent=1) + "\n")
    print(table(json.loads(RESULTS.read_text())))
