"""Whole decoding steps of random models at published sizes, timed, beside the range that `specjax plan` gives for them.

`plans.json` has the plans, which `python -m experiments.chip.plans` makes with the compilers of chips that are not there.
"""

import dataclasses
import functools
import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.chip.base import (
    Part,
    Record,
    Run,
    Setting,
    Shown,
    held_by,
    numbers,
    table,
)
from specjax import models
from specjax.bench.step_parts import PARTS as SCOPES
from specjax.bench.step_parts import REST, by_part, parts_of
from specjax.bench.trace import events_of, with_names
from specjax.decode import Speculate
from specjax.decoder import Needs, run_program
from specjax.models.dfloat11 import Coded, encoded
from specjax.sampling import SamplingArrays
from specjax.state import Finish

PLANS = Path(__file__).parents[1] / "plans.json"
MODELS = {"1B": "meta-llama/Llama-3.2-1B", "8B": "meta-llama/Llama-3.1-8B"}
TREES = {1: None, 8: "4 | 1x3", 16: "4 | 2 1x3 | 1x5 | 1", 60: "8 | 2x8 | 1x16 | 1x12 | 1x7"}
"""Of so many nodes: plain decoding, and static trees that a table fills."""
BATCHES = 1, 8, 64
CONTEXT = 2048
TURNS = 24
"""Steps that are timed in a row."""
TRACED = 3
LOOPED = ", in a loop"


@dataclasses.dataclass(frozen=True)
class Step:
    """One decoding step.

    Attributes:
      model: a key of MODELS.
      nodes: a key of TREES.
      batch: rows, all of which have filled their cache but for what a run of steps writes.
      weights: their format, see `specjax.models.load`; None: bfloat16.
      looped: whether steps follow each other in the decoder's own loop, as `specjax.generate` runs them, and not in calls.
    """

    model: str
    nodes: int
    batch: int
    weights: str | None = None
    looped: bool = False

    def __str__(self) -> str:
        words = f"{self.model}{f' {self.weights}' if self.weights else ''}, {self.nodes} nodes, batch {self.batch}"
        return words + LOOPED * self.looped

    @property
    def drafter(self) -> str:
        """Its registry line."""
        tree = TREES[self.nodes]
        return "none" if tree is None else f"token_recycling:tree={tree}"


@dataclasses.dataclass(frozen=True)
class Prepared:
    """A step's decoder with the shapes of its parameters, and how many slots a row has."""

    decoder: Any
    params: Any
    context: int

    def step(self, params: Any, state: Any) -> Any:
        """That of a greedy batch, which a plan counts too."""
        plain = dataclasses.replace(state, sampling=SamplingArrays.make(state.tokens.shape[0]))
        new, _ = self.decoder.step(params, plain)
        return dataclasses.replace(new, sampling=state.sampling)

    def steps(self, count: int, params: Any, state: Any) -> Any:
        """So many steps in one program."""
        decoder = self.decoder.fitted(Needs(greedy=True))
        return run_program(decoder, params, state, jnp.int32(count))

    def begun(self, params: Any, batch: int, steps: int) -> Any:
        """A state in the middle of a text: full rows, but for the slots that so many steps may write."""
        state = self.decoder.empty(params, batch, self.context, jnp.bfloat16)
        at = self.context - self.decoder.slack - steps * (self.decoder.drafter.depth + 1)
        whole = lambda value: jnp.full(batch, value, jnp.int32)
        cache = [
            numbers(x.shape, x.dtype, 7 + i) if jnp.issubdtype(x.dtype, jnp.floating) else x
            for i, x in enumerate(jax.tree.leaves(state.cache))
        ]
        return dataclasses.replace(
            state,
            tokens=numbers(state.tokens.shape, jnp.int32, 5) & 0x3FF,
            length=whole(at),
            prompt_length=whole(1),
            limit=whole(self.context - self.decoder.slack),
            finish=whole(Finish.RUNNING),
            cache=jax.tree.unflatten(jax.tree.structure(state.cache), cache),
        )


