"""`specjax train`: a drafter's parameters from text, for a target that stays as it is."""

import argparse
import dataclasses
import functools
import math
from pathlib import Path
from typing import Any

import jax

from specjax.spec.line import read_line
from specjax.train.losses import LOSSES
from specjax.train.tasks import OBJECTIVES, Task


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of `specjax train`."""
    add = parser.add_argument
    add("drafter", metavar="DRAFTER", help=f"name:field=value,... of {', '.join(OBJECTIVES)}")
    add("--target", help="folder, shipped name or hub id (default: the shipped target)")
    add("--data", nargs="+", required=True, metavar="FILE", help=".jsonl, .txt or .py files, or folders of them")
    add("--output", required=True, metavar="FOLDER", help="for the parameters, and `training/` beside them")
    add("--draft", metavar="MODEL", help="distill: the small model to start from")
    add("--draft-config", metavar="FILE", help="distill: a config.json of a small model to start from nothing")
    add("--reference", metavar="MODEL", help="distill with keep below 1: an already distilled copy of the start")
    add(
        "--draft-vocabulary",
        type=int,
        metavar="N",
        help="heads: the draft knows the data's N most frequent tokens only",
    )
    add("--loss", help=f"name:field=value,... of {', '.join(LOSSES)} (default: the drafter's own)")
    add("--steps", type=int, default=1000, help="updates")
    add("--batch-size", type=int, default=8, help="rows an update")
    add("--accumulate", type=int, default=1, help="parts that a batch is split into to save memory; same result")
    add("--length", type=int, default=256, help="tokens a row")
    add("--learning-rate", type=float, default=3e-4, help="the highest; it falls to 0 as a cosine")
    add("--warmup", type=int, help="steps until then (default: a twentieth of all)")
    add("--weight-decay", type=float, default=0.0, help="of AdamW")
    add("--clip", type=float, default=1.0, help="largest norm of a gradient")
    add("--seed", type=int, default=0, help="of parameters, data order and samples")
    add("--checkpoint-every", type=int, default=500, metavar="STEPS", help="the latest two checkpoints are kept")
    add("--resume", action="store_true", help="go on with the run in --output exactly where its last checkpoint was")
    add("--dtype", help="of the target: float32, bfloat16 or float16 (default: float32 on a CPU, else bfloat16)")
    add("--save-dtype", default="float32", help="of the parameters on disk")
    add("--mesh", help="devices by axis, such as data=2,model=4 (default: one device)")
    add("--plot", metavar="FILE.png", help="write a picture of the loss")


def command(args: argparse.Namespace) -> int:
    """Trains for parsed options; returns the exit status."""
    from specjax.terminal import bad_input, complain, note

    with bad_input():
        task, batches, settings, run, mesh, about = prepare(args)
    for line in about:
        note(line)
    from specjax.train.loop import NotFinite, fit

    seen: list[dict[str, float]] = []
    with run:
        try:
            params = fit(
                task.objective, task.params, task.frozen, batches, settings, run,
                checkpoint_every=args.checkpoint_every, mesh=mesh, on_step=seen.append,
            )  # fmt: skip
        except NotFinite as error:
            complain(str(error))
            return 1
    task.save(Path(args.output), params)
    if args.plot:
        from specjax.train.plot import plot

        plot(run.metrics_file, args.plot)
    if seen:
        part = -(-len(seen) // 10)
        mean = lambda records, name: sum(record[name] for record in records) / len(records)
        names = [name for name in ("loss", "acceptance") if name in seen[0]]
        change = [f"{name} {mean(seen[:part], name):.4f} to {mean(seen[-part:], name):.4f}" for name in names]
        note(f"over the first and the last {part} of {len(seen)} steps: {', '.join(change)}")
    note(f"written to {args.output}")
    return 0


def prepare(args: argparse.Namespace) -> tuple[Task, Any, Any, Any, Any, list[str]]:
    """Task, batches, settings, run, mesh, and lines that say what will be done. The cheap checks come first.

    Raises:
      ValueError: on whatever cannot be used, before any training.
    """
    for name in ("batch_size", "checkpoint_every"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(args, name)}")
    if args.length < 2:
        raise ValueError(f"--length must be at least 2, got {args.length}")
    if args.batch_size % max(args.accumulate, 1):
        raise ValueError(f"--accumulate {args.accumulate} does not divide --batch-size {args.batch_size}")
    name = read_line(args.drafter, "drafter").name
    if name not in OBJECTIVES:
        raise ValueError(f"cannot train {name!r}; choose {', '.join(OBJECTIVES)}")
    output = Path(args.output)
    if output.is_file():
        raise ValueError(f"--output {args.output!r} is a file; give a folder")
    if (output / "config.json").exists() and not args.resume:
        raise ValueError(f"--output {args.output!r} holds a model already; choose another folder")
    if args.plot:
        from specjax.bench.report import check_plot

        check_plot(args.plot)

    from specjax import models
    from specjax.serve.engine import DEFAULT_MODEL
    from specjax.sharding import make_mesh
    from specjax.train import data, loop

    warmup = args.steps // 20 if args.warmup is None else args.warmup
    settings = loop.Settings(
        steps=args.steps, learning_rate=args.learning_rate, warmup=warmup, weight_decay=args.weight_decay,
        clip=args.clip, accumulate=args.accumulate, seed=args.seed,
    )  # fmt: skip
    models.resolve_dtype(args.save_dtype)
    mesh = make_mesh(args.mesh)
    target = models.load(args.target or DEFAULT_MODEL, dtype=args.dtype, mesh=mesh)
    longest = target.lm.config.max_position_embeddings
    if args.length > longest:
        raise ValueError(f"--length {args.length} is more than the {longest} positions that {target.name} was made for")
    read = functools.cache(lambda: data.read_rows(args.data, target, args.length, args.seed))
    task = OBJECTIVES[name](target, args, read)
    rows = read()
    about = {
        "objective": repr(task.objective), **dataclasses.asdict(settings), "batch_size": args.batch_size,
        "length": args.length, "data": rows.digest, "target": target.name,
    }  # fmt: skip
    run = loop.Run(output / "training", about, resume=args.resume)
    batches = data.batches(rows, args.batch_size, args.seed)
    return task, batches, settings, run, mesh, _about(args, target, task, rows)


def _about(args: argparse.Namespace, target: Any, task: Task, rows: Any) -> list[str]:
    count = sum(math.prod(x.shape) for x in jax.tree.leaves(task.params))
    lines = [
        f"{args.drafter} for {target.name}: {count / 1e6:.2f}M parameters, {len(rows)} rows of {args.length} tokens, "
        f"{rows.mask.sum()} to predict, {args.steps} steps of {args.batch_size} rows"
    ]
    if rows.skipped:
        lines.append(f"left out {len(rows.skipped)} lines of the data, the first: {rows.skipped[0]}")
    return lines
