"""`python -m experiments.costs.constraint_cost`: what a table of a constraint costs a decoding step.

One model decodes `--batch-size` rows with and without a constraint, in turn. The constraint is a JSON Schema that no text
finishes within the steps. A measurement is one loop of whole steps on the device. The two texts differ, so drafters whose
trees have more nodes where more is found, such as `prompt_lookup`, would show that and not the table.
"""

import dataclasses
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

import specjax
from experiments.costs.printed import printed
from specjax import decoder as decoding
from specjax.constrain import Table, compiled
from specjax.prompts import Prompts
from specjax.serve.options import check_least, option
from specjax.terminal import bad_input, flag, run_program

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 24},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "city": {"enum": ["Lagos", "Lima", "Oslo", "Perth"]},
        "member": {"type": "boolean"},
    },
    "required": ["name", "age", "city", "member"],
}
MANY = {"type": "array", "items": PERSON, "minItems": 12, "maxItems": 24}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConstraintOptions:
    """See the help of each."""

    model: str = option("tiny", "folder, name or hub id")
    drafters: str = option("none,eagle3", "in a comma list; those whose trees always have all nodes")
    batch_size: int = option(8, "rows", least=1)
    steps: int = option(40, "steps of a measurement", least=1)
    repeats: int = option(9, "rounds; the median counts", least=1)
    temperature: float = option(0.0, "0 is greedy", least=0)
    json: bool = option(False, "print one line of JSON")


def timer(options: ConstraintOptions, engine: Any, table: Table | None) -> Callable[[], float]:
    """A function that runs the steps and returns the seconds of one."""
    ids = engine.request("Describe the members of a club.", chat=True).ids
    room = options.steps * engine.decoder.slack + 500  # every text has room to go on after the last step
    room = min(room, engine.max_length - len(ids) - engine.decoder.slack)
    more = {} if table is None else {"constraint": [table] * options.batch_size}
    rows = [ids] * options.batch_size
    prompts = Prompts.of(rows, room, seed=[*range(len(rows))], temperature=options.temperature, **more)
    state = engine.decoder.init(engine.params, prompts, capacity=len(ids) + room + engine.decoder.slack)

    def once() -> float:
        mine = jax.block_until_ready(jax.tree.map(lambda array: array.copy(), state))  # `run` consumes its state
        began = time.perf_counter()
        ended = int(decoding.run(engine.decoder, engine.params, mine, options.steps).stats.steps.min())
        seconds = (time.perf_counter() - began) / options.steps
        if ended < options.steps:
            raise ValueError(
                f"a text of {options.model} ends after {ended} steps: lower --steps, or take a model that reads longer texts"
            )
        return seconds

    return once


def measure(options: ConstraintOptions) -> dict[str, dict[str, float]]:
    """By drafter: milliseconds of a free and of a constrained step, and the median of the rounds' ratios."""
    found = {}
    model = specjax.load(options.model)
    for line in options.drafters.split(","):
        engine = specjax.Engine(model, drafter=line)
        table = compiled({"json": MANY}, engine.vocabulary)
        runs = [timer(options, engine, own) for own in (None, table)]
        rounds = [[run() for run in runs] for _ in range(options.repeats + 1)][1:]  # the first one compiles
        free, constrained = (statistics.median(own) for own in zip(*rounds, strict=True))
        ratio = statistics.median(own / other for other, own in rounds)
        found[line] = {"free_ms": round(1e3 * free, 3), "constrained_ms": round(1e3 * constrained, 3)}
        found[line]["ratio"] = round(ratio, 4)
    return found


def command(options: ConstraintOptions) -> int:
    """Measures and prints."""
    with bad_input():
        check_least(options, flag)
    said = lambda own: (
        f"free {own['free_ms']:9.3f} ms   constrained {own['constrained_ms']:9.3f} ms   {own['ratio']:6.3f}"
    )
    with bad_input():
        found = measure(options)
    return printed(found, options.json, said)


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    name = "python -m experiments.costs.constraint_cost"
    return run_program(name, "What a constraint's table costs a step.", ConstraintOptions, command, argv)


if __name__ == "__main__":
    sys.exit(main())