def steps(setting: Setting) -> list[Step]:
    """Plain and 16 nodes first, then the rest of the product."""
    if setting.rehearse:
        return [Step("tiny", 8, 2)]
    first = [Step(m, n, b) for m, n, b in itertools.product(("8B", "1B"), (1, 16), (1, 8))]
    first += [Step(m, n, 8, looped=True) for m, n in itertools.product(("8B", "1B"), (1, 16))]
    rest = [Step(m, n, b) for m, b, n in itertools.product(("8B", "1B"), BATCHES, TREES)]
    found = list(dict.fromkeys([*first, *rest]))
    return [step for step in found if step.model == "1B" or _holds_8b(setting)]


def _holds_8b(setting: Setting) -> bool:
    """Whether a chip takes the larger model's 16 GB, its cache and what a step needs besides."""
    return setting.chip is None or setting.chip.hbm_bytes > 24e9


def prepared(setting: Setting, step: Step) -> Prepared:
    model = models.abstract(MODELS.get(step.model, step.model), "bfloat16", weights=step.weights)
    decoder, params = Speculate(step.drafter).bind(model)
    return Prepared(decoder, params, setting.pick(CONTEXT, 256))


@functools.lru_cache(maxsize=1)
def parameters(model: str, weights: str | None) -> Any:
    """Random parameters of a model in a format; only the last are kept."""
    shapes = models.abstract(MODELS.get(model, model), "bfloat16", weights=weights).params
    leaves, structure = jax.tree.flatten(shapes, is_leaf=lambda x: isinstance(x, Coded))
    return jax.tree.unflatten(structure, [_filled(leaf, i) for i, leaf in enumerate(leaves)])


def _filled(leaf: Any, seed: int) -> Any:
    if isinstance(leaf, Coded):
        return jax.tree.map(jnp.asarray, _coded(leaf.shape, leaf.codes.shape, leaf.dtype))
    return numbers(leaf.shape, leaf.dtype, seed, 0.03)


