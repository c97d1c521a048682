"""`specjax plan train`: the cost of a head's update on a TPU slice or an H100 machine, from a configuration only.

In the shape descriptions `B` denotes rows and `T` tokens per row.
"""

import dataclasses
import functools
import json
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax import models
from specjax.plan.command import PlanOptions, read_batches
from specjax.plan.rates import rated
from specjax.serve.options import check_least, option, same
from specjax.sharding import aot, make_mesh, shardings
from specjax.sharding.rules import placed
from specjax.terminal import BadInput, bad_input, flag, write
from specjax.train.options import COMPUTE_DTYPES, CaptureOptions, TrainOptions

LAYERS = (4, 6)
"""The depths of the two targets from which a deeper one is extrapolated; a head reads three layers, which is the
minimum."""

LEVEL = "O1"
"""How much the compiler optimises an update. The usual level takes several times as long, and has fewer temporaries."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanTrainOptions:
    """Options of `specjax plan train`; see the help of each."""

    drafter: str = option(dataclasses.MISSING, "the head, as in train", metavar="DRAFTER", positional=True)
    target: str = option(dataclasses.MISSING, "hub name of a built-in configuration, shipped name, or folder")
    config: str = same(PlanOptions, "config")
    topology: str = same(PlanOptions, "topology")
    mesh: str | None = same(PlanOptions, "mesh")
    batch_size: str = option("8", "rows per update, or several numbers for a table: 8,16,32")
    accumulate: int = same(TrainOptions, "accumulate")
    length: int = option(2048, "tokens per row", least=2)
    features: bool = option(False, "the target's outputs were captured (see capture), so the target does not run")
    draft_vocabulary: int | None = option(None, "number of tokens that the draft knows")
    loss: str | None = same(TrainOptions, "loss")
    dtype: str = option("bfloat16", "type of the target")
    compute_dtype: str = option("bfloat16", "type of the head's products, as in train", choices=COMPUTE_DTYPES)
    weights: str | None = same(PlanOptions, "weights")
    rates: str | None = same(PlanOptions, "rates")
    whole: bool = same(PlanOptions, "whole")
    json: bool = same(PlanOptions, "json")


@dataclasses.dataclass(frozen=True)
class Update:
    """An update as shapes, without its arrays.

    Attributes:
      objective: the head's objective.
      settings: of the update.
      state: a `specjax.train.loop.TrainState` of `ShapeDtypeStruct`s with shardings.
      target: the frozen parameters that it reads, likewise.
      batch: the batch, likewise.
    """

    objective: Any
    settings: Any
    state: Any
    target: Any
    batch: Any


def command(options: PlanTrainOptions) -> int:
    """Runs `specjax plan train`."""
    jax.config.update("jax_platforms", "cpu")  # nothing runs; the machine's own accelerators stay free
    with bad_input():
        check_least(options, flag)
        chip = rated(aot.chip_of(options.topology), options.rates)
        sizes = read_batches("--batch-size", options.batch_size)
    records: list[dict[str, Any]] = []
    for number, rows in enumerate(sizes):
        records.append(_one(options, chip, rows))
        if number and number == len(sizes) - 1:
            records[-1]["largest_batch"] = largest(records)
        write(json.dumps(records[-1]) + "\n" if options.json else _told(records[-1]))
    if not any(record["fits"] for record in records):
        raise BadInput(records[0]["reason"])
    return 0


def largest(records: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The number of rows that fit, extrapolated linearly from the two largest compiled batches.

    It is a multiple of what the mesh and the parts require. None if there are not two batches, or if more rows take no
    more memory.

    Args:
      records: of several batch sizes, otherwise equal.
    """
    compiled = {r["batch_size"]: r["bytes_per_chip"] for r in records if "temporaries" in r["bytes_per_chip"]}
    through = sorted(compiled)[-2:]
    if len(through) < 2:
        return None
    few, many = through
    each = (compiled[many]["total"] - compiled[few]["total"]) / (many - few)
    if each <= 0:
        return None
    step = records[0]["mesh"].get("data", 1) * records[0]["accumulate"]
    rows = many + (compiled[many]["limit"] - compiled[many]["total"]) / each
    return {"rows": max(0, int(rows // step) * step), "through": through, "bytes_per_row": round(each)}


def prepare(options: PlanTrainOptions, model: models.Model, mesh: Any, rows: int) -> Update:
    """An update of B = `rows` rows.

    Args:
      options: the command's options.
      model: what `specjax.models.abstract` returned for this mesh.
      mesh: of devices that need not exist.
      rows: B.

    Raises:
      ValueError: if there is no such head, if it is not for this target, or if it runs layers of the target itself.
    """
    from specjax.assembly.line import read_line
    from specjax.models.loading import outer
    from specjax.objectives.base import Batch
    from specjax.train.capture import said_of
    from specjax.train.data import Rows
    from specjax.train.features import wanted
    from specjax.train.loop import Settings, TrainState
    from specjax.train.trainable import heads as trained_heads

    name = read_line(options.drafter, "drafter").name
    heads = trained_heads()
    if name not in heads:
        raise ValueError(f"cannot plan the training of {name!r}; choose {', '.join(heads)}")
    if rows % options.accumulate:
        raise ValueError(f"--accumulate {options.accumulate} does not divide --batch-size {rows}")
    asked = TrainOptions(
        drafter=options.drafter,
        data=(),
        output="",
        loss=options.loss,
        draft_vocabulary=options.draft_vocabulary,
    )
    tokens = np.arange(options.draft_vocabulary or 1)[None]  # any ids will do
    objective = heads[name].made(model, asked, lambda: Rows(tokens, np.ones(tokens.shape, bool)))
    compute_dtype = options.compute_dtype if objective.follows_dtype else "float32"
    settings = Settings(steps=1000, accumulate=options.accumulate, compute_dtype=compute_dtype)

    def begun(target):
        params = objective.init(jax.random.key(0), target)
        return TrainState.begun(settings, jax.tree.map(lambda x: x.astype(jnp.float32), params))

    state = jax.eval_shape(begun, model.params)
    shape = (rows, options.length)
    kinds = {"tokens": jnp.int32, "mask": jnp.bool_, "documents": jnp.int32}
    arrays: dict[str, Any] = {key: jax.ShapeDtypeStruct(shape, kind) for key, kind in kinds.items()}
    target = model.params
    if options.features:
        said = functools.partial(said_of, model.lm, wanted(name, objective), 0, CaptureOptions.save_dtype)
        arrays["output"] = jax.eval_shape(lambda params, rows: said(params, Batch(**rows)), target, arrays)
        target = outer(target)
    axes = jax.tree.map(lambda x: ("batch",) + (None,) * (x.ndim - 1), arrays)
    batch = Batch(**placed(arrays, shardings(mesh, axes, arrays)))
    return Update(objective, settings, placed(state, state.places(objective, settings, mesh)), target, batch)


def cost_of(update: Update, mesh: Any) -> Any:
    """The `specjax.plan.step.Cost` of a compiled update."""
    from specjax.plan import step
    from specjax.plan.hlo import traffic
    from specjax.train import loop

    began = time.process_time()
    lowered = loop.update.lower(update.objective, update.settings, update.state, update.target, update.batch, mesh=mesh)
    program = aot.compiled(lowered, LEVEL)
    seconds = time.process_time() - began
    return dataclasses.replace(step.cost_of(program, traffic(program.as_text() or "")), compile_seconds=seconds)


def _one(options: PlanTrainOptions, chip: Any, rows: int) -> dict[str, Any]:
    """The record of one batch size."""
    from specjax.models import loading
    from specjax.plan import fit, step
    from specjax.plan.held import chip_bytes
    from specjax.plan.report import roofline

    config = None if options.config == "builtin" else options.config
    with bad_input():
        model = models.abstract(options.target, options.dtype, config=config, weights=options.weights)
        spec = fit.check_mesh(options.mesh, options.topology, model.lm.axis_counts()["heads"], rows)
        if options.length > model.lm.config.max_position_embeddings:
            fit.context_for(model, options.length)
        mesh: Any = make_mesh(spec, aot.devices(options.topology))
        model = models.abstract(options.target, options.dtype, mesh, config, options.weights)
        update = prepare(options, model, mesh, rows)
    held = {
        "target": chip_bytes(update.target),
        "parameters": chip_bytes(update.state.params),
        "moments": chip_bytes(update.state.optimizer),
        "batch": chip_bytes(update.batch),
    }
    layers = model.lm.num_layers
    at = (layers,) if options.features or options.whole or layers <= LAYERS[1] else LAYERS
    cost, reason = None, None
    try:
        few = [prepare(options, loading.with_layers(model, count, mesh), mesh, rows) for count in at]
        costs = [cost_of(one, mesh) for one in few]
        cost = costs[0] if len(at) == 1 else step.extrapolated(costs, at, layers)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        reason = f"the compiler runs out of a {chip.name}'s memory ({str(error).splitlines()[0]})"
    memory = held | ({} if cost is None else {"temporaries": round(cost.temporaries)})
    total: int = sum(memory.values())
    if reason is None and total > chip.hbm_bytes:
        reason = f"it needs {total / 1e9:.1f} GB per chip and {options.topology} has {chip.hbm_bytes / 1e9:.1f}"
    own = {
        "drafter": options.drafter, "target": options.target, "dtype": options.dtype, "weights": model.weights,
        "topology": options.topology, "mesh": dict(mesh.shape), "chips": mesh.size, "batch_size": rows,
        "accumulate": options.accumulate, "compute_dtype": update.settings.compute_dtype,
        "length": options.length, "features": options.features, "draft_vocabulary": options.draft_vocabulary,
        "fits": reason is None, "reason": reason and f"{reason}: try fewer rows, --accumulate, or a larger slice",
        "bytes_per_chip": memory | {"total": total, "limit": chip.hbm_bytes},
    }  # fmt: skip
    if cost is None:
        return own
    seconds = roofline(chip, cost, mesh.size, options.topology)
    return own | {
        "bytes_accessed": round(cost.bytes),
        "flops": round(cost.flops),
        "collectives": {kind: {k: round(v) for k, v in entry.items()} for kind, entry in cost.collectives.items()},
        "seconds": seconds,
        "tokens_per_second": round(rows * options.length / seconds["step"], 1),
        "compiled_layers": list(at),
        "compile_seconds": round(cost.compile_seconds, 2),
    }


def _told(r: dict[str, Any]) -> str:
    """A record in words."""
    mesh = ",".join(f"{axis}={size}" for axis, size in r["mesh"].items())
    memory = r["bytes_per_chip"]
    parts = ", ".join(f"{name} {size / 1e9:.3f}" for name, size in memory.items() if name not in ("total", "limit"))
    known = f", draft vocabulary {r['draft_vocabulary']}" if r["draft_vocabulary"] else ""
    lines = [
        f"{r['drafter']} for {r['target']} {r['dtype']} on {r['topology']}, {r['chips']} chips, mesh {mesh}",
        f"update     {r['batch_size']} rows of {r['length']} tokens in {r['accumulate']} parts{known}, products in "
        f"{r['compute_dtype']}{', captured features' if r['features'] else ''}",
        f"memory     {memory['total'] / 1e9:.3f} GB per chip: {parts}",
        f"fits       {'yes' if r['fits'] else 'no'}, a chip has {memory['limit'] / 1e9:.3f} GB",
    ]
    if most := r.get("largest_batch"):
        few, many = most["through"]
        line = f"the line through {few} and {many}, {most['bytes_per_row'] / 1e9:.3f} GB per row; not compiled"
        lines.append(f"largest    {most['rows']} rows fit by {line}")
    if "seconds" in r:
        kinds = ", ".join(f"{e['count']} {kind} of {e['bytes'] / 1e9:.2f} GB" for kind, e in r["collectives"].items())
        seconds = {name: f"{1e3 * value:.0f}" for name, value in r["seconds"].items()}
        lines += [
            f"traffic    {r['bytes_accessed'] / 1e9:.1f} GB per chip and update",
            f"compute    {r['flops'] / 1e12:.1f} TFLOP a chip and update",
            f"collective {kinds or 'none'}",
            f"roofline   {seconds['step']} ms an update: memory {seconds['memory']}, compute {seconds['compute']}, "
            f"collectives {seconds['collectives']}",
            f"speed      {r['tokens_per_second']:.0f} tokens/s",
            f"compile    {r['compile_seconds']:.0f} CPU seconds here",
        ]
        if len(r["compiled_layers"]) > 1:
            low, high = r["compiled_layers"]
            lines.append(
                f"compiled for targets of {low} and {high} layers, the rest on the line through them (--whole)"
            )
    return "\n".join(lines) + "\n"
