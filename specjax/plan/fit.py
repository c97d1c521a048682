"""The limits of a slice and a mesh, and the nearest settings that fit."""

import contextlib
import math
from typing import Any

from jax.sharding import AbstractMesh, AxisType

from specjax.plan import step
from specjax.plan.held import chip_bytes
from specjax.sharding.aot import Chip
from specjax.sharding.mesh import AXES, axis_sizes
from specjax.sharding.rules import placed, shardings


def chips_of(topology: str) -> int:
    """The number of chips of a topology."""
    return math.prod(int(size) for size in topology.partition(":")[2].split("x"))


def check_mesh(spec: str | None, topology: str, heads: int, batch: int) -> str:
    """The mesh line; by default, all chips are on the model axis.

    Raises:
      ValueError: if the mesh does not match the slice, or if it does not divide heads or rows; says what would work.
    """
    chips = chips_of(topology)
    if spec is None:
        model = max(n for n in range(1, chips + 1) if chips % n == 0 and heads % n == 0)
        spec = f"data={chips // model},model={model}"
    sizes = axis_sizes(spec)
    kinds = [n for n in range(1, chips + 1) if chips % n == 0]
    if math.prod(sizes.values()) != chips:
        kept = {name: sizes[name] for name in ("model", "context") if sizes[name] > 1}
        whole = chips % math.prod(kept.values()) == 0
        near = {"data": chips // math.prod(kept.values()), **kept} if whole else {"data": 1, "model": chips}
        raise ValueError(f"mesh {spec!r} has {math.prod(sizes.values())} chips and {topology} has {chips}: "
                         f"give {','.join(f'{name}={size}' for name, size in near.items())}")  # fmt: skip
    if heads % sizes["model"]:
        near = max(n for n in kinds if heads % n == 0 and n <= sizes["model"])
        raise ValueError(f"{heads} attention heads do not divide over model={sizes['model']}: "
                         f"give data={chips // near},model={near}")  # fmt: skip
    if batch % sizes["data"]:
        near = -(-batch // sizes["data"]) * sizes["data"]
        raise ValueError(f"a batch of {batch} does not divide over data={sizes['data']}: give {near}")
    return spec


def context_for(model: Any, context: int | None) -> int:
    """The context, or the default one.

    Raises:
      ValueError: if the model was not made for such a long text.
    """
    longest = model.lm.config.max_position_embeddings
    if context is None:
        return min(8192, longest)
    if context > longest:
        raise ValueError(
            f"{model.name} was made for {longest} positions: give a context of at most that, not {context}"
        )
    return context


def too_deep(chip: Chip, said: str) -> str:
    """The reason why a plan does not fit, if the compiler found no room for temporaries of unknown size."""
    return (
        f"the compiler runs out of a {chip.name}'s memory ({said}): try fewer rows, a shorter context or a larger slice"
    )


def reason(setup: step.Setup, model: Any, chip: Chip, topology: str, held: step.Sizes, spare: float) -> str:
    """The reason why a plan does not fit, and what does: a larger slice, fewer rows or a shorter context.

    Args:
      setup: the decoder, its parameters and state.
      model: its target.
      chip: the topology's chip.
      topology: such as `v5e:2x2`.
      held: the arrays on a chip.
      spare: bytes of temporaries, assumed to be constant.
    """
    rows, context = setup.state.tokens.shape
    need, have = (held.arguments + spare) / 1e9, chip.hbm_bytes / 1e9
    room = chip.hbm_bytes - spare - held.weights
    per_row = (held.cache + held.state) / rows
    per_slot = (held.cache - held.states + held.state) / context  # of all rows
    ways = []
    for name in (f"{chip.name}:{shape}" for shape in chip.slices):
        if chips_of(name) <= chips_of(topology):
            continue
        with contextlib.suppress(ValueError):  # a slice that does not divide the heads or the rows
            mesh = check_mesh(None, name, model.lm.axis_counts()["heads"], rows)
            if _arguments(setup, model, mesh) + spare <= chip.hbm_bytes:
                ways.append(f"--topology {name} --mesh {mesh}")
                break
    data = setup.state.tokens.sharding.mesh.shape["data"]
    fewer = int(room / per_row) // data * data
    ways += [f"--batch {fewer}"] if fewer >= 1 else []
    shorter = int((room - held.states) / per_slot) // 128 * 128
    ways += [f"--context {shorter}"] if shorter >= 128 else []
    text = f"it needs {need:.1f} GB per chip and {topology} has {have:.1f}"
    return f"{text}; this fits: {', or '.join(ways)}" if ways else f"{text}; no slice of {chip.name} takes it"


def _arguments(setup: step.Setup, model: Any, spec: str) -> int:
    """Bytes per chip before a step on another mesh, without its devices."""
    sizes = axis_sizes(spec)
    mesh: Any = AbstractMesh(tuple(sizes.values()), AXES, axis_types=(AxisType.Auto,) * len(AXES))
    target = setup.params["target"]
    moved = placed(target, shardings(mesh, model.lm.axes(target), target, model.lm.axis_counts()))
    state = placed(setup.state, shardings(mesh, setup.decoder.axes(setup.state), setup.state))
    besides = chip_bytes({name: part for name, part in setup.params.items() if name != "target"})
    return chip_bytes((moved, state)) + besides
