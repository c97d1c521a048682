"""`specjax train`: a drafter's parameters from text, for a target that stays as it is."""

import dataclasses
import functools
import json
import math
from pathlib import Path
from typing import Any

import jax

from specjax import models
from specjax.serve.engine import DEFAULT_MODEL
from specjax.serve.options import check_least
from specjax.sharding import make_mesh
from specjax.spec.line import read_line
from specjax.terminal import bad_input, complain, flag, note
from specjax.train import data, loop
from specjax.train.options import TrainOptions
from specjax.train.tasks import OBJECTIVES, Task
from specjax.viz.files import check_plot


def command(options: TrainOptions) -> int:
    """Trains for parsed options; returns the exit status."""
    with bad_input():
        task, batches, settings, run, mesh, about = prepare(options)
    for line in about:
        note(line)
    seen: list[dict[str, float]] = []
    with run:
        try:
            params = loop.fit(
                task.objective, task.params, task.frozen, batches, settings, run,
                checkpoint_every=options.checkpoint_every, mesh=mesh, on_step=seen.append,
            )  # fmt: skip
        except loop.NotFinite as error:
            complain(str(error))
            return 1
    task.save(Path(options.output), params)
    if options.plot:
        from specjax.viz import figures

        records = [json.loads(line) for line in run.metrics_file.read_text().splitlines()]
        figures.training(records).savefig(options.plot, dpi=120)
    if seen:
        part = -(-len(seen) // 10)
        mean = lambda records, name: sum(record[name] for record in records) / len(records)
        names = [name for name in ("loss", "acceptance") if name in seen[0]]
        change = [f"{name} {mean(seen[:part], name):.4f} to {mean(seen[-part:], name):.4f}" for name in names]
        note(f"over the first and the last {part} of {len(seen)} steps: {', '.join(change)}")
    note(f"written to {options.output}")
    return 0


def prepare(options: TrainOptions) -> tuple[Task, Any, Any, Any, Any, list[str]]:
    """Task, batches, settings, run, mesh, and lines that say what will be done. The cheap checks come first.

    Raises:
      ValueError: on whatever cannot be used, before any training.
    """
    check_least(options, flag)
    if options.batch_size % max(options.accumulate, 1):
        raise ValueError(f"--accumulate {options.accumulate} does not divide --batch-size {options.batch_size}")
    name = read_line(options.drafter, "drafter").name
    if name not in OBJECTIVES:
        raise ValueError(f"cannot train {name!r}; choose {', '.join(OBJECTIVES)}")
    output = Path(options.output)
    if output.is_file():
        raise ValueError(f"--output {options.output!r} is a file; give a folder")
    if (output / "config.json").exists() and not options.resume:
        raise ValueError(f"--output {options.output!r} holds a model already; choose another folder")
    if options.plot:
        check_plot(options.plot)
    warmup = options.steps // 20 if options.warmup is None else options.warmup
    settings = loop.Settings(
        steps=options.steps, learning_rate=options.learning_rate, warmup=warmup, weight_decay=options.weight_decay,
        clip=options.clip, accumulate=options.accumulate, seed=options.seed,
    )  # fmt: skip
    models.resolve_dtype(options.save_dtype)
    mesh = make_mesh(options.mesh)
    target = models.load(
        options.target or DEFAULT_MODEL,
        dtype=options.dtype,
        mesh=mesh,
        adapter=options.adapter,
        weights=options.weights,
    )
    longest = target.lm.config.max_position_embeddings
    if options.length > longest:
        raise ValueError(
            f"--length {options.length} is more than the {longest} positions that {target.name} was made for"
        )
    read = functools.cache(lambda packed: data.read_rows(options.data, target, options.length, options.seed, packed))
    task = OBJECTIVES[name](target, options, functools.partial(read, True))
    if options.accumulate > 1 and not task.objective.divisible:
        raise ValueError(
            f"--accumulate {options.accumulate}: {name} with keep below 1 chooses among the tokens of a whole batch, which "
            "cannot come in parts: leave --accumulate out"
        )
    rows = read(task.objective.packed)
    about = {
        "objective": repr(task.objective), **dataclasses.asdict(settings), "batch_size": options.batch_size,
        "length": options.length, "data": rows.digest, "target": target.name,
        **({} if target.adapter is None else {"adapter": str(target.adapter.resolve())}),
        **({} if target.weights is None else {"weights": target.weights}),
    }  # fmt: skip
    run = loop.Run(output / "training", about, resume=options.resume)
    batches = data.batches(rows, options.batch_size, options.seed)
    return task, batches, settings, run, mesh, _about(options, target, task, rows)


def _about(options: TrainOptions, target: Any, task: Task, rows: Any) -> list[str]:
    count = sum(math.prod(x.shape) for x in jax.tree.leaves(task.params))
    lines = [
        f"{options.drafter} for {target.name}: {count / 1e6:.2f}M parameters, {len(rows)} rows of {options.length} tokens, "
        f"{rows.mask.sum()} to predict, {options.steps} steps of {options.batch_size} rows"
    ]
    if rows.skipped:
        lines.append(f"left out {len(rows.skipped)} lines of the data, the first: {rows.skipped[0]}")
    return lines
