"""A plan in words, as JSON and as a picture."""

import math
from collections.abc import Mapping
from typing import Any

from specjax.plan.experts import Chosen
from specjax.plan.serial import PASSES
from specjax.plan.step import Cost, Setup, Sizes, nodes_of
from specjax.sharding.aot import Chip

GB = 1e9
SAID = {
    "kernels": "kernels", "loops": "kernels in loops", "assumed": "kernels without an estimate", "waits": "waits for copies",
    "collectives": "collectives", "code": "reading the program",
}  # fmt: skip
"""Parts of `Serial` in words."""


def record(
    asked: dict[str, Any], chip: Chip, mesh: Any, setup: Setup, held: Sizes, cost: Cost | None, tokens_per_step: float,
    layers: tuple[int, ...], reason: str | None,
) -> dict[str, Any]:  # fmt: skip
    """The record that `--json` prints. All bytes, operations and collectives are those of one chip and one step.

    Args:
      asked: the request of the plan.
      chip: the topology's chip.
      mesh: the mesh.
      setup: the decoder.
      held: the arrays on a chip.
      cost: the cost of a step; None if nothing was compiled.
      tokens_per_step: the tokens that a row commits per step.
      layers: the layers of the compiled programs.
      reason: why it does not fit; None if it does.
    """
    rows = setup.state.tokens.shape[0]
    own_experts = {} if setup.experts is None else {"experts": _experts(setup.experts, setup.drafts)}
    memory = {"weights": held.weights, "cache": held.cache, "state": held.state}
    if cost is not None:
        memory |= {"padding": round(cost.padding), "temporaries": round(cost.temporaries)}
    memory |= {"total": sum(memory.values()), "limit": chip.hbm_bytes}
    memory |= {"states": held.states} if held.states else {}  # a part of the cache
    own = {
        **asked,
        "nodes": nodes_of(setup.decoder),
        "mesh": dict(mesh.shape),
        "chips": mesh.size,
        "fits": reason is None,
        "reason": reason,
        "bytes_per_chip": memory,
        "ideal_bytes": held.ideal,
        **own_experts,
    }
    if cost is None:
        return own
    parts = mesh.size // mesh.shape["data"]
    seconds = roofline(chip, cost, parts, asked["topology"])
    spared = _exchange(chip, {"all-reduce": {"bytes": cost.halved / 2}}, parts, asked["topology"])
    may_halve = getattr(setup.decoder.target, "reduce_dtype", "") is None and setup.experts is None
    longest = max(sum(cost.serial.parts.values()), seconds["step"])
    return own | {
        "bytes_accessed": round(cost.bytes),
        "bytes_over_ideal": round(cost.bytes / held.ideal, 4),
        "flops": round(cost.flops),
        "collectives": {kind: {k: round(v) for k, v in entry.items()} for kind, entry in cost.collectives.items()},
        "reduce_dtype_spares": spared if may_halve else 0.0,
        "seconds": seconds,
        "serial_seconds": cost.serial.parts | {"step": longest},
        "launches": round(cost.serial.launches),
        "least_kernel_seconds": cost.serial.least,
        "unbounded_loops": list(cost.unbounded),
        "tokens_per_step": tokens_per_step,
        "tokens_per_second": round(rows * tokens_per_step / seconds["step"], 1),
        "tokens_per_second_least": round(rows * tokens_per_step / longest, 1),
        "compiled_layers": list(layers),
        "compile_seconds": round(cost.compile_seconds, 2),
        "rungs": list(getattr(setup.decoder, "rungs", (1,))),
    }


def _experts(own: Chosen, drafts: Chosen | None) -> dict[str, Any]:
    """Experts of one layer, and bytes of all layers on one chip: in all, read by one node per row, and read by a
    step; and, where the target drafts with fewer of them, read by a pass of a draft."""
    read = lambda nodes: {"touched": round(own.touched(nodes), 2), "bytes": own.read(nodes)}
    return {
        "count": own.count,
        "per_token": own.each,
        "layers": own.layers,
        "bytes": own.bytes,
        "one_node": read(1),
        "step": read(own.nodes),
        **({} if drafts is None else {"draft": _experts(drafts, None)["step"] | {"per_token": drafts.each}}),
    }


