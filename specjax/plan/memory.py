"""The fastest way to draft in a given memory (SpecMemo, arXiv:2506.01986), by `specjax plan --memory`.

Nothing is compiled. Weights, caches and the rest of the state are exact, as shapes. What a step takes besides, and its
time, are estimates: a step takes the longer of its memory traffic and its operations at the chip's published speeds.

In the shape descriptions `B` denotes rows, `N` nodes, `S` slots, `V` tokens of the vocabulary and `E` the model's width.
"""

import dataclasses
import json
import math
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from specjax import models
from specjax.assembly import line
from specjax.assembly.registry import DRAFTERS
from specjax.decode.lines import read_drafter
from specjax.draft.one_pass import OnePass
from specjax.expand.sequoia import expected, sequoia_tree
from specjax.plan import fit, step
from specjax.plan.experts import chosen
from specjax.plan.held import chip_bytes, unread
from specjax.serve.options import read_size
from specjax.sharding import make_mesh
from specjax.sharding.aot import Chip
from specjax.terminal import flag

KEPT = 0.96
"""The share of the best speed that the least memory keeps, as in the paper's abstract."""
ACCEPTED = 0.7
"""The default chance that a drafted token is the target's: an assumption."""
RANKS = 4
"""Candidates of a node of a tree, `k` of the expander `top_k`."""
DEPTHS = (1, 2, 3, 4, 6, 8)
LENGTHS = (1, 2, 3, 4, 6, 8, 12, 16, 32)
NODES = (8, 16, 32, 64)
ROWS = (*range(1, 4), *range(4, 16, 2), *range(16, 32, 4), *range(32, 64, 8), *range(64, 128, 16), *range(128, 257, 32))
CACHES = (None, "int8", "float8_e4m3fn")
SIZED = ("expander", "length", "depth", "nodes", "k", "tree")
"""Fields of a drafter's line that the search sets."""


@dataclasses.dataclass(frozen=True)
class Point:
    """One setting, and its estimates.

    Attributes:
      drafter: the drafter's line.
      nodes: N, the root included.
      depth: of the deepest node.
      rows: B.
      cache_dtype: the type of the target's cache; None for the model's own.
      held: bytes by what they are of.
      tokens: expected tokens of a row's step.
      seconds: of a step.
    """

    drafter: str
    nodes: int
    depth: int
    rows: int
    cache_dtype: str | None
    held: dict[str, int]
    tokens: float
    seconds: float

    @property
    def total(self) -> int:
        """Bytes in all."""
        return sum(self.held.values())

    @property
    def generation(self) -> int:
        """Bytes besides the weights of target and drafter."""
        return self.total - self.held["weights"] - self.held["draft weights"]

    @property
    def speed(self) -> float:
        """Tokens per second of all rows."""
        return self.rows * self.tokens / self.seconds

    @property
    def record(self) -> dict[str, Any]:
        """What `--json` prints of it."""
        own = {**dataclasses.asdict(self), "total": self.total, "generation": self.generation}
        return own | {"tokens_per_second": round(self.speed, 1)}


def shapes(text: str) -> Iterator[tuple[str, int]]:
    """Lines of a drafter with trees of several sizes, each with the candidates of a node.

    Raises:
      ValueError: if the drafter has no size to search, or the line sets it.
    """
    if len(line.parts(text)) > 1:
        raise ValueError(f"--memory searches the size of one drafter, and {text!r} joins several")
    read_drafter(text)  # an error for unknown names and fields
    asked = line.read_line(text, "drafter")
    entry = DRAFTERS[asked.name]
    if fixed := [name for name in SIZED if name in asked.fields]:
        raise ValueError(f"--memory searches the drafter's size: leave {' and '.join(fixed)} out of {text!r}")
    if entry.expander:
        yield from ((line.extended(text, f"expander=chain,length={depth}"), 1) for depth in DEPTHS)
        for depth in DEPTHS:
            for nodes in NODES:
                if depth < nodes <= 1 + RANKS + (depth - 1) * RANKS**2:  # what `top_k` takes
                    tree = f"expander=top_k,k={RANKS},depth={depth},nodes={nodes}"
                    yield line.extended(text, tree), RANKS
    elif "length" in entry.fields:
        yield from ((line.extended(text, f"length={length}"), 1) for length in LENGTHS)
    else:
        raise ValueError(f"{asked.name} has no length and no expander whose size --memory could search")


