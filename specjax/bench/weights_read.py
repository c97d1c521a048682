"""How many bytes of weights a step of a decoder reads, counted in the step as JAX traces it.

A weight that meets data (in a product, mostly) is read once there. Converted, transposed and sliced weights are still
weights. Of a table whose rows are looked up, those rows count.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax

from specjax.plan.held import chip_bytes

PyTree = Any

_SLICES = ("slice", "dynamic_slice", "split")
_APART = ("optimization_barrier", "sharding_constraint")
"""Operations that return each of their operands."""
_OPAQUE = ("pallas_call", "custom_partitioning", "reduce")
"""Operations whose inner program is not one over their operands."""


def weights_read(decoder: Any, params: PyTree) -> float | None:
    """Bytes of `params` that a step of a speculative decoder reads for one row.

    Of branches the one that reads most counts, whether a step takes it or not. Experts count whole.

    Args:
      decoder: a `specjax.Speculative`.
      params: its parameters.

    Returns:
      None if weights are read in a loop whose length depends on the text.
    """
    bare = dataclasses.replace(decoder, mesh=None)
    params = jax.eval_shape(lambda params: params, params)
    state = jax.eval_shape(lambda params: bare.empty(params, 1, bare.buffer(1)), params)
    closed = jax.make_jaxpr(bare.step)(params, state)
    weights = [float(chip_bytes(leaf)) for leaf in jax.tree.leaves(params)]
    inputs = weights + [0.0] * (len(closed.jaxpr.invars) - len(weights))
    read, _ = _walked(closed.jaxpr, inputs)
    return read if math.isfinite(read) else None


def _walked(jaxpr: Any, inputs: Sequence[float]) -> tuple[float, list[float]]:
    """Bytes that a program reads, and bytes of the weights that each of its results stands for; 0 for data.

    Args:
      jaxpr: the program.
      inputs: the same of its arguments.
    """
    held = dict(zip(jaxpr.invars, inputs, strict=True))
    look = lambda atom: 0.0 if hasattr(atom, "val") else held.get(atom, 0.0)
    total = 0.0
    for eqn in jaxpr.eqns:
        read, outs = _read(eqn, [look(atom) for atom in eqn.invars])
        total += read
        held.update(zip(eqn.outvars, outs, strict=True))
    return total, [look(atom) for atom in jaxpr.outvars]


def _read(eqn: Any, held: list[float]) -> tuple[float, list[float]]:
    """The same of one operation."""
    name, data = eqn.primitive.name, [0.0] * len(eqn.outvars)
    if not any(held):
        return 0.0, data
    if name in ("scan", "while"):
        return _loop(eqn, held), data
    if name == "cond":
        found = [_walked(branch.jaxpr, held[1:]) for branch in eqn.params["branches"]]
        return max(read for read, _ in found), [max(outs) for outs in zip(*(outs for _, outs in found), strict=True)]
    if name in _APART:
        return 0.0, held
    inner = next((eqn.params[part] for part in ("jaxpr", "call_jaxpr") if part in eqn.params), None)
    if inner is not None and name not in _OPAQUE:
        return _walked(getattr(inner, "jaxpr", inner), held)
    sizes = [math.prod(atom.aval.shape) for atom in eqn.invars]
    made = [math.prod(var.aval.shape) for var in eqn.outvars]
    if name == "gather":
        return held[0] * min(1.0, made[0] / max(sizes[0], 1)) + sum(held[1:]), data
    if name in _SLICES:
        return 0.0, [held[0] * size / max(sizes[0], 1) for size in made]
    if any(size > 1 and not own for size, own in zip(sizes, held, strict=True)) or name in _OPAQUE:
        return sum(held), data
    return 0.0, [sum(held) * size / max(sum(made), 1) for size in made]  # made of weights alone


def _loop(eqn: Any, held: list[float]) -> float:
    """Bytes that a loop reads: per round what its body does, and once what it carries or stacks."""
    if eqn.primitive.name == "scan":
        consts, carried, rounds = eqn.params["num_consts"], eqn.params["num_carry"], eqn.params["length"]
        stacked = [own / max(rounds, 1) for own in held[consts + carried :]]
        body, inputs = eqn.params["jaxpr"].jaxpr, held[:consts] + [0.0] * carried + stacked
        return rounds * _walked(body, inputs)[0] + sum(held[consts : consts + carried])
    own = {"cond": held[: eqn.params["cond_nconsts"]], "body": held[eqn.params["cond_nconsts"] :]}
    consts = own["body"][: eqn.params["body_nconsts"]]
    begun = own["body"][eqn.params["body_nconsts"] :]
    of_cond = _walked(eqn.params["cond_jaxpr"].jaxpr, own["cond"] + [0.0] * len(begun))[0]
    of_body = _walked(eqn.params["body_jaxpr"].jaxpr, consts + [0.0] * len(begun))[0]
    return sum(begun) + (math.inf if of_cond + of_body else 0.0)
