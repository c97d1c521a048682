"""`specjax plan`: the cost of a decoding step on a TPU slice or an H100 machine, from a configuration only."""

import dataclasses
import json
from typing import Any

import jax

from specjax import models
from specjax.decode import Diffusion, Plain, Speculate
from specjax.decode.diffusion import usual_unmask
from specjax.decode.lines import decode_of, usual_decode
from specjax.decode.speculate import DEFAULT_DRAFTER
from specjax.models.keeping import PACKED, any_packed
from specjax.plan.rates import rated
from specjax.serve.options import option
from specjax.sharding import aot, make_mesh
from specjax.terminal import BadInput, bad_input, note, write
from specjax.viz.files import check_plot


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """The options of `specjax plan`; see the help of each."""

    model: str = option(dataclasses.MISSING, "hub name of a built-in configuration, shipped name, or folder")
    config: str = option("builtin", "a config.json to take instead of the model's own")
    topology: str = option(dataclasses.MISSING, "v5e:4x4, v5p:2x2x4, v6e:2x2, h100:8, ...; t4:1 (not compiled)")
    mesh: str | None = option(None, "chips by axis, such as data=2,model=8 (default: all on the axis model)")
    batch: str | None = option(
        None, "rows, or several numbers for a table: 1,8,32 (default: 8; --memory tries 1 to 256)"
    )
    context: int | None = option(
        None, "slots per row, of text and cache (default: 8192, or as many as the model was made for)"
    )
    decode: tuple[str, ...] = option((), "as in generate; several make a table", metavar="LINE")
    drafter: tuple[str, ...] = option((), "as in generate; several make a table", metavar="LINE")
    dtype: str | None = option(None, "type of weights and cache (default: bfloat16, or float16 on a t4)")
    weights: str | None = option(
        None, "format of the model's matrices, as in generate: int8, int4, fp8, dfloat11 or packed"
    )
    cache_dtype: str | None = option(None, "type of the cache alone, as in generate: int8, float8_e4m3fn, ...")
    rates: str | None = option(
        None, "measured rates of the chip, as `python -m experiments.chip` writes them", metavar="FILE"
    )
    reduce_dtype: str | None = option(None, "type in which chips sum products, as in generate: float32 or bfloat16")
    tokens_per_step: float = option(1.0, "tokens that a row commits per step, for tokens/s")
    memory: str | None = option(
        None, "search tree, rows and cache type for the most tokens/s in so much memory: 24GB, 16GiB", metavar="SIZE"
    )
    accepted: float | None = option(
        None, "chance that a drafted token is the target's, for --memory (default: 0.7)", metavar="CHANCE"
    )
    on_host: str | None = option(
        None,
        "plan one chip whose experts lie in the host's memory: hits=0/0.8,high=0.7,low=0.2,bits=int4,link=55, or default",
        metavar="LINE",
    )
    sampled: bool = option(False, "also compile what sampled rows need; takes longer")
    whole: bool = option(False, "compile all layers instead of a few")
    json: bool = option(False, "print one JSON object per line")
    plot: str | None = option(None, "write a picture of the plan")


def command(options: PlanOptions) -> int:
    """Runs `specjax plan`."""
    from specjax.plan import on_host, report  # slow to import: flax and Orbax

    jax.config.update("jax_platforms", "cpu")  # nothing runs; the machine's own accelerators stay free
    with bad_input():
        chip = rated(aot.chip_of(options.topology), options.rates)
        batches = read_batches("--batch", options.batch or "8")
        if (options.context is not None and options.context < 1) or not options.tokens_per_step > 0:
            raise ValueError("--context must be at least 1 and --tokens-per-step above 0")
        if options.accepted is not None and options.memory is None:
            raise ValueError("--accepted goes with --memory; a plan without it takes --tokens-per-step")
        if options.plot:
            check_plot(options.plot)
        given = _check_on_host(options)
    if given is not None:
        records = [_one(options, chip, *line, batch, given) for line in _lines(options) for batch in batches]
        write(
            "\n".join(json.dumps(r) if options.json else on_host.told(r, chip) for r in records) + "\n" * options.json
        )
        if not any(r["fits"] for r in records):
            raise BadInput(f"what a chip needs besides experts is more than {options.topology} has: give fewer rows or a "
                           "shorter context")  # fmt: skip
        return 0
    if options.memory is not None:
        return _search(options, chip, batches if options.batch else None)
    records = []
    for decode, drafter in _lines(options):
        for batch in batches:
            records.append(_one(options, chip, decode, drafter, batch))
            if options.json:
                write(json.dumps(records[-1]) + "\n")
    if not options.json:
        write(report.table(records, chip))
    if options.weights is None and _packed_file(options):
        note(
            "load() keeps this model's matrices as its file packs them on such a chip: plan that with --weights packed"
        )
    if options.plot:
        with bad_input():
            report.plot(records, chip, options.plot)
    if not any(r["fits"] for r in records):
        raise BadInput(records[0]["reason"])
    return 0


def _lines(options: PlanOptions) -> list[tuple[str | None, str | None]]:
    """The ways to decode, each a line of `--decode` or of `--drafter`; none of either is the usual one."""
    if not options.decode and not options.drafter:
        return [(None, None)]
    return [*((line, None) for line in options.decode), *((None, line) for line in options.drafter)]


