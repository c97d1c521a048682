"""`specjax capture`: stores a target's outputs on training text, so that heads can be trained without running it."""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax import models, programs
from specjax.assembly.line import read_line
from specjax.jobs import hosts
from specjax.kernels.chunks import chunked
from specjax.lm import LM, Output, Wants
from specjax.models import DEFAULT_MODEL
from specjax.models.loading_bar import bar
from specjax.objectives.base import Batch, read
from specjax.objectives.teacher import CHUNK
from specjax.serve.options import check_least
from specjax.settings import settled
from specjax.sharding import distributed, make_mesh
from specjax.sharding.rows import own_rows
from specjax.terminal import BadInput, bad_input, flag
from specjax.terminal import note as tell
from specjax.train import data, prompts
from specjax.train.features import INDEX, Index, named, said_by, wanted, write_rows
from specjax.train.options import CaptureOptions, TrainOptions
from specjax.train.several import check as check_several
from specjax.train.task import check_encoder
from specjax.train.trainable import heads as trained_heads

Array = jax.Array

FILE_BYTES = 256 << 20
"""The size of a file up to which batches of rows share it."""
_MAY_DIFFER = ("data",)
"""Options that may differ between processes; the text itself is compared."""


def command(options: CaptureOptions) -> int:
    """Captures for parsed options; returns the exit status."""
    with bad_input():
        several = hosts.asked(options, options.mesh)
    if not several:
        return _here(options)
    stands = (
        f"{options.output} keeps every file that was finished, and the same command in all processes goes on from there"
    )
    return hosts.together(options, stands, lambda first: _here(options, several))


def _here(options: CaptureOptions, several: bool = False) -> int:
    folder, first = Path(options.output), distributed.is_first()
    programs.keep()
    note = tell if first else lambda message: None
    try:
        with bad_input():
            if several:
                check_several(options, _MAY_DIFFER, options.batch_size, "--batch-size")
            wants, target, mesh = prepare(options)
            files = prompts.written(options, target, folder)
            rows = data.read_rows(files, target, options.length, options.seed, folder=folder / "rows")
            if several:
                hosts.check_same({"--data": rows.digest})
            index = _index(options, target, wants, rows)
    except prompts.Stopped as stopped:
        return stopped.status
    every = list(index.files())
    there = distributed.from_first(np.asarray([(folder / name).is_file() for name, _ in every], np.int32))
    left = [file for file, is_there in zip(every, there, strict=True) if not is_there]
    done = len(rows) - sum(len(span) for _, span in left)
    note(
        f"{options.drafter} of {target.name}: {len(rows)} rows of {index.length} tokens, {index.row_bytes / index.length:.0f} "
        f"bytes per token, {len(rows) * index.row_bytes / 1e9:.3f} GB" + (f"; {done} rows were there" if done else "")
    )
    if rows.skipped:
        note(f"left out {len(rows.skipped)} lines of the data, the first: {rows.skipped[0]}")
    showing = bar(f"capturing {target.name}", len(rows)) if first else contextlib.nullcontext(lambda parts: None)
    with showing as advance:
        advance(done)
        for name, span in left:
            parts = []
            for arrays in _captured(options, target, mesh, wants, rows, span):
                parts.append(arrays)
                advance(len(arrays["tokens"]))
            _check_finite(parts, options.save_dtype)
            if first:
                write_rows(folder / name, {key: np.concatenate([part[key] for part in parts]) for key in parts[0]})
    distributed.anywhere(False)  # no process leaves while the first one writes
    note(f"written to {folder}; train with --features {folder}")
    return 0


def prepare(options: CaptureOptions) -> tuple[Wants, models.Model, Any]:
    """Prepares the capture, the target and the mesh. Cheap checks come first.

    Raises:
      ValueError: on anything unusable, before any work.
    """
    check_least(options, flag)
    prompts.check_sources(options)
    if Path(options.output).is_file():
        raise ValueError(f"--output {options.output!r} is a file; give a folder")
    models.resolve_dtype(options.save_dtype)
    name = read_line(options.drafter, "drafter").name
    heads = trained_heads()
    if name not in heads:
        raise ValueError(f"cannot capture for {name!r}; choose {', '.join(heads)}")
    mesh = make_mesh(options.mesh)
    if mesh is not None and jax.process_count() > 1:
        distributed.meet(mesh)  # before one process compiles for longer than the others wait
    target = models.load(
        options.target or DEFAULT_MODEL,
        dtype=options.dtype,
        mesh=mesh,
        adapter=options.adapter,
        weights=options.weights,
    )
    check_encoder(target, "text", name)
    if options.length > target.max_length:
        raise ValueError(
            f"--length {options.length} is more than the {target.max_length} positions that {target.name} was made for"
        )
    if (options.top_k or 0) > target.lm.vocab_size:
        raise ValueError(f"--top-k {options.top_k} is more than the {target.lm.vocab_size} tokens of {target.name}")
    objective = heads[name].made(target, TrainOptions(drafter=options.drafter, output=""), _no_rows)
    return wanted(name, objective), target, mesh


