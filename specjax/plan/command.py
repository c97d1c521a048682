"""`specjax plan`: what a decoding step costs on a TPU slice or an H100 machine, from a configuration alone."""

import argparse
import json
from typing import Any

from specjax.terminal import BadInput, bad_input, write


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `specjax plan`."""
    parser.add_argument("--model", required=True, help="hub name of a built-in configuration, shipped name, or folder")
    parser.add_argument("--config", default="builtin", help="a config.json to take instead of the model's own")
    parser.add_argument("--topology", required=True, help="v5e:4x4, v5p:2x2x4, v6e:2x2, h100:8, ...")
    parser.add_argument("--mesh", help="chips by axis, such as data=2,model=8 (default: all of them model)")
    parser.add_argument("--batch", default="8", help="rows, or several numbers for a table: 1,8,32")
    parser.add_argument(
        "--context", type=int, help="slots of text and cache a row (default: 8192, or all that the model was made for)"
    )
    parser.add_argument("--drafter", action="append", default=[], help="as of generate; several make a table")
    parser.add_argument("--verifier", help="as of generate")
    parser.add_argument("--unmask", help="of a diffusion model, as of generate")
    parser.add_argument("--cache", help="of a diffusion model, as of generate")
    parser.add_argument("--block-length", type=int, help="of a diffusion model")
    parser.add_argument("--dtype", default="bfloat16", help="of weights and cache")
    parser.add_argument("--tokens-per-step", type=float, default=1.0, help="tokens a row commits a step, for tokens/s")
    parser.add_argument("--sampled", action="store_true", help="compile what sampled rows need too, which takes longer")
    parser.add_argument("--whole", action="store_true", help="compile all layers instead of a few")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.add_argument("--plot", help="a picture of it")


def command(args: argparse.Namespace) -> int:
    """Runs `specjax plan`."""
    import jax

    jax.config.update("jax_platforms", "cpu")  # nothing runs; the machine's own accelerators stay free
    from specjax.bench.report import check_plot
    from specjax.plan import report
    from specjax.sharding.aot import chip_of

    with bad_input():
        chip = chip_of(args.topology)
        batches = _batches(args.batch)
        if (args.context is not None and args.context < 1) or not args.tokens_per_step > 0:
            raise ValueError("--context must be at least 1 and --tokens-per-step above 0")
        if args.plot:
            check_plot(args.plot)
    records = []
    for drafter in args.drafter or [None]:
        for batch in batches:
            records.append(_one(args, chip, drafter, batch))
            if args.json:
                write(json.dumps(records[-1]) + "\n")
    if not args.json:
        write(report.table(records, chip))
    if args.plot:
        with bad_input():
            report.plot(records, chip, args.plot)
    if not any(r["fits"] for r in records):
        raise BadInput(records[0]["reason"])
    return 0


def _batches(line: str) -> list[int]:
    if not all(part.strip().isdigit() and int(part) > 0 for part in line.split(",")):
        raise ValueError(f"--batch {line!r} is not a number of rows, or several such as 1,8,32")
    return [int(part) for part in line.split(",")]


def _one(args: argparse.Namespace, chip: Any, drafter: str | None, batch: int) -> dict[str, Any]:
    """The record of one batch size and drafter."""
    import jax

    from specjax import models
    from specjax.plan import fit, report, step
    from specjax.sharding import aot, make_mesh
    from specjax.spec.assemble import Plan

    config = None if args.config == "builtin" else args.config
    plan = Plan(drafter, args.verifier, args.unmask, args.cache, args.block_length)
    with bad_input():
        model = models.abstract(args.model, args.dtype, config=config)
        spec = fit.check_mesh(args.mesh, args.topology, model.lm.config, batch)
        context = fit.context_for(model, args.context)
        devices = aot.devices(args.topology)
        mesh = make_mesh(spec, devices)
        model = models.abstract(args.model, args.dtype, mesh, config)
        setup = step.prepare(model, plan, mesh, batch, context)
    asked = {
        "model": args.model, "dtype": args.dtype, "topology": args.topology, "batch": batch, "context": context,
        "decoding": _decoding(setup.decoder, drafter, args),
    }  # fmt: skip
    held = step.sizes(setup)
    cost, layers, spare = None, (), 0.0
    if held.arguments <= chip.hbm_bytes:
        try:
            cost, layers = step.model_cost(model, plan, mesh, setup, args.whole, args.sampled)
            spare = cost.temporaries
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            said = str(error).splitlines()[0]
            return report.record(
                asked, chip, mesh, setup, held, None, args.tokens_per_step, (), fit.too_deep(chip, said)
            )
    reason = None
    if held.arguments + spare > chip.hbm_bytes:
        reason = fit.reason(setup, model, chip, args.topology, held, spare)
    return report.record(asked, chip, mesh, setup, held, cost, args.tokens_per_step, layers, reason)


def _decoding(decoder: Any, drafter: str | None, args: argparse.Namespace) -> str:
    from specjax.spec import assemble

    if hasattr(decoder, "drafter"):
        return drafter or assemble.DEFAULT_DRAFTER
    return f"{args.unmask or assemble.DEFAULT_UNMASK}, {type(decoder.cache).__name__}"
