"""`specjax bench tree`: the fastest tree for a drafter on this machine, made of the nodes that are accepted most often.

The tree of the drafter's line is the one to be measured. On every other prompt, the nodes that the target accepts are
counted. Parts of the tree, from 1 drafted node to all, are made of the most accepted ones
(`specjax.expand.search.most_accepted`), and decode the other prompts, in rounds that alternate.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, cast

import numpy as np

from specjax.assembly.line import lines, read_line, spelt
from specjax.assembly.registry import DRAFTERS, EXPANDERS
from specjax.bench.engines import engines_of, requests_of
from specjax.bench.options import BenchOptions
from specjax.bench.prompts import prompts_of, read_input
from specjax.bench.run import Contestant, Ours, measure, progress, summarise
from specjax.decode import Speculate
from specjax.draft.counted import Counted
from specjax.expand.search import most_accepted
from specjax.jobs import jsonl
from specjax.serve.engine import Engine
from specjax.serve.request import Request, needs_of
from specjax.serve.slots import Loop, Slots
from specjax.terminal import bad_input, note, write
from specjax.tree import Topology

SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48)
"""Drafted nodes of the trees that are tried, beside all of the measured one."""


@dataclasses.dataclass(frozen=True)
class Row:
    """A tree that was tried.

    Attributes:
      drafter: its line.
      nodes: drafted ones.
      expected: tokens per step, by the counts of the other prompts.
      tokens_per_step: on the prompts that were timed.
      tokens_per_second: the median of the rounds.
      ratio_to_plain: its speed relative to plain decoding.
    """

    drafter: str
    nodes: int
    expected: float
    tokens_per_step: float
    tokens_per_second: float
    ratio_to_plain: float


def command(options: BenchOptions) -> int:
    """Runs the suite; returns the exit status."""
    with bad_input():
        asked = one_drafter(options)
        texts = read_input(options)
        engines, skipped = engines_of(options)
        plain, drafting = engines["none"], engines[asked]
        prompts, suffixes = prompts_of(texts, options, plain.model)
        if len(prompts) < 2:
            raise ValueError("the suite tree needs two prompts: one to count what is accepted, one to be timed")
        counted = Counted(drafting.decoder.drafter)
        topology = counted.topology
        requests = requests_of(options, {"none": plain}, prompts, suffixes, skipped)["none"]
    for reason in skipped:
        note(reason)
    model = plain.model
    how = dataclasses.replace(cast(Speculate, drafting.decode), drafter=(counted, drafting.params["draft"]))
    accepted = tally(Engine(model, decode=how, mesh=plain.mesh), requests[::2], options.batch_size)
    steps = int(accepted[0])
    parts = {
        with_tree(asked, part): part
        for size in dict.fromkeys((*(size for size in SIZES if size < counted.nodes - 1), counted.nodes - 1))
        for part in [most_accepted(topology, accepted.tolist(), size + 1)]
    }
    timed = {"none": plain} | {line: Engine(model, drafter=line, mesh=plain.mesh) for line in parts}
    contestants: dict[str, Contestant] = {
        name: Ours(engine, requests[1::2], options.batch_size, engine.capacity(requests[1::2]), options.ignore_eos)
        for name, engine in timed.items()
    }
    with progress(len(contestants) * (options.repeats + 1)) as advance:
        report = summarise(measure(contestants, options.repeats, advance), {}, "", bool(options.temperature))
    index = {path: node for node, path in enumerate(topology.paths)}
    rows = [
        Row(
            row.decoder, len(parts[row.decoder].parents) - 1,
            round(float(sum(accepted[index[path]] for path in parts[row.decoder].paths) / steps), 4),
            row.tokens_per_step, row.tokens_per_second, row.ratio_to_plain,
        )
        for row in report.rows[1:]
    ]  # fmt: skip
    if options.json:
        write(jsonl.dumps({"steps": steps, "rows": [dataclasses.asdict(row) for row in rows]}) + "\n")
    else:
        write(shown(rows, steps, len(requests[::2]), report.rows[0].tokens_per_second))
    return 0


def one_drafter(options: BenchOptions) -> str:
    """The line of the drafter whose tree is measured.

    Raises:
      ValueError: if there is not exactly one, or it takes no tree.
    """
    asked = lines(options.drafter)
    if len(asked) != 1 or options.decode:
        raise ValueError("the suite tree measures one drafter: give --drafter LINE once, and no --decode")
    entry = DRAFTERS.get(read_line(asked[0]).name)
    if entry is None or not (entry.expander or "tree" in entry.fields):
        able = ", ".join(name for name, entry in DRAFTERS.items() if entry.expander or "tree" in entry.fields)
        raise ValueError(f"--drafter {asked[0]}: the suite tree is for drafters with a tree of one shape: {able}")
    return asked[0]


def with_tree(line: str, topology: Topology) -> str:
    """A drafter's line with this tree in place of its own.

    >>> with_tree("stand:k=4,tree=2 | 1", Topology.from_counts("1 | 1"))
    'stand:k=4,tree=1 | 1'
    >>> with_tree("medusa:verifier=(typical:epsilon=0.3,delta=0.1)", Topology.from_counts("2"))
    'medusa:verifier="typical:epsilon=0.3,delta=0.1",expander=static,tree=2'
    """
    asked = read_line(line)
    entry = DRAFTERS[asked.name]
    given = {**(entry.published if asked.fields.get("preset") == "paper" else {}), **asked.fields}
    of_tree = {"preset", "tree", "expander"}
    if entry.expander:
        of_tree |= EXPANDERS[given.get("expander", read_line(entry.expander).name)].fields.keys() - {"coupled"}
    own = {name: value for name, value in given.items() if name not in of_tree}
    fields = own | ({"expander": "static"} if entry.expander else {}) | {"tree": topology.counts}
    return f"{asked.name}:" + ",".join(f"{name}={spelt(value)}" for name, value in fields.items())


def tally(engine: Engine, requests: Sequence[Request], rows: int) -> np.ndarray:
    """By node, how often it was accepted over all requests, `[N]`; the root's is the number of steps.

    Args:
      engine: whose drafter is a `Counted`.
      requests: to decode.
      rows: decoded together.
    """
    slots = Slots(engine.served(), rows, engine.capacity(requests), needs_of(requests).form)
    needs = dataclasses.replace(needs_of(requests), brief=False)
    loop = Loop(slots, list(requests), engine.keys(requests), needs)
    for _ in loop.turns():
        pass
    return np.asarray(loop.state.draft.accepted)


def shown(rows: list[Row], steps: int, counted: int, plain: float) -> str:
    """A line for every tree, and the fastest one's line to paste."""
    said = [
        f"accepted nodes counted in {steps} steps of {counted} prompts; timed on the others, plain {plain:.1f} tokens/s"
    ]
    said.append(f"{'nodes':>5} {'expected':>9} {'tokens/step':>12} {'tokens/s':>9} {'to plain':>9}  drafter")
    said += [
        f"{row.nodes:>5} {row.expected:>9.2f} {row.tokens_per_step:>12.2f} {row.tokens_per_second:>9.1f} "
        f"{row.ratio_to_plain:>9.2f}  {row.drafter}"
        for row in rows
    ]
    best: Any = max(rows, key=lambda row: row.tokens_per_second)
    return "\n".join([*said, best.drafter]) + "\n"
