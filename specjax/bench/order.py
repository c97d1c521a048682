"""`specjax bench order`: the pass in which each position was filled, by policy."""

import dataclasses
from typing import Any

import jax
import numpy as np

from specjax.bench.engines import engines_of, requests_of
from specjax.bench.options import BenchOptions
from specjax.bench.prompts import prompts_of, read_input
from specjax.bench.run import progress
from specjax.jobs import jsonl
from specjax.terminal import bad_input, note, write
from specjax.viz.files import check_plot


@dataclasses.dataclass(frozen=True)
class Row:
    """One policy's order of filling a canvas.

    Attributes:
      decoder: its name.
      passes: the total number of forward passes.
      order: for every position after the prompt, the step that wrote its final token, from 1; 0 if it was given. A step
        is a pass.
    """

    decoder: str
    passes: int
    order: tuple[int, ...]


def unmask_order(decoder: Any, params: Any, state: Any) -> tuple[np.ndarray, Any]:
    """Runs a diffusion decoder to the end; returns the step that wrote each final token and the state.

    The steps are `[B, L]` int32; 0: given."""
    step = jax.jit(decoder.step)
    before = np.asarray(state.tokens)
    order, count = np.zeros(before.shape, np.int32), 0
    while not np.asarray(state.done).all():
        state, _ = step(params, state)
        count += 1
        now = np.asarray(state.tokens)
        order[(now != before) & (now != decoder.mask_id)] = count
        before = now
    return order, state


def command(options: BenchOptions) -> int:
    """Runs the suite; returns the exit status."""
    with bad_input():
        if options.plot:
            check_plot(options.plot)
        lines = read_input(options)
        engines, skipped = engines_of(options)
        model = next(iter(engines.values())).model
        (text, *_), (suffix, *_) = prompts_of(lines, options, model)
        if model.masked is None or model.any_subset:
            raise ValueError(f"the suite order is for diffusion models: {model.name} writes from left to right")
        if model.canvas:
            raise ValueError(
                f"the suite order is for models with a mask: a canvas of {model.name} is text only once all of it is final"
            )
        requests = requests_of(options, engines, [text], [suffix], skipped)
    for reason in skipped:
        note(reason)
    rows = []
    with progress(len(requests)) as advance:
        for name in requests:
            engine = engines[name]
            (request,) = requests[name]
            state = engine.start([dataclasses.replace(request, ignore_eos=True)])
            order, state = unmask_order(engine.decoder, engine.params, state)
            behind = order[0, len(request.ids) :][: request.max_new_tokens + len(request.suffix_ids)]
            rows.append(Row(name, int(state.stats.steps[0]), tuple(behind.tolist())))
            advance(name)
    if options.json:
        write(jsonl.dumps({"rows": [dataclasses.asdict(row) for row in rows]}) + "\n")
    else:
        table(rows)
    if options.plot:
        from specjax.viz import figures

        figures.unmask_order(rows).savefig(options.plot, dpi=120)
    return 0


def table(rows: list[Row]) -> None:
    """Prints passes and the order."""
    from rich.console import Console
    from rich.table import Table

    shown = Table(title="the step that wrote each position; 0: given", title_justify="left")
    shown.add_column("decoder", no_wrap=True)
    shown.add_column("passes", justify="right")
    shown.add_column("order")
    for row in rows:
        shown.add_row(row.decoder, str(row.passes), " ".join(map(str, row.order)))
    console = Console(highlight=False)
    if not console.is_terminal:  # a file has no width limit
        console.width = 160
    console.print(shown)