def _no_rows() -> data.Rows:
    raise ValueError("captured features depend on no text")


def _index(options: CaptureOptions, target: models.Model, wants: Wants, rows: data.Rows) -> Index:
    """The folder's index, which is written if there is none.

    Raises:
      ValueError: if the folder belongs to another capture.
    """
    folder = Path(options.output)
    before = Index.read(folder) if (folder / INDEX).exists() else None
    one = jax.eval_shape(lambda: Batch.placed({name: x[None] for name, x in rows[0].items()}, None))
    said = jax.eval_shape(functools.partial(_said, *_how(options, target, wants)), target.params, one)
    every = {"tokens": one.tokens, "mask": one.mask, "documents": one.documents, **named(said)}
    arrays = {name: [x.dtype.name, list(x.shape[1:])] for name, x in every.items()}
    text = rows.digest, len(rows), options.length, rows.due
    index = Index(said_by(target), target.dtype_name, *text, 1, arrays)
    batches = max(1, FILE_BYTES // (index.row_bytes * options.batch_size))
    each = options.rows_per_file or (before.rows_per_file if before else batches * options.batch_size)
    index = dataclasses.replace(index, rows_per_file=each)
    if before is not None:
        index.check_same(before, folder)
        return before
    if any(folder.glob("rows-*")):
        raise ValueError(f"{str(folder)!r} holds rows but no {INDEX}: choose another --output")
    if distributed.is_first():
        index.write(folder)
    return index


def _captured(
    options: CaptureOptions, target: models.Model, mesh: Any, wants: Wants, rows: data.Rows, span: range
) -> Iterator[dict[str, np.ndarray]]:
    """Yields all arrays of some rows, batch by batch; the next batch is computed while one is fetched. Every process
    gets all of them."""
    here = own_rows(mesh, options.batch_size)
    waiting: tuple[dict[str, np.ndarray], Output] | None = None
    for number in range(math.ceil(len(span) / options.batch_size)):
        own = [rows[i] for i in span[number * options.batch_size : (number + 1) * options.batch_size]]
        taken = {name: np.stack([row[name] for row in own]) for name in own[0]}
        fill = lambda x: np.pad(x, ((0, options.batch_size - len(x)), (0, 0)))[here]
        batch = Batch.placed(jax.tree.map(fill, taken), mesh)
        said = said_of(*_how(options, target, wants), target.params, batch)
        if waiting is not None:
            yield _fetched(*waiting)
        waiting = taken, said
    if waiting is not None:
        yield _fetched(*waiting)


def _check_finite(parts: list[dict[str, np.ndarray]], dtype: str) -> None:
    """Ends the command if a feature does not fit the type in which it is stored."""
    kept = (x for part in parts for x in part.values() if x.dtype == dtype == "float16")
    if not all(np.isfinite(x).all() for x in kept):
        raise BadInput("features of this target are larger than float16 holds (65,504): give --save-dtype bfloat16")


def _fetched(own: dict[str, np.ndarray], said: Output) -> dict[str, np.ndarray]:
    count = len(own["tokens"])
    return own | {name: x[:count] for name, x in distributed.to_host(named(said)).items()}


def _how(options: CaptureOptions, target: models.Model, wants: Wants) -> tuple[LM, Wants, int, str]:
    return target.lm, wants, options.top_k or 0, options.save_dtype


def _said(lm: LM, wants: Wants, top_k: int, dtype: str, params: Any, batch: Batch) -> Output:
    """A target's outputs on a batch, as they are stored.

    Args:
      lm: the target.
      wants: the outputs that a head reads.
      top_k: the teacher's likeliest tokens; 0: its final features.
      dtype: the type of features. Log-probabilities are float32.
      params: the target's.
      batch: the rows.

    Returns:
      The features of `wants`, and either `final`, or `topk` with log-probabilities over the whole vocabulary.
    """
    output = read(lm, params, batch, wants | Wants(final=True))
    topk, final = None, output.final
    if top_k:
        likeliest = lambda h: jax.lax.top_k(jax.nn.log_softmax(lm.unembed(params, h).astype(jnp.float32)), top_k)
        topk = tuple(chunked(likeliest, final, max(1, CHUNK // len(batch.tokens))))
    kept = lambda x: x.astype(dtype)
    hidden = None if output.hidden is None else {layer: kept(output.hidden[layer]) for layer in wants.hidden}
    return Output(None, topk=topk, hidden=hidden or None, final=kept(final) if wants.final or not top_k else None)


said_of = jax.jit(settled(_said), static_argnums=(0, 1, 2, 3))