def roofline(chip: Chip, cost: Cost, parts: int, topology: str) -> dict[str, float]:
    """Seconds of one step for memory, compute and collectives, each as if it ran alone; and of the whole step.

    Collectives run over rings of the `parts` chips that share rows, by a chip's links in the slice (`Chip.links`). The
    step takes the longer of memory and compute, plus the collectives. Latencies are left out."""
    memory, compute = cost.bytes / chip.hbm_bandwidth, cost.flops / chip.flops
    links = _exchange(chip, cost.collectives, parts, topology)
    return {"memory": memory, "compute": compute, "collectives": links, "step": max(memory, compute) + links}


def _exchange(chip: Chip, collectives: Mapping[str, Mapping[str, float]], parts: int, topology: str) -> float:
    """Seconds of the collectives at the speed of the links."""
    exchanged = sum(2 * PASSES.get(kind, 1) * entry["bytes"] for kind, entry in collectives.items())
    return exchanged * (parts - 1) / parts / chip.links(topology) if exchanged else 0.0


def table(records: list[dict[str, Any]], chip: Chip) -> str:
    """One record in full, or several as a table; and the assumptions of the figures."""
    lines = []
    if len(records) == 1:
        lines += _single(records[0])
    else:
        head = (
            "drafter",
            "nodes",
            "batch",
            "context",
            "fits",
            "GB/chip",
            "GB read",
            "over ideal",
            "GFLOP",
            "ms",
            "tokens/s",
        )
        rows = [head, *(_row(r) for r in records)]
        if any("experts" in r for r in records):
            rows = [(*row, each) for row, each in zip(rows, ("experts", *map(_touched, records)), strict=True)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines += [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
        ]
    slice_, links = records[0]["topology"], ""
    if between := chip.links(slice_):
        links = f", {between / GB:.0f} GB/s between chips of {slice_}"
    lines.append(
        f"{chip.name}: {chip.hbm_bytes / GB:.1f} GB, {chip.hbm_bandwidth / GB:.0f} GB/s, "
        f"{chip.flops / 1e12:.0f} TFLOP/s {chip.dtype}{links} ({chip.source})"
    )
    if not chip.compilers:
        lines.append("not compiled: memory is that of weights, cache and state, without what a step takes besides")
    done = [r for r in records if "compiled_layers" in r]
    lines += _assumptions(done[0], chip) if done else []
    if any(len(r["compiled_layers"]) > 1 for r in done):
        low, high = next(r["compiled_layers"] for r in done if len(r["compiled_layers"]) > 1)
        lines.append(f"compiled with {low} and {high} layers, the rest on the line through them (--whole compiles all)")
    return "\n".join(lines) + "\n"


def _row(r: dict[str, Any]) -> tuple[str, ...]:
    total = f"{r['bytes_per_chip']['total'] / GB:.2f}"
    first = (r["decoding"], str(r["nodes"]), str(r["batch"]), str(r["context"]), "yes" if r["fits"] else "no", total)
    if "seconds" not in r:
        return (*first, "", "", "", "", "")
    return (
        *first, f"{r['bytes_accessed'] / GB:.2f}", f"{r['bytes_over_ideal']:.2f}", f"{r['flops'] / GB:.0f}",
        f"{1e3 * r['seconds']['step']:.2f} to {1e3 * r['serial_seconds']['step']:.2f}",
        f"{r['tokens_per_second_least']:.0f} to {r['tokens_per_second']:.0f}",
    )  # fmt: skip


def _touched(r: dict[str, Any]) -> str:
    own = r["experts"]
    one, step = (f"{own[part]['touched']:.0f}" for part in ("one_node", "step"))
    return f"{one if r['nodes'] == 1 else f'{one} to {step}'} of {own['count']}"


def _single(r: dict[str, Any]) -> list[str]:
    mesh = ",".join(f"{axis}={size}" for axis, size in r["mesh"].items())
    memory = {name: size for name, size in r["bytes_per_chip"].items() if name not in ("total", "limit", "states")}
    said = {name: f"{name} {size / GB:.3f}" for name, size in memory.items()}
    if states := r["bytes_per_chip"].get("states"):
        said["cache"] += f" (of which running states {states / GB:.3f})"
    parts = ", ".join(said.values())
    lines = [
        f"{r['model']} {r['dtype']}{_kinds(r)} on {r['topology']}, {r['chips']} chips, mesh {mesh}",
        f"step       {r['decoding']}, {r['nodes']} nodes, batch {r['batch']}, context {r['context']}",
        f"memory     {r['bytes_per_chip']['total'] / GB:.3f} GB per chip: {parts}",
        f"fits       {'yes' if r['fits'] else 'no'}, a chip has {r['bytes_per_chip']['limit'] / GB:.3f} GB",
    ]
    lines += [_of_experts(r)] if "experts" in r else []
    lines += [_of_rings(r)] if "ring" in r else []
    if "seconds" not in r:
        return lines
    kinds = ", ".join(
        f"{e['count']} {kind} of {e['bytes'] / 1e6:.2f} MB in all" for kind, e in r["collectives"].items()
    )
    seconds, longest = ({name: 1e3 * value for name, value in r[key].items()} for key in ("seconds", "serial_seconds"))
    shown = {part: f"{name} {longest[part]:.3f}" for part, name in SAID.items() if longest[part]}
    spared = f"; --reduce-dtype bfloat16 spares {1e3 * r['reduce_dtype_spares']:.3f} ms"
    uncounted = [f"loops      {', '.join(r['unbounded_loops'])}: of unknown length, counted once"]
    return [
        *lines,
        f"traffic    {r['bytes_accessed'] / GB:.3f} GB per chip and step, {r['bytes_over_ideal']:.2f} times the ideal "
        f"{r['ideal_bytes'] / GB:.3f} GB ({'touched experts, other ' if 'experts' in r else ''}weights and live cache once)",
        f"compute    {r['flops'] / GB:.1f} GFLOP a chip and step",
        f"collective {kinds or 'none'}{spared if r['reduce_dtype_spares'] else ''}",
        *(uncounted if r["unbounded_loops"] else []),
        f"time       {seconds['step']:.3f} to {longest['step']:.3f} ms per step",
        f"at least   {seconds['step']:.3f} ms: memory {seconds['memory']:.3f} or compute {seconds['compute']:.3f}, whichever "
        f"is longer, then collectives {seconds['collectives']:.3f}",
        f"at most    {longest['step']:.3f} ms: {', '.join(shown.values())}",
        f"speed      {r['tokens_per_second_least']:.0f} to {r['tokens_per_second']:.0f} tokens/s at {r['tokens_per_step']:g} "
        "tokens per step and row",
        f"compile    {r['compile_seconds']:.0f} CPU seconds here, the target {_reads(r['rungs'])} among them",
    ]


def _assumptions(r: dict[str, Any], chip: Chip) -> list[str]:
    """The assumptions of the lower and upper bound of a time."""
    least = 1e6 * r["least_kernel_seconds"]
    way = f"; {1e6 * chip.latency:g} us for each hop of a collective" if chip.hops(r["topology"]) else ""
    if chip.clock:
        most = (
            f"the compiler's cycles at {chip.clock / 1e9:g} GHz; copies, and kernels that it gives none for, at the "
            f"{chip.reads / GB:.0f} GB/s that it expects, and a kernel {least:.1f} us at least{way}"
        )
    else:
        most = f"every kernel at the published speeds and {least:g} us to start it, an assumption{way}"
    return [
        "at least: at the published speeds, with nothing to wait for",
        f"at most: one operation after the other, {most}",
    ]


def _of_rings(r: dict[str, Any]) -> str:
    """What a prompt of the whole context sends over a link, in the busier direction; see `ring_attention`."""
    keys, queries = (f"{r['ring'][moves] / 1e6:.2f} MB" for moves in ("keys", "queries"))
    return (
        f"prompt     a layer sends {keys} over a link if keys go round, {queries} if queries do and results come back"
    )


def _of_experts(r: dict[str, Any]) -> str:
    """How many of a layer's experts one node per row touches, and how many a step does; a step that verifies a tree
    touches most."""
    own = r["experts"]
    passes = {"one node": own["one_node"]} | ({f"{r['nodes']} nodes": own["step"]} if r["nodes"] > 1 else {})
    drafts = own.get("draft")
    passes |= {} if drafts is None else {f"a draft's pass ({drafts['per_token']} per token)": drafts}
    said = ", ".join(
        f"{name} per row about {read['touched']:.1f}, {read['bytes'] / GB:.3f} GB per chip"
        for name, read in passes.items()
    )
    return (
        f"experts    {own['count']} in each of {own['layers']} layers, {own['bytes'] / GB:.3f} GB per chip, "
        f"{own['per_token']} per token; chosen evenly, {said}"
    )


def _kinds(r: dict[str, Any]) -> str:
    """The format of the matrices, if it is not the default."""
    formats = {"weights": "weights", "cache": "cache_dtype", "sums": "reduce_dtype"}
    kinds = [f"{part} in {r[name]}" for part, name in formats.items() if r.get(name)]
    return f", {', '.join(kinds)}," if kinds else ""


def _reads(rungs: list[int]) -> str:
    """The numbers of nodes for which the target is compiled."""
    return "once" if len(rungs) == 1 else f"{len(rungs)} times ({', '.join(map(str, rungs))} nodes)"


def plot(records: list[dict[str, Any]], chip: Chip, file: str) -> None:
    """Draws, for every record, the memory per chip and the parts of a step's time."""
    from specjax.viz.picture import Picture

    labels = [f"{r['decoding'].partition(':')[0]}\nN {r['nodes']}, batch {r['batch']}" for r in records]
    figure = Picture(5 + 1.6 * len(records), 4)
    left, right = figure.subplots(1, 2)
    bottom = [0.0] * len(records)
    for part in ("weights", "cache", "state", "padding", "temporaries"):
        heights = [r["bytes_per_chip"].get(part, 0) / GB for r in records]
        left.bar(labels, heights, bottom=bottom, label=part)
        bottom = [a + b for a, b in zip(bottom, heights, strict=True)]
    left.axhline(chip.hbm_bytes / GB, color="black", linestyle="--", label=f"{chip.name}: {chip.hbm_bytes / GB:.1f} GB")
    left.set(title="Memory", ylabel="GB per chip")
    for part in ("memory", "compute", "collectives"):
        offset = 0.27 * (("memory", "compute", "collectives").index(part) - 1)
        values = [1e3 * r.get("seconds", {}).get(part, math.nan) for r in records]
        right.bar([i + offset for i in range(len(records))], values, 0.27, label=part)
    right.plot(
        [i - 0.27 for i in range(len(records))], [1e3 * r["ideal_bytes"] / chip.hbm_bandwidth for r in records], "k_",
        markersize=24, label="weights and live cache once",
    )  # fmt: skip
    longest = [1e3 * r.get("serial_seconds", {}).get("step", math.nan) for r in records]
    right.plot(range(len(records)), longest, "kv", label="at most")
    right.set_xticks(range(len(records)), labels)
    right.set(title="Roofline", ylabel="ms per step")
    for axes in (left, right):
        axes.legend(fontsize=8)
    figure.suptitle(f"{records[0]['model']} on {records[0]['topology']}, context {records[0]['context']}")
    figure.savefig(file, dpi=110)