def tokens_of(nodes: int, depth: int, ranks: int, accepted: float) -> float:
    """Expected tokens of a step with the best tree of this size (`sequoia_tree`), the target's own token included.

    A node's candidates are accepted with the same chance, one after the other: the first with `accepted`, the second
    with `accepted` if the first is not, and so on.

    >>> round(tokens_of(nodes=3, depth=2, ranks=1, accepted=0.5), 2)
    1.75
    """
    shares = np.tile(accepted * (1 - accepted) ** np.arange(ranks), (depth, 1))
    return 1 + expected(shares, sequoia_tree(shares, nodes))


def transient(setup: step.Setup) -> dict[str, int]:
    """Bytes that a step takes besides its arguments: what is alive when the target's logits are.

    These are the keys and values of the nodes before their commit; logits `[B, N, V]` and four arrays `[B, N, E]`, in
    float32; and the tree's mask `[B, N, N]`. Scores of attention are not counted, since kernels keep them on the chip.
    """
    rows, slots = setup.state.tokens.shape
    held, lm, nodes = step.sizes(setup), setup.decoder.target, step.nodes_of(setup.decoder)
    cells = rows * nodes
    return {
        "nodes' keys": (held.cache - held.states) * nodes // slots,
        "logits": cells * lm.vocab_size * 4,
        "activations": cells * 4 * lm.config.hidden_size * 4,
        "mask": cells * nodes,
    }


def held(setup: step.Setup) -> dict[str, int]:
    """Predicted bytes of a step, by what they are of."""
    sizes, draft = step.sizes(setup), chip_bytes(setup.params.get("draft", ()))
    cached = chip_bytes(setup.state.draft)
    return {
        "weights": sizes.weights - draft,
        "draft weights": draft,
        "cache": sizes.cache,
        "draft cache": cached,
        "state": sizes.state - cached,
        **transient(setup),
    }


def _on_line(low: dict[str, int], high: dict[str, int], rows: int) -> dict[str, int]:
    """Bytes of any number of rows, from those of one and of two: all are in proportion to the rows, or fixed."""
    return {name: value + (rows - 1) * (high[name] - value) for name, value in low.items()}


def _size(tree: Any) -> int:
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree))


