"""A decoder's step, compiled ahead of time without weights or hardware, and its cost on a chip.

In the shape descriptions `B` denotes rows and `L` the slots of text and cache per row.
"""

import dataclasses
import functools
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from specjax.decoder import Decode
from specjax.models import loading
from specjax.plan.cached import through
from specjax.plan.experts import Chosen, chosen, drafting, grouped, rounds
from specjax.plan.held import chip_bytes, unread
from specjax.plan.hlo import Traffic, traffic
from specjax.plan.pallas import kernels
from specjax.plan.serial import Serial, serial
from specjax.sampling import SamplingArrays
from specjax.sharding.aot import Chip, chip_named
from specjax.sharding.aot import compiled as compile_ahead
from specjax.sharding.rules import placed, rounded, shardings

LEAST = 2  # the extra layers of the second of two programs from which a deeper model is extrapolated
MOST = 2  # the extra turns of layers of deeper programs, if the first two give no line


@dataclasses.dataclass(frozen=True)
class Setup:
    """A decoder with the shapes and shardings of its parameters and state.

    Attributes:
      decoder: the decoder, made by a way to decode (`specjax.decode`).
      params: `ShapeDtypeStruct`s.
      state: `ShapeDtypeStruct`s.
      live: the committed tokens of a full row: L minus the slots that a step writes beyond them.
      experts: the target's experts; None if it has none.
      drafts: those of a drafter that is the target with fewer of them; see `specjax.plan.experts.drafting`.
    """

    decoder: Any
    params: Any
    state: Any
    live: int
    experts: Chosen | None = None
    drafts: Chosen | None = None


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Bytes per chip, and the least bytes that a step reads.

    `states` is the part of `cache` that holds running states (`specjax.models.mixers`), which a step reads and writes. Of
    experts, it reads those that its nodes touch (see `Chosen.read`). A table of embeddings that is not a head counts as
    nothing, since a step reads only a few of its rows."""

    weights: int
    cache: int
    state: int
    ideal: int
    states: int = 0

    @property
    def arguments(self) -> int:
        return self.weights + self.cache + self.state


@dataclasses.dataclass(frozen=True)
class Cost:
    """The cost of one step on one chip.

    Attributes:
      temporaries: bytes of temporaries.
      bytes: bytes read from and written to main memory.
      flops: operations, as the compiler counts them; on a GPU, which has no such count, those of the matrix products.
        Pallas kernels that declare none count the operations of their grid.
      collectives: by kind, their number and the bytes that they exchange.
      compile_seconds: CPU seconds of this process, over all threads, from tracing the step to its compiled program.
      padding: bytes that weights, cache and state take beyond their shapes, in whole tiles.
      serial: seconds if operations run one after the other.
      unbounded: loops that count once; see `Traffic`.
      halved: bytes exchanged by all-reduces of float32 products; `reduce_dtype` saves half of them.
    """

    temporaries: float
    bytes: float
    flops: float
    collectives: Mapping[str, Mapping[str, float]]
    compile_seconds: float = 0.0
    padding: float = 0.0
    serial: Serial = Serial()
    unbounded: tuple[str, ...] = ()
    halved: float = 0.0


def prepare(model: Any, way: Decode, mesh: Any, batch: int, context: int) -> Setup:
    """A decoder over B = `batch` rows of L = `context` slots.

    Args:
      model: what `specjax.models.abstract` returned for this mesh.
      way: how to decode.
      mesh: of devices that need not exist.
      batch: B.
      context: L, rounded up to what the mesh splits the cache into.

    Raises:
      ValueError: if the model cannot be decoded in this way.
    """
    decoder, params = way.bind(model, mesh=mesh)
    decoder = decoder.costliest
    context = rounded(mesh, "slots", context)
    live = context - decoder.slack
    if live < 2:
        raise ValueError(f"a context of {context} slots is too short: a step of this decoder takes {decoder.slack}")
    bare = dataclasses.replace(decoder, mesh=None)
    state = jax.eval_shape(lambda params: bare.empty(params, batch, context, model.dtype), params)
    places = shardings(mesh, decoder.axes(state), state)
    state = placed(state, places)
    rows = state.tokens.sharding.shard_shape(state.tokens.shape)[0]
    experts = chosen(getattr(model.lm.config, "experts", None), params["target"], rows, nodes_of(decoder))
    drafts = drafting(getattr(decoder, "drafter", None), experts)
    return Setup(decoder, params, state, live, experts, drafts)


def nodes_of(decoder: Any) -> int:
    """The number of nodes that the target reads per row and step, or the length of a diffusion decoder's block."""
    drafter = getattr(decoder, "drafter", None)
    return decoder.block_length if drafter is None else drafter.nodes