@functools.cache
def _coded(shape: tuple[int, ...], codes: tuple[int, ...], dtype: Any) -> Coded:
    """A matrix with coded exponents, of a few outputs again and again: lanes do not know of each other."""
    turned = codes[-1] != shape[-1]  # a table of embeddings, whose runs lie along the last axis
    inputs, outputs = shape[::-1] if turned else shape
    few = next(n for n in (64, 32, 16, 8, 4, 2, 1) if outputs % n == 0)
    drawn = np.random.default_rng(0).normal(size=(inputs, few)).astype(np.float32) * 0.03
    made = encoded(drawn.astype("bfloat16"), -2, inputs // codes[1 if not turned else 2], dtype)
    wide = lambda x: np.tile(x, (1,) * (x.ndim - 1) + (outputs // few,))
    made = dataclasses.replace(made, rest=wide(made.rest), codes=wide(made.codes))
    return made.T if turned else made


def made(setting: Setting, case: str, of: Callable[[Setting], Sequence[Step]] = steps) -> Run:
    """Compiles a step; running it says its time, its memory, and of some where the time goes."""
    step = next(step for step in of(setting) if str(step) == case)
    ready, turns = prepared(setting, step), setting.pick(TURNS, 4)
    shapes = jax.eval_shape(lambda params: ready.begun(params, step.batch, 1), ready.params)
    way = functools.partial(ready.steps, turns) if step.looped else ready.step
    lowered = jax.jit(way, donate_argnums=1).lower(ready.params, shapes)
    program, calls = lowered.compile(), 1 if step.looped else turns
    traced = setting.rehearse or (step.batch == 8 and step.nodes in (1, 16) and not step.looped)
    named = with_names(lowered, program) if traced else None

    def run() -> Record:
        params = {**ready.params, "target": parameters(step.model, step.weights)}
        begun = lambda count: ready.begun(params, step.batch, count)
        _lap(program, params, begun(turns), calls)
        seconds = statistics.median(_lap(program, params, begun(turns), calls) / turns for _ in range(3))
        found: Record = {"seconds": seconds, "held_bytes": held_by(program), "model_bytes": _bytes(params)}
        if named is not None:
            found |= _traced(named, lambda: _lap(named, params, begun(TRACED), TRACED), seconds)
        return found

    return run


def _lap(program: Any, params: Any, state: Any, count: int) -> float:
    state = jax.block_until_ready(state)
    began = time.perf_counter()
    for _ in range(count):
        state = program(params, state)
    jax.block_until_ready(state)
    return time.perf_counter() - began


def _traced(program: Any, run: Callable[[], Any], seconds: float) -> Record:
    """Milliseconds of a step by named scope, of the profiler's trace; or why there are none.

    Args:
      program: whose operations a trace names.
      run: runs it `TRACED` times.
      seconds: of a step without a trace.
    """
    try:
        spent = by_part(events_of(run, "jit_step"), parts_of(program.as_text() or ""))
    except Exception as error:  # a trace is no reason to lose what was timed
        return {"untraced": f"{type(error).__name__}: {error}".splitlines()[0]}
    if (part := sum(spent.values()) / TRACED / 1e9 / seconds) < 0.5:
        return {"untraced": f"the profiler named the operations of {part:.0%} of a step's time"}
    return {"traced_ms": {part: round(spent[part] / TRACED / 1e6, 4) for part in (*SCOPES, REST)}}


def _bytes(tree: Any) -> int:
    """Of arrays on the device; two numbers of int4 take one."""
    bits = lambda x: jnp.iinfo(x.dtype).bits if jnp.issubdtype(x.dtype, jnp.integer) else 8 * x.dtype.itemsize
    return sum(x.size * bits(x) // 8 for x in jax.tree.leaves(tree))


@functools.cache
def plans() -> dict[str, dict[str, Any]]:
    """Plans by topology and step; none where they were not made yet."""
    return json.loads(PLANS.read_text())["plans"] if PLANS.exists() else {}


def planned(context: Shown, case: str) -> tuple[float, float] | None:
    """At least and at most seconds that a plan gives a step on this chip."""
    chip = context.setting.chip
    known = {} if chip is None else plans().get(chip.name, {})
    own = known.get(case.removesuffix(LOOPED))
    return None if own is None else (own["least"], own["most"])


def lines_of(records: Iterable[Record], context: Shown) -> list[list[str]]:
    """Of every step that was timed what the plan said, what the chip did, and how fast that is."""
    rows = []
    for record in records:
        said, did = planned(context, record["case"]), record["seconds"]
        batch = int(record["case"].removesuffix(LOOPED).rpartition(" ")[2])
        words = "-" if said is None else f"{said[0] * 1e3:.2f} to {said[1] * 1e3:.2f}"
        over = "-" if said is None else f"{did / said[0]:.2f}"
        rows.append([
            record["case"], words, f"{did * 1e3:.2f}", over, f"{batch / did:.0f}", f"{record['model_bytes'] / 1e9:.2f}",
            f"{record['held_bytes'] / 1e9:.2f}",
        ])  # fmt: skip
    return rows


HEAD = [
    "step",
    "plan said, ms",
    "chip did, ms",
    "over the least",
    "steps' tokens/s, one per row",
    "model, GB",
    "all it holds, GB",
]


def shown(records: list[Record], context: Shown) -> str:
    parts = [table(HEAD, lines_of(records, context))]
    traced = [record for record in records if "traced_ms" in record]
    if traced:
        scopes = list(traced[0]["traced_ms"])
        rows = [[r["case"], *(f"{r['traced_ms'][scope]:.3f}" for scope in scopes)] for r in traced]
        parts += ["", "Where the time of a step goes, in milliseconds of a trace:", "", table(["step", *scopes], rows)]
    reasons = sorted({record["untraced"] for record in records if "untraced" in record})
    parts += [f"- no trace: {reason}" for reason in reasons]
    return "\n".join(parts)


PART = Part(
    "steps", "Steps: plan said, chip did", 3.0, lambda setting: [str(step) for step in steps(setting)], made, shown,
    ahead=6, longest=150.0,
)  # fmt: skip
