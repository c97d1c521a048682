"""`specjax bench tree`: the fastest tree for a drafter on this machine, made of the nodes that are accepted most often.

The tree of the drafter's line is the one to be measured. On every other prompt, the nodes that the target accepts are
counted. Parts of the tree, from 1 drafted node to all, are made of the most accepted ones
(`specjax.expand.search.most_accepted`), and decode the other prompts, in rounds that alternate. For `ppd`, the candidates of
its prompt tokens are counted, and trees for its states are searched within some numbers of slots.
"""

import dataclasses
from typing import Any

from specjax.assembly.line import lines, read_line
from specjax.assembly.registry import DRAFTERS
from specjax.bench.engines import engines_of, requests_of
from specjax.bench.options import BenchOptions
from specjax.bench.prompts import prompts_of, read_input
from specjax.bench.run import Contestant, Ours, measure, progress, summarise
from specjax.bench.tree_parts import tried
from specjax.jobs import jsonl
from specjax.serve.engine import Engine
from specjax.terminal import bad_input, note, write


@dataclasses.dataclass(frozen=True)
class Row:
    """A tree that was tried.

    Attributes:
      drafter: its line.
      nodes: slots that a step reads beside the root; see `tree_parts.Tried`.
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
        requests = requests_of(options, {"none": plain}, prompts, suffixes, skipped)["none"]
        trees, counted = tried(asked, plain, drafting, requests[::2], options.batch_size)
    for reason in skipped:
        note(reason)
    timed = {"none": plain} | {one.line: Engine(plain.model, drafter=one.line, mesh=plain.mesh) for one in trees}
    contestants: dict[str, Contestant] = {
        name: Ours(engine, requests[1::2], options.batch_size, engine.capacity(requests[1::2]), options.ignore_eos)
        for name, engine in timed.items()
    }
    with progress(len(contestants) * (options.repeats + 1)) as advance:
        report = summarise(measure(contestants, options.repeats, advance), {}, "", bool(options.temperature))
    known = {one.line: one for one in trees}
    rows = [
        Row(
            row.decoder, known[row.decoder].nodes, known[row.decoder].expected, row.tokens_per_step, row.tokens_per_second,
            row.ratio_to_plain,
        )
        for row in report.rows[1:]
    ]  # fmt: skip
    if options.json:
        write(jsonl.dumps({"counted": counted, "rows": [dataclasses.asdict(row) for row in rows]}) + "\n")
    else:
        write(shown(rows, counted, report.rows[0].tokens_per_second))
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
    drawn = lambda entry: any(isinstance(entry.fields.get(name), str) for name in ("tree", "trees"))  # not a flag
    able = [name for name, entry in DRAFTERS.items() if entry.expander or drawn(entry)]
    if entry is None or read_line(asked[0]).name not in able:
        raise ValueError(
            f"--drafter {asked[0]}: the suite tree is for drafters with a tree of one shape: {', '.join(able)}"
        )
    return asked[0]


def shown(rows: list[Row], counted: str, plain: float) -> str:
    """A line for every tree, and the fastest one's line to paste."""
    said = [f"{counted}; timed on the others, plain {plain:.1f} tokens/s"]
    said.append(f"{'nodes':>5} {'expected':>9} {'tokens/step':>12} {'tokens/s':>9} {'to plain':>9}  drafter")
    said += [
        f"{row.nodes:>5} {row.expected:>9.2f} {row.tokens_per_step:>12.2f} {row.tokens_per_second:>9.1f} "
        f"{row.ratio_to_plain:>9.2f}  {row.drafter}"
        for row in rows
    ]
    best: Any = max(rows, key=lambda row: row.tokens_per_second)
    return "\n".join([*said, best.drafter]) + "\n"
