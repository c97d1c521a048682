"""The traffic of Pallas kernels, from their block specs and grids.

The compiler does not look into a kernel, so its traffic is computed before lowering. The index map names the blocks of
an operand, in the order of the grid, and a block is fetched whenever it differs from the previous one. A grid or index
map that depends on data (the filled part of a cache) is evaluated for the given input values.

An operand without blocks, which a kernel reads freely, counts in full. If it is written in place, it counts what the
kernel declares to move.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.plan.hlo import Buffer, Kernel, Op

_SMALL = 1 << 16
"""The most elements of a value that is followed."""
_CALLS = {"tpu_custom_call", "__gpu$xla.gpu.triton", "triton_kernel_call"}
_LOWERED = ("kv_commit", "tree_attention")

Key = tuple[tuple[int, ...], ...]


@dataclasses.dataclass
class _Found:
    """The platform, and the findings so far: kernels, and operations already visited."""

    platform: str
    devices: int
    calls: dict[Key, tuple[list[int], int]] = dataclasses.field(default_factory=dict)
    traced: set[Any] = dataclasses.field(default_factory=set)


def kernels(step: Callable[..., Any], args: Sequence[Any], platform: str = "tpu", devices: int = 1) -> Kernel:
    """The traffic of every Pallas call of a function, for `specjax.plan.hlo.traffic`.

    Args:
      step: the function to trace.
      args: its arguments, as pytrees of `ShapeDtypeStruct`s; and of numpy arrays for known values on which kernels'
        grids and index maps depend.
      platform: the platform for which it is compiled.
      devices: the number of its devices.
    """
    jaxpr = jax.make_jaxpr(step)(*args)
    values = [leaf if isinstance(leaf, np.ndarray) else None for leaf in jax.tree.leaves(args)]
    found = _Found(platform, devices)
    _walk(jaxpr.jaxpr, jaxpr.consts, values, found)

    def kernel(op: Op, operands: Sequence[tuple[Buffer, ...]]) -> tuple[int, int, int] | None:
        if op.target not in _CALLS:
            return None
        if op.source.endswith("scaled_dot/pallas_call"):
            return _all_of(op, operands)
        call = found.calls.get(tuple(b.dims for value in (*operands, op.value) for b in value))
        if call is None:
            return None
        sizes, flops = call
        given = zip(sizes, (value[0] for value in operands), strict=False)
        read = sum(buffer.padded(size) for size, buffer in given if buffer.space == 0)
        result = zip(sizes[len(operands) :], op.value, strict=True)
        made = sum(buffer.padded(size) for size, buffer in result if buffer.space == 0)
        return read, made, flops

    return kernel


def _all_of(op: Op, operands: Sequence[tuple[Buffer, ...]]) -> tuple[int, int, int]:
    """The traffic of `specjax.kernels.scaled_dot` on a GPU: each operand once, one of several matrices, and one
    product's operations."""
    (x, matrices, *_), (out,) = [buffer for value in operands for buffer in value], op.value
    read = sum(buffer.hbm for value in operands for buffer in value)
    read -= matrices.hbm - matrices.hbm // matrices.dims[0]
    return read, out.hbm, 2 * math.prod(out.dims[1:]) * x.dims[1]  # out's first axis has parts of the inputs


def _walk(jaxpr: Any, consts: Sequence[Any], inputs: Sequence[Any], found: _Found) -> list[Any]:
    """Evaluates everything that follows from the known inputs, and records the kernels."""
    env: dict[Any, Any] = {}

    def look(atom):
        return np.asarray(atom.val) if hasattr(atom, "val") else env.get(atom)

    for var, value in itertools.chain(
        zip(jaxpr.constvars, consts, strict=True), zip(jaxpr.invars, inputs, strict=True)
    ):
        env[var] = value if value is not None and np.size(value) <= _SMALL else None
    for eqn in jaxpr.eqns:
        values = [look(atom) for atom in eqn.invars]
        outs = _evaluate(eqn, values, found)
        for var, out in zip(eqn.outvars, outs, strict=True):
            env[var] = out
    return [look(atom) for atom in jaxpr.outvars]


def _evaluate(eqn, values, found):
    name, unknown = eqn.primitive.name, [None] * len(eqn.outvars)
    if name == "sharding_constraint":
        return values
    if name == "pallas_call":
        key, *moved = _call(eqn, values)
        found.calls[key] = moved[0], moved[1]
        return unknown
    if name in _LOWERED:  # may be lowered to a kernel
        _look_into(eqn, values, found)
        return unknown
    if name == "cond":
        index, *rest = values
        branches = eqn.params["branches"]
        chosen = branches if index is None else [branches[int(np.clip(index, 0, len(branches) - 1))]]
        outs = [_walk(branch.jaxpr, branch.consts, rest, found) for branch in chosen]
        return outs[0] if len(outs) == 1 else unknown
    if name == "shard_map":
        mesh, specs = eqn.params["mesh"], eqn.params["in_specs"]
        local = [_shard(value, spec, mesh) for value, spec in zip(values, specs, strict=True)]
        _walk(eqn.params["jaxpr"], (), local, found)
        return unknown
    if name in ("scan", "while"):
        for part in ("jaxpr", "body_jaxpr"):
            if part in eqn.params:
                inner = eqn.params[part]
                counts = eqn.params["num_consts"] if name == "scan" else eqn.params["body_nconsts"]
                skip = 0 if name == "scan" else eqn.params["cond_nconsts"]
                held = list(values[skip : skip + counts])
                _walk(inner.jaxpr, inner.consts, held + [None] * (len(inner.jaxpr.invars) - counts), found)
        return unknown
    inner = next((eqn.params[part] for part in ("jaxpr", "call_jaxpr", "fun_jaxpr") if part in eqn.params), None)
    if inner is not None:
        closed = hasattr(inner, "consts")
        return _walk(inner.jaxpr if closed else inner, inner.consts if closed else (), values, found)
    small = all(math.prod(var.aval.shape) <= _SMALL for var in eqn.outvars if hasattr(var.aval, "shape"))
    if not small or any(value is None for value in values) or eqn.effects:
        return unknown
    typed = [jnp.asarray(value, atom.aval.dtype) for value, atom in zip(values, eqn.invars, strict=True)]
    outs = eqn.primitive.bind(*typed, **eqn.params)
    return list(outs) if eqn.primitive.multiple_results else [outs]


