"""`specjax train`: trains parameters on text: a drafter's, for an unchanged target, or a model's."""

import dataclasses
import functools
import json
import logging
import math
from pathlib import Path
from typing import Any

import jax

from specjax import models, programs
from specjax.assembly.line import read_line
from specjax.jobs import hosts
from specjax.models import DEFAULT_MODEL
from specjax.models.loading import outer
from specjax.objectives.base import TEXT, Kind, Objective, Recipe
from specjax.serve.options import check_least
from specjax.settings import settled
from specjax.sharding import distributed, make_mesh
from specjax.terminal import bad_input, complain, flag
from specjax.terminal import note as tell
from specjax.train import data, loop, prompts
from specjax.train.features import Features, Index
from specjax.train.held_out import HeldOut
from specjax.train.options import TrainOptions, length_of
from specjax.train.several import check as check_several
from specjax.train.task import Task, check_encoder
from specjax.train.trainable import trainable
from specjax.viz.files import check_plot

AHEAD = 2
"""Batches of captured rows that are read in advance."""
_MAY_DIFFER = ("data", "held_out", "features", "plot")
"""Options that may differ between processes; the text itself is compared."""


def command(options: TrainOptions) -> int:
    """Trains for parsed options; returns the exit status."""
    with bad_input():
        several = hosts.asked(options, options.mesh)
    if not several:
        return _here(options)
    stands = f"the same command with --resume in all processes goes on from the last checkpoint in {options.output}"
    return hosts.together(options, stands, lambda first: _here(options, several))


def _here(options: TrainOptions, several: bool = False) -> int:
    programs.keep()
    try:
        with bad_input():
            if several:
                rows = options.batch_size // max(options.accumulate, 1)
                check_several(options, _MAY_DIFFER, rows, "--batch-size over --accumulate")
            task, batches, held_out, settings, run, mesh, about = prepare(options)
            if several:
                hosts.check_same(run.about)
    except prompts.Stopped as stopped:
        return stopped.status
    status = _train(options, task, batches, held_out, settings, run, mesh, about)
    distributed.anywhere(False)  # no process leaves while the first one writes
    return status