def sizes(setup: Setup) -> Sizes:
    """The sizes of the arrays that one chip holds before a step."""
    cache = chip_bytes(setup.state.cache)
    weights = chip_bytes(setup.params)
    context = setup.state.tokens.shape[1]
    own = setup.experts
    running = getattr(setup.decoder.target, "states", None)  # a model of any order is no `LM` and has none
    states = 0 if running is None else chip_bytes(running(setup.state.cache))
    idle = chip_bytes(unread(setup.params)) + (0 if own is None else own.bytes - own.read(own.nodes))
    ideal = weights - idle + (cache - states) * setup.live // context + 2 * states
    return Sizes(weights, cache, chip_bytes(setup.state) - cache, ideal, states)


def step_of(setup: Setup, sampled: bool = False) -> Any:
    """The decoder's step, as a function of params and state.

    Args:
      setup: see `prepare`.
      sampled: whether rows may sample. If not, the compiler drops the branches for temperature, filters and penalties,
        which a greedy batch never takes.
    """
    if sampled:
        return setup.decoder.step

    def greedy(params, state):
        plain = dataclasses.replace(state, sampling=SamplingArrays.make(state.tokens.shape[0]))
        new, info = setup.decoder.step(params, plain)
        return dataclasses.replace(new, sampling=state.sampling), info

    return greedy


def compiled(setup: Setup, sampled: bool = False) -> tuple[Any, Traffic]:
    """The compiled step with its state donated, and its traffic at full rows."""
    step = step_of(setup, sampled)
    program = _program(setup, step)
    return program, _traffic(program, setup, step)


def _program(setup, step):
    return compile_ahead(jax.jit(step, donate_argnums=1).lower(setup.params, setup.state))


def _traffic(program, setup, step):
    rows = np.full(setup.state.length.shape, setup.live, np.int32)
    state = dataclasses.replace(setup.state, length=rows, limit=rows)
    chips = setup.state.length.sharding.device_set
    device, devices = next(iter(chips)), len(chips)
    kernel = kernels(step, (setup.params, state), "tpu" if device.platform == "tpu" else "cuda", devices)
    own, chip = setup.experts, chip_named(device.device_kind)
    cached = functools.partial(through, cache=chip.l2_bytes) if chip and chip.l2_bytes else None
    if own is None:
        return traffic(program.as_text() or "", kernel, cached)
    return traffic(program.as_text() or "", grouped(own, kernel, setup.drafts), cached, rounds(own, setup.drafts))


def cost_of(program: Any, moved: Traffic) -> Cost:
    """The cost of a compiled step; see `compiled`."""
    memory = program.memory_analysis()
    spare = memory.output_size_in_bytes - memory.alias_size_in_bytes
    analysis = program.cost_analysis()
    flops = moved.flops if analysis is None else analysis["flops"]  # GPUs have no analysis
    flops += moved.kernel_flops
    temporaries = memory.temp_size_in_bytes + memory.generated_code_size_in_bytes + spare
    sums = [access for access in moved.accesses if access.moved and access.op.opcode.startswith("all-reduce")]
    wide = sum(a.moved * a.times for a in sums if a.op.value[0].dtype == "f32" and a.op.source.endswith("dot_general"))
    return Cost(temporaries, moved.bytes, flops, moved.collectives, unbounded=moved.unbounded, halved=wide)