def _look_into(eqn, values, found):
    from specjax.kernels.kv_commit import lowered as write
    from specjax.kernels.tree_attention import lowered as attention

    lowered = {"kv_commit": write, "tree_attention": attention}[eqn.primitive.name]
    avals = [jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype) for var in eqn.invars]
    known = tuple(None if value is None else value.tobytes() for value in values)
    once = (tuple((aval.shape, aval.dtype.name) for aval in avals), known, tuple(sorted(map(str, eqn.params.items()))))
    if once not in found.traced:
        found.traced.add(once)
        inner = jax.make_jaxpr(lowered.served(found.platform, found.devices, **eqn.params))(*avals)
        _walk(inner.jaxpr, inner.consts, values, found)


def _shard(value, spec, mesh):
    """The first chip's part of a value."""
    if value is None:
        return None
    for axis, names in enumerate(spec):
        names = () if names is None else names if isinstance(names, tuple) else (names,)
        parts = math.prod(mesh.shape[name] for name in names)
        value = np.take(value, range(value.shape[axis] // parts), axis=axis)
    return value


def _call(eqn, values):
    """A call's shapes of operands and results, the bytes of each that it moves, and its operations if it declares none.

    The operations are the products of every point of its grid, including those that a point skips."""
    mapping = eqn.params["grid_mapping"]
    dynamic, prefetch = mapping.num_dynamic_grid_bounds, mapping.num_index_operands
    bounds = iter(values[:dynamic])
    grid = [size if isinstance(size, int) else next(bounds) for size in mapping.grid]
    scalars = [None if value is None else np.asarray(value) for value in values[dynamic : dynamic + prefetch]]
    avals = [var.aval for var in (*eqn.invars, *eqn.outvars)]
    sizes = [math.prod(aval.shape) * aval.dtype.itemsize for aval in avals]
    if all(size is not None for size in grid) and all(value is not None for value in scalars):
        points = np.stack(np.meshgrid(*(np.arange(int(size)) for size in grid), indexing="ij"), -1).reshape(
            -1, len(grid)
        )
        for at, block in enumerate(mapping.block_mappings):
            sizes[dynamic + prefetch + at] = _fetched(block, points, scalars)
    declared, aliases = eqn.params["cost_estimate"], eqn.params["input_output_aliases"]
    if declared is not None and aliases:  # operands written in place move the rest of the declared bytes
        inside = {at for i, o in aliases for at in (i, len(eqn.invars) + o)}
        left = declared.bytes_accessed - sum(size for at, size in enumerate(sizes) if at not in inside)
        sizes = [left // len(inside) if at in inside else size for at, size in enumerate(sizes)]
    known = all(size is not None for size in grid) and declared is None
    flops = _products(eqn.params["jaxpr"]) * math.prod(map(int, grid)) if known else 0
    return tuple(aval.shape for aval in avals), sizes, flops


def _products(jaxpr):
    """The operations of the matrix products in a jaxpr and its nested jaxprs."""
    total = 0
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            (summed, _), _ = eqn.params["dimension_numbers"]
            depth = math.prod(eqn.invars[0].aval.shape[axis] for axis in summed)
            total += 2 * depth * math.prod(eqn.outvars[0].aval.shape)
        times = eqn.params["length"] if eqn.primitive.name == "scan" else 1
        for inner in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            total += times * _products(inner) if hasattr(inner, "eqns") else 0
    return total


def _fetched(block, points, scalars):
    """The bytes of one operand's blocks, in the order in which they are fetched."""
    whole = block.array_aval
    sizes = np.asarray(
        [getattr(size, "block_size", size if isinstance(size, int) else 1) for size in block.block_shape]
    )
    starts = jax.vmap(
        lambda point: jnp.stack(block.compute_start_indices_interpret(list(point), *map(jnp.asarray, scalars)))
    )
    starts = np.asarray(starts(jnp.asarray(points, jnp.int32)))
    new = np.append(True, np.any(starts[1:] != starts[:-1], axis=1))
    inside = np.minimum(
        sizes[None], np.asarray(whole.shape)[None] - starts[new]
    )  # the last block may reach past the end
    return int(np.prod(inside, axis=1).sum()) * whole.dtype.itemsize