def _train(
    options: TrainOptions, task: Task, batches: Any, held_out: Any, settings: Any, run: Any, mesh: Any, about: list[str]
) -> int:
    note = tell if distributed.is_first() else lambda message: None
    logging.getLogger("absl").setLevel(logging.CRITICAL)  # Orbax logs pages for what `NotSaved` says in one line
    for line in about:
        note(line)
    seen: list[dict[str, float]] = []
    try:
        with run:
            params = loop.fit(
                task.objective, task.params, task.frozen, batches, settings, run,
                checkpoint_every=options.checkpoint_every, held_out=held_out, mesh=mesh, on_step=seen.append,
            )  # fmt: skip
    except loop.NotFinite as error:
        if distributed.is_first():
            complain(str(error))
        return 1
    task.save(Path(options.output), distributed.to_host(params))
    if not distributed.is_first():
        return 0
    records = [json.loads(line) for line in run.metrics_file.read_text().splitlines()]
    if options.plot:
        from specjax.viz import figures

        figures.training(records).savefig(options.plot, dpi=120)
    if seen:
        part = -(-len(seen) // 10)
        mean = lambda records, name: sum(record[name] for record in records) / len(records)
        names = [name for name in ("loss", "acceptance") if name in seen[0]]
        change = [f"{name} {mean(seen[:part], name):.4f} to {mean(seen[-part:], name):.4f}" for name in names]
        note(f"over the first and the last {part} of {len(seen)} steps: {', '.join(change)}")
    last = records[-1]["step"]
    if last < options.steps:
        note(
            f"ended after step {last} of {options.steps}: {options.patience} checkpoints were no better on held-out text"
        )
    best = [record for record in records if record["step"] == run.best.step]
    if best:
        names = [
            name for name in best[0] if name.startswith(("held_out_loss", "held_out_perplexity", "held_out_acceptance"))
        ]
        words = ", ".join(f"{name.removeprefix('held_out_')} {best[0][name]:.4f}" for name in names)
        note(f"best on the held-out text after step {run.best.step} of {last}: {words}")
    note(f"written to {options.output}")
    return 0


@settled
def prepare(options: TrainOptions) -> tuple[Task, Any, Any, Any, Any, Any, list[str]]:
    """Prepares task, batches, held-out text, settings, run, mesh, and lines that describe the run. Cheap checks come
    first.

    Raises:
      ValueError: on anything unusable, before any training.
    """
    check_least(options, flag)
    prompts.check_sources(options)
    options = dataclasses.replace(options, length=_length(options))
    if options.batch_size % max(options.accumulate, 1):
        raise ValueError(f"--accumulate {options.accumulate} does not divide --batch-size {options.batch_size}")
    name = read_line(options.drafter, "drafter").name
    known = trainable()
    if name not in known:
        raise ValueError(f"cannot train {name!r}; choose {', '.join(known)}")
    output = Path(options.output)
    if output.is_file():
        raise ValueError(f"--output {options.output!r} is a file; give a folder")
    if (output / "config.json").exists() and not options.resume:
        raise ValueError(f"--output {options.output!r} holds a model already; choose another folder")
    if options.plot:
        check_plot(options.plot)
    warmup = options.steps // 20 if options.warmup is None else options.warmup
    settings = loop.Settings(
        steps=options.steps, learning_rate=options.learning_rate, warmup=warmup, accumulate=options.accumulate,
        seed=options.seed,
    )  # fmt: skip
    as_published(settings, options, Recipe())  # checks that the settings are possible
    if options.patience is not None and not options.held_out:
        raise ValueError("--patience counts checkpoints without a better one on held-out text: give it with --held-out")
    models.resolve_dtype(options.save_dtype)
    mesh = make_mesh(options.mesh)
    if mesh is not None and jax.process_count() > 1:
        distributed.meet(mesh)  # before one process compiles for longer than the others wait
    starts_from_layers = known[name].objective.starts_from_layers
    target = models.load(
        options.target or DEFAULT_MODEL,
        dtype=options.dtype,
        mesh=mesh,
        adapter=options.adapter,
        weights=options.weights,
        layers=options.features is None or starts_from_layers,
    )
    check_encoder(target, known[name].objective.lines, name, "train gad, or ")
    _check_length(options, target)
    read = functools.cache(functools.partial(_rows, options, target))
    task = known[name].make(target, options, functools.partial(read, TEXT))
    settings = as_published(settings, options, task.objective.recipe)
    settings = dataclasses.replace(settings, compute_dtype=_compute_dtype(options.compute_dtype, name, task.objective))
    kind = task.objective.kind
    rows, others = read(kind), _others(options, target, kind)
    if options.features is not None:
        rows, others = (None if found is None else found.reading(name, task.objective) for found in (rows, others))
        if starts_from_layers:
            task = dataclasses.replace(task, frozen=outer(task.frozen))
    held_out = None
    if others is not None:
        if others.digest == rows.digest:
            raise ValueError("--held-out has the text of --data: give it text that is not trained on")
        held_out = HeldOut(others, options.batch_size // options.accumulate, options.patience)
    about = {
        "objective": repr(task.objective), **dataclasses.asdict(settings), "batch_size": options.batch_size,
        "length": options.length, "data": rows.digest, "target": target.name,
        "held_out": held_out and held_out.rows.digest,
        **({"adapter": [str(folder.resolve()) for folder in target.adapter]} if target.adapter else {}),
        **({} if target.weights is None else {"weights": target.weights}),
        **({} if options.start is None else {"start": options.start}),
        **({} if options.features is None else {"features": rows.about}),
    }  # fmt: skip
    run = loop.Run(output / "training", about, resume=options.resume)
    batches = data.batches(rows, options.batch_size, options.seed, 0 if options.features is None else AHEAD, mesh)
    return task, batches, held_out, settings, run, mesh, _about(options, target, task, rows, held_out and held_out.rows)


def _length(options: TrainOptions) -> int:
    """Tokens per row."""
    if options.features is None:
        return length_of(options)
    stored = Index.read(Path(options.features)).length
    if options.length not in (None, stored):
        raise ValueError(f"--length {options.length}, and the rows of {options.features!r} have {stored} tokens")
    return stored


def _check_length(options: TrainOptions, target: Any) -> None:
    longest = target.lm.config.max_position_embeddings
    if length_of(options) > longest:
        raise ValueError(
            f"--length {options.length} is more than the {longest} positions that {target.name} was made for"
        )


def _rows(options: TrainOptions, target: Any, kind: Kind) -> Any:
    """The rows to train on. Text is tokenised once and kept in the run's folder."""
    if options.features is not None:
        return Features.open(Path(options.features), target)
    folder = Path(options.output) / "training"
    files = prompts.written(options, target, folder)
    return data.read_rows(files, target, length_of(options), options.seed, kind, folder / "rows")


def _others(options: TrainOptions, target: Any, kind: Kind) -> Any:
    """The held-out rows; None: nothing is held out."""
    if not options.held_out:
        return None
    if options.features is None:
        return data.read_rows(options.held_out, target, length_of(options), options.seed, kind)
    if len(options.held_out) > 1:
        raise ValueError("--held-out takes one captured folder with --features")
    return Features.open(Path(options.held_out[0]), target)


def as_published(settings: loop.Settings, options: TrainOptions, recipe: Recipe) -> loop.Settings:
    """Settings with clipping and weight decay; the defaults are those of the method's authors.

    Args:
      settings: all other settings.
      options: the user's options.
      recipe: the authors' values.
    """
    own = lambda asked, published: published if asked is None else asked
    return dataclasses.replace(
        settings,
        weight_decay=own(options.weight_decay, recipe.weight_decay),
        clip=own(options.clip, recipe.clip),
        clip_by=own(options.clip_by, recipe.clip_by),
    )


def _compute_dtype(asked: str | None, name: str, objective: Objective) -> str:
    """The type of an objective's products, as requested or the default."""
    if objective.follows_dtype:
        return models.resolve_dtype(asked).name
    if asked == "bfloat16":
        raise ValueError(f"--compute-dtype bfloat16 is for heads with layers of their own, not for {name}")
    return "float32"


def _about(options: TrainOptions, target: Any, task: Task, rows: Any, others: Any) -> list[str]:
    count = sum(math.prod(x.shape) for x in jax.tree.leaves(task.params))
    lines = [
        f"{options.drafter} for {target.name}: {count / 1e6:.2f}M parameters, {len(rows)} rows of {options.length} tokens, "
        f"{rows.due} to predict, {options.steps} steps of {options.batch_size} rows"
    ]
    if others is not None:
        lines.append(f"{len(others)} rows of held-out text, {others.due} tokens of it to predict")
    for name, read in (("data", rows), ("held-out text", others)):
        if read is not None and read.skipped:
            lines.append(f"left out {len(read.skipped)} lines of the {name}, the first: {read.skipped[0]}")
    return lines