def _check_on_host(options: PlanOptions) -> Any:
    """What `--on-host` gives, a `specjax.plan.on_host.OnHost`; None without it.

    Raises:
      ValueError: with options that it does not go with, and for `--weights hobbit`, which is planned by it.
    """
    from specjax.plan import fit, on_host  # slow to import

    if options.on_host is None:
        if options.weights is not None and options.weights.partition(":")[0].strip() == "hobbit":
            raise ValueError(
                "a plan of experts in two precisions is --on-host, with --weights as they are in many bits"
            )
        return None
    for name in ("memory", "plot", "rates"):
        if getattr(options, name) is not None:
            raise ValueError(f"--on-host compiles nothing and draws nothing: leave --{name} out")
    if options.whole or options.sampled:
        raise ValueError("--on-host compiles nothing: leave --whole and --sampled out")
    if fit.chips_of(options.topology) != 1:
        raise ValueError(f"--on-host is for one chip, and {options.topology} has {fit.chips_of(options.topology)}")
    return on_host.OnHost.read(options.on_host)


def _search(options: PlanOptions, chip: Any, batches: list[int] | None) -> int:
    """Prints the fastest settings in a given memory."""
    from specjax.plan import memory

    with bad_input():
        write(memory.run(options, chip, tuple(batches or memory.ROWS)))
    return 0


def _packed_file(options: PlanOptions) -> bool:
    """Whether `--weights packed` would plan another model."""
    config = None if options.config == "builtin" else options.config
    try:
        return any_packed(models.abstract(options.model, config=config, weights=PACKED).params)
    except models.ModelError:  # nothing is packed, or only weights that are not here say what
        return False


def read_batches(name: str, line: str) -> list[int]:
    """Numbers of rows from a line.

    Args:
      name: the option's name.
      line: such as `1,8,32`.

    Raises:
      ValueError: on any other line.
    """
    if not all(part.strip().isdigit() and int(part) > 0 for part in line.split(",")):
        raise ValueError(f"{name} {line!r} is not a number of rows, or several such as 1,8,32")
    return [int(part) for part in line.split(",")]


def _one(
    options: PlanOptions, chip: Any, decode: str | None, drafter: str | None, batch: int, given: Any = None
) -> dict[str, Any]:
    """The record of one batch size and way to decode; `given` is an `OnHost`, if experts lie in the host's memory."""
    from specjax.plan import fit, on_host, report, step
    from specjax.plan.rings import rings

    config = None if options.config == "builtin" else options.config
    dtype = options.dtype or chip.dtype
    with bad_input():
        way = decode_of(decode, drafter)
        if not isinstance(way, Plain | Speculate | Diffusion | None):
            raise ValueError(f"a plan needs a step with a drafter or a policy, and {decode!r} has no such step")
        how: dict[str, Any] = {name: getattr(options, name) for name in ("weights", "cache_dtype", "reduce_dtype")}
        how["config"] = config
        model = models.abstract(options.model, dtype, **how)
        if model.any_subset:
            raise ValueError(f"{model.name} is {model.kind}, for which there is no plan: choose another model")
        spec = fit.check_mesh(options.mesh, options.topology, model.lm.axis_counts()["heads"], batch)
        context = fit.context_for(model, options.context)
        devices = (
            aot.devices(options.topology) if chip.compilers else jax.devices("cpu")[: fit.chips_of(options.topology)]
        )
        mesh = make_mesh(spec, devices)
        model = models.abstract(options.model, dtype, mesh, **how)
        way = way or usual_decode(model)
        setup = step.prepare(model, way, mesh, batch, context)
    asked = {
        "model": options.model, "dtype": dtype, "weights": model.weights, "cache_dtype": model.cache_dtype,
        "reduce_dtype": model.reduce_dtype,
        "topology": options.topology, "batch": batch, "context": context,
        "decoding": _decoding(model, setup.decoder, decode or drafter),
        **rings(model.lm, mesh, context, dtype),
    }  # fmt: skip
    if given is not None:
        with bad_input():
            return on_host.record(asked, setup, model, chip, given)
    held = step.sizes(setup)
    cost, layers, spare = None, (), 0.0
    if chip.compilers and held.arguments <= chip.hbm_bytes:
        try:
            cost, layers = step.model_cost(
                model, way, mesh, chip, options.topology, setup, options.whole, options.sampled
            )
            spare = cost.temporaries + cost.padding
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            said = str(error).splitlines()[0]
            return report.record(
                asked, chip, mesh, setup, held, None, options.tokens_per_step, (), fit.too_deep(chip, said)
            )
    reason = None
    if held.arguments + spare > chip.hbm_bytes:
        reason = fit.reason(setup, model, chip, options.topology, held, spare)
    return report.record(asked, chip, mesh, setup, held, cost, options.tokens_per_step, layers, reason)


def _decoding(model: models.Model, decoder: Any, line: str | None) -> str:
    if hasattr(decoder, "drafter"):
        return line or DEFAULT_DRAFTER
    unmask = line or usual_unmask(model)
    return f"{unmask}, {type(decoder.cache).__name__}" if hasattr(decoder, "cache") else unmask