@dataclasses.dataclass(frozen=True)
class Search:
    """What all settings share.

    Attributes:
      chip: the chip.
      mesh: of one device.
      models: the abstract target by the type of its cache.
      size: the target's parameters, as numbers.
      context: S.
      accepted: the chance that a drafted token is accepted.
      rows: the numbers of rows to try.
    """

    chip: Chip
    mesh: Any
    models: dict[str | None, Any]
    size: int
    context: int
    accepted: float
    rows: tuple[int, ...]

    def points(self, text: str) -> list[Point]:
        """All settings of a drafter.

        Raises:
          ValueError: if the target takes no size of this drafter.
        """
        found: list[Point] = []
        refused: ValueError | None = None
        for shape, ranks in shapes(text):
            for cache_dtype, model in self.models.items():
                way = read_drafter(shape)
                try:
                    one, two = (step.prepare(model, way, self.mesh, rows, self.context) for rows in (1, 2))
                except ValueError as error:
                    refused = error
                    break
                drafter = one.decoder.drafter
                tokens = tokens_of(drafter.nodes, drafter.depth, ranks, self.accepted)
                low, high = held(one), held(two)
                for rows in self.rows:
                    bytes_ = _on_line(low, high, rows)
                    took = self.seconds(model, one, bytes_, rows)
                    point = (shape, drafter.nodes, drafter.depth, rows, cache_dtype, bytes_, tokens, took)
                    found.append(Point(*point))
        if not found and refused is not None:
            raise refused
        return found

    def seconds(self, model: Any, setup: step.Setup, bytes_: dict[str, int], rows: int) -> float:
        """Estimated seconds of a step: of the target's pass and of the drafter's, which come one after the other."""
        drafter, target, draft = setup.decoder.drafter, setup.params["target"], setup.params.get("draft", ())
        own = chosen(getattr(model.lm.config, "experts", None), target, rows, drafter.nodes)
        idle = chip_bytes(unread(target)) + (0 if own is None else own.bytes - own.read(own.nodes))
        live = bytes_["cache"] * setup.live // self.context
        besides = sum(bytes_[name] for name in ("nodes' keys", "logits", "activations", "mask"))
        active = (
            self.size if own is None else self.size * (1 - own.bytes / bytes_["weights"] * (1 - own.each / own.count))
        )
        heads = model.lm.axis_counts()
        scored = rows * _size(setup.state.cache) * setup.live // self.context * heads["heads"] // heads["kv_heads"]
        nodes = drafter.nodes
        took = self._longer(bytes_["weights"] - idle + live + 2 * besides, 2 * nodes * (rows * active + scored))
        if setup.drafts is not None:  # the target with fewer experts, pass by pass
            few = dataclasses.replace(setup.drafts, rows=rows)
            read = bytes_["weights"] - chip_bytes(unread(target)) - few.bytes + few.read(few.nodes) + live
            own_active = self.size * (1 - few.bytes / bytes_["weights"] * (1 - few.each / few.count))
            took += self._longer(drafter.depth * read, 2 * nodes * (rows * own_active + scored))
        if not drafter.needs_params:
            return took
        passes = 1 if isinstance(drafter, OnePass) else drafter.depth
        head = {"head", "embed"}.isdisjoint(draft) and (target.get("head") or target.get("embed"))
        read = bytes_["draft weights"] - chip_bytes(unread(draft)) + bytes_["draft cache"] + chip_bytes(head or ())
        return took + self._longer(passes * read, 2 * rows * nodes * (_size(draft) + _size(head or ())))

    def _longer(self, moved: float, flops: float) -> float:
        return max(moved / self.chip.hbm_bandwidth, flops / self.chip.flops)


def answers(points: list[Point], budget: int, whole: int) -> dict[str, Point]:
    """The fastest setting in `budget` bytes, the fastest in the `whole` chip, and the one of least memory that keeps
    `KEPT` of the latter's speed.

    Raises:
      ValueError: if nothing fits.
    """
    fastest = lambda limit: max(
        (p for p in points if p.total <= limit), key=lambda p: (p.speed, -p.total), default=None
    )
    best, free = fastest(budget), fastest(whole)
    if best is None or free is None:
        least = min(points, key=lambda point: point.total)
        weights = least.held["weights"] + least.held["draft weights"]
        what = "is below the weights" if budget < weights else "has no room for one setting beside the weights"
        raise ValueError(
            f"--memory of {budget / 1e9:.3f} GB {what}: weights take {weights / 1e9:.3f} GB and the least setting "
            f"{least.total / 1e9:.3f} GB; give more, matrices in few bits (--weights int8) or a shorter --context"
        )
    least = min((p for p in points if p.speed >= KEPT * free.speed), key=lambda p: (p.total, -p.speed))
    return {"best": best, "unconstrained": free, "least": least}


def check(options: Any, chip: Chip) -> int:
    """The bytes of `--memory`.

    Raises:
      ValueError: if they are no size or more than the chip has, or other options do not go with the search.
    """
    budget = read_size(options.memory, "--memory")
    if budget > chip.hbm_bytes:
        raise ValueError(f"--memory {options.memory} is more than the {chip.hbm_bytes / 1e9:.1f} GB of a {chip.name}")
    if fit.chips_of(options.topology) != 1:
        raise ValueError(f"--memory searches for one chip: give --topology {chip.name}:{chip.slices[0]}")
    if len(options.drafter) != 1:
        raise ValueError("--memory searches the size of one drafter: give one --drafter, such as prompt_lookup")
    fields = {field.name: field.default for field in dataclasses.fields(options)}
    alone = ("decode", "mesh", "reduce_dtype", "tokens_per_step", "sampled", "whole", "plot")
    if extra := [flag(name) for name in alone if getattr(options, name) != fields[name]]:
        raise ValueError(f"--memory compiles nothing and judges by --accepted: leave out {', '.join(extra)}")
    if options.accepted is not None and not 0 < options.accepted < 1:
        raise ValueError(f"--accepted is a chance between 0 and 1, not {options.accepted}")
    return budget