def measured(setup: Setup, chip: Chip, topology: str, sampled: bool = False) -> Cost:
    """The cost of a step on a slice of a chip, including its longest time and its compile time."""
    step = step_of(setup, sampled)
    began = time.process_time()
    program = _program(setup, step)
    seconds = time.process_time() - began
    moved, memory = _traffic(program, setup, step), program.memory_analysis()
    mesh = setup.state.length.sharding.mesh
    return dataclasses.replace(
        cost_of(program, moved),
        compile_seconds=seconds,
        padding=max(memory.argument_size_in_bytes - sizes(setup).arguments, 0),
        serial=serial(moved, chip, topology, mesh.size // mesh.shape["data"], memory.generated_code_size_in_bytes),
    )


def extrapolated(costs: list[Cost], at: tuple[int, ...], layers: int) -> Cost:
    """The cost of a model of `layers` layers, extrapolated linearly from two shallower ones.

    No value is less than the second model's.

    Args:
      costs: the costs of the two.
      at: their numbers of layers.
      layers: a larger number of layers.
    """
    low, high = costs
    share = (layers - at[0]) / (at[1] - at[0])
    line = lambda a, b: max(a + share * (b - a), b)
    kinds = sorted({*low.collectives, *high.collectives})
    zero = {"count": 0, "bytes": 0}
    times = {name: line(value, getattr(high.serial, name)) for name, value in vars(low.serial).items()}
    return Cost(
        line(low.temporaries, high.temporaries),
        line(low.bytes, high.bytes),
        line(low.flops, high.flops),
        {
            kind: {
                key: line(low.collectives.get(kind, zero)[key], high.collectives.get(kind, zero)[key]) for key in zero
            }
            for kind in kinds
        },
        line(low.compile_seconds, high.compile_seconds),
        line(low.padding, high.padding),
        dataclasses.replace(Serial(**times), least=high.serial.least),
        high.unbounded,
        line(low.halved, high.halved),
    )


def model_cost(
    model: Any, way: Decode, mesh: Any, chip: Chip, topology: str, setup: Setup, whole: bool, sampled: bool
) -> tuple[Cost, tuple[int, ...]]:
    """The cost of a model's step, and the layers of the programs compiled for it.

    The cost of a deep model is extrapolated, since compiling takes long and its layers are alike or come in turns (see
    `turns`). The whole model is compiled in these cases:

    - `whole` is set.
    - The layers do not come in turns.
    - The drafter reads or runs particular layers.
    - The compiler lays the shallow models out so differently that the deeper one costs less.
    """
    layers = model.lm.num_layers
    at = depths(turns(model))
    if whole or at is None or _reads_layers(setup.decoder):
        return measured(setup, chip, topology, sampled), (layers,)
    batch, context = setup.state.tokens.shape

    def of(count):
        part = prepare(loading.with_layers(model, count, mesh), way, mesh, batch, context) if count < layers else setup
        return measured(part, chip, topology, sampled)

    return from_few_layers(of, at, layers)


def turns(model: Any) -> list[int]:
    """The kind of every layer, as the number of the first layer of that kind.

    The kind depends on the window, the rope, the layer whose keys it reads, and the parameters."""
    config, layers = model.lm.config, model.lm.num_layers
    parts = getattr(config, "layers", (None,) * layers)
    shapes = [jax.tree.map(lambda leaf: leaf.shape, model.params["layers"][i]) for i in range(layers)]
    kinds = [(config.window(i), parts[i], shapes[i]) for i in range(layers)]
    return [kinds.index(kind) for kind in kinds]


def depths(kinds: list[int]) -> tuple[int, int] | None:
    """The depths of the two smallest programs from which to extrapolate to the whole; None if they are not smaller than
    the whole.

    They have one and two turns of the model's kinds of layers, after the layers with which it begins, such as a layer
    without experts.

    >>> depths([0, 1, 2, 1, 2, 1, 2])
    (3, 5)
    """
    layers = len(kinds)
    found = [
        (first + turn, first + 2 * turn)
        for first in range(layers)
        for turn in range(LEAST, (layers - first + 1) // 2)
        if _repeats(kinds[first:], turn)
    ]
    return min(found, key=lambda at: at[1], default=None)


def _repeats(kinds, turn):
    """Whether layers come in turns of this length, repeated to the end; layers of one kind always do."""
    return len(set(kinds)) == 1 or (len(kinds) % turn == 0 and kinds[turn:] == kinds[:-turn])


def from_few_layers(of: Callable[[int], Cost], at: tuple[int, int], layers: int) -> tuple[Cost, tuple[int, ...]]:
    """The cost of a model, extrapolated linearly from two shallower ones, and the depths of these.

    The compiler does not treat every depth alike, and may find a deeper program that does less than a shallow one. Such
    a pair gives no line; then deeper programs are compiled, with up to `MOST` more turns.

    Args:
      of: returns the cost for a number of layers.
      at: the first two; see `depths`.
      layers: the model's.
    """
    turn, costs = at[1] - at[0], [of(count) for count in at]
    deepest = min(layers, at[1] + MOST * turn)
    while at[1] < deepest and _falls(*costs):
        at = at[1], min(at[1] + turn, layers)
        costs = [costs[1], of(at[1])]
    return (costs[1], at[1:]) if at[1] == layers else (extrapolated(costs, at, layers), at)


def _falls(low: Cost, high: Cost) -> bool:
    """Whether more layers have a lower cost in anything except memory."""
    rises = lambda kind, key: high.collectives.get(kind, {key: 0})[key] >= low.collectives[kind][key]
    same = all(rises(kind, key) for kind in low.collectives for key in ("count", "bytes"))
    return high.bytes < low.bytes or high.flops < low.flops or not same


def _reads_layers(decoder: Any) -> bool:
    drafter = getattr(decoder, "drafter", None)
    return drafter is not None and (bool(drafter.wants.hidden) or not drafter.plain_tree)