def run(options: Any, chip: Chip, rows: tuple[int, ...]) -> str:
    """What `specjax plan --memory` prints.

    Args:
      options: the command's options (`PlanOptions`).
      chip: the chip, with its rates.
      rows: the numbers of rows to try.

    Raises:
      ValueError: for options that do not go together, or a memory that is too small.
    """
    budget, dtype = check(options, chip), options.dtype or chip.dtype
    mesh = make_mesh("model=1", jax.devices("cpu")[:1])
    how = {"config": None if options.config == "builtin" else options.config}
    types = (options.cache_dtype,) if options.cache_dtype else CACHES
    of_type = lambda cache: models.abstract(
        options.model, dtype, mesh, weights=options.weights, cache_dtype=cache, **how
    )
    found = {cache: of_type(cache) for cache in types}
    model = found[types[0]]
    plain = models.abstract(options.model, dtype, mesh, **how)
    size = _size(plain.params) - _size(unread(plain.params))
    context = fit.context_for(model, options.context)
    accepted = ACCEPTED if options.accepted is None else options.accepted
    search = Search(chip, mesh, found, size, context, accepted, rows)
    points = search.points(options.drafter[0])
    best = answers(points, budget, chip.hbm_bytes)
    if options.json:
        own = {"model": options.model, "topology": options.topology, "context": context, "memory": budget}
        own |= {"accepted": accepted, "settings": len(points)}
        return json.dumps(own | {name: point.record for name, point in best.items()}) + "\n"
    head = f"{options.model} {dtype} on {options.topology}, context {context}, {len(points)} settings of {options.drafter[0]}"
    return "\n".join([head, *_told(best, budget, dtype), *_notes(accepted, chip)]) + "\n"


def _told(best: dict[str, Point], budget: int, dtype: str) -> Iterator[str]:
    """The settings in words."""
    free, least = best["unconstrained"], best["least"]
    names = {
        "best": f"the fastest in {budget / 1e9:.3f} GB",
        "unconstrained": "the fastest in the whole chip",
        "least": f"the least memory with {KEPT:.0%} of that speed",
    }
    for name, point in best.items():
        yield f"{names[name]}: {point.speed:.0f} tokens/s in {point.total / 1e9:.3f} GB"
        yield (
            f"  --drafter {point.drafter!r} --batch {point.rows} --cache-dtype {point.cache_dtype or dtype}: "
            f"{point.nodes} nodes, depth {point.depth}, {point.tokens:.2f} tokens of a row in {1e3 * point.seconds:.3f} ms"
        )
        yield "  GB: " + ", ".join(f"{part} {size / 1e9:.3f}" for part, size in point.held.items())
    spared = 1 - least.generation / free.generation
    yield (
        f"the least memory keeps {least.speed / free.speed:.1%} of the speed, with {spared:.0%} less memory besides weights "
        "(SpecMemo's paper claims 96% with 65% less, measured on one Titan RTX)"
    )


def _notes(accepted: float, chip: Chip) -> Iterator[str]:
    """The assumptions."""
    rate = f"{chip.hbm_bandwidth / 1e9:.0f} GB/s, {chip.flops / 1e12:.0f} TFLOP/s ({chip.source})"
    yield f"acceptance is given, not measured: each candidate is the target's token with chance {accepted} (--accepted)"
    yield f"time and what a greedy step takes besides its arrays are estimates, nothing is compiled; {chip.name}: {rate}"
    yield "plan a setting without --memory to compile it; a cache in another type changes the text"
