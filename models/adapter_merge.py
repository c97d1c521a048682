"""Merges adapters into a model's parameters; `specjax.models.adapters` reads them and has the formulas.

Shapes: `in` and `out` are the sizes of a layer's vectors, `r` is the rank, and `X` the number of experts.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.models.adapters import PARAMETERS, Adapter, Change
from specjax.models.byte_ranges import Source
from specjax.models.errors import ModelError
from specjax.models.tensors import Tensor
from specjax.models.weights import Layout, Names, Part, cut, cut_array, listed, shape_of, stored_parts

Array = jax.Array


def merged(params: Any, adapter: Adapter, names: Names, layout: Layout) -> Any:
    """The parameters with the adapter in them. The arrays that it changes are given up.

    Args:
      params: of the model, as they are stored (without copies of kv-heads).
      adapter: what `specjax.models.adapters.read` returned.
      names: see `specjax.models.weights.Names`.
      layout: see `specjax.models.weights.Layout`.

    Raises:
      ModelError: naming every layer that the model lacks or has in another size.
    """
    leaves, tree = jax.tree_util.tree_flatten_with_path(params)
    stored = stored_parts(leaves, names, layout)
    places = {name: _places(name, stored, names) for name in (*adapter.whole, *adapter.changes)}
    problems = [said for name, own in adapter.whole.items() if (said := _unlike(name, places[name], own))]
    problems += [said for name, own in adapter.changes.items() if (said := _unfit(name, places[name], own))]
    if problems:
        raise ModelError(f"{adapter.folder}: the adapter does not fit the model: {listed(problems)}")
    arrays = [leaf for _, leaf in leaves]
    for name, tensor in adapter.whole.items():
        for number, parts in enumerate(places[name]):
            whole = tensor if len(tensor.shape) == len(shape_of(parts)) else _matrix(tensor, number)
            for part, own in zip(parts, cut(whole, parts), strict=True):
                arrays[part.leaf] = _replaced(arrays[part.leaf], part, own)
    for name, change in adapter.changes.items():
        parts_of = _by_expert(places[name])
        for (a, b), parts in zip(_matrices(change, parts_of), parts_of, strict=True):
            for part, rows in _rows(parts):
                index = None if part.index is None else jnp.int32(part.index)
                size = None if change.magnitude is None else _float32(change.magnitude.array()[rows])
                kernel = arrays[part.leaf]
                arrays[part.leaf] = _adder(kernel.sharding)(kernel, index, change.scale, a, b[rows], size)
    return jax.tree.unflatten(tree, arrays)


def changed(params: Any, adapter: Adapter, names: Names, layout: Layout) -> Any:
    """Only the parameters that an adapter changes, changed, in nested dicts like `params`, which stay as they are.

    The arguments and errors are those of `merged`.
    """
    leaves, _ = jax.tree_util.tree_flatten_with_path(params)
    stored = stored_parts(leaves, names, layout)
    every = [_places(name, stored, names) for name in (*adapter.whole, *adapter.changes)]
    own: dict[Any, Any] = {}
    for leaf in sorted({part.leaf for places in every for parts in places for part in parts}):
        path, array = leaves[leaf]
        *outer, last = (step.key for step in path)
        inner = own
        for name in outer:
            inner = inner.setdefault(name, {})
        inner[last] = jnp.copy(array)
    return merged(own, adapter, names, layout)


def _places(name: str, stored: Mapping[str, list[Part]], names: Names) -> list[list[Part]]:
    """The parts of a tensor, by its name in the file or in Llama's layout; of several experts' matrices those of each.
    Empty if the model has no such tensor."""
    found = stored.get(name) or stored.get(names(name))
    if found:
        return [found]
    module, _, last = name.rpartition(".")
    if last not in PARAMETERS:
        return []
    each = ("gate_proj", "up_proj") if last == PARAMETERS[0] else (last,)
    own = lambda i: [stored.get(names(f"{module}.{i}.{matrix}.weight"), []) for matrix in each]
    experts = itertools.takewhile(all, map(own, itertools.count()))
    return [list(itertools.chain.from_iterable(parts)) for parts in experts]


def _by_expert(places: list[list[Part]]) -> list[list[Part]]:
    """The same, with one part for each index of a parameter that is stored as several matrices."""
    if len(places) == 1 and (each := places[0][0].each):
        return [places[0][at : at + each] for at in range(0, len(places[0]), each)]
    if len(places) == 1 and len(places[0][0].shape) == 3:
        (part,) = places[0]
        count, *shape = part.shape
        return [[dataclasses.replace(part, index=i, shape=tuple(shape))] for i in range(count)]
    return places


def _size(parts: list[Part]) -> tuple[int, ...]:
    """The shape that the parts of a matrix have together."""
    return shape_of(_of_matrix(parts))


def _rows(parts: list[Part]) -> list[tuple[Part, np.ndarray]]:
    """Each part of a matrix with the outputs of the file's matrix that are its own, in the order of the parameter."""
    outputs = sum(part.shape[-2 if part.transposed else -1] for part in parts)
    found = cut_array(np.arange(outputs), _of_matrix(parts), axis=0)
    return [(part, part.ours(own)) for part, own in zip(parts, found, strict=True)]


def _of_matrix(parts: list[Part]) -> list[Part]:
    """The parts, without a further axis of the tensor."""
    return [dataclasses.replace(part, each=0) for part in parts]


def _unlike(name: str, places: list[list[Part]], own: Tensor) -> str | None:
    """What keeps a tensor from replacing the model's; None: nothing."""
    if not places:
        return f"{name} is no tensor of the model"
    size = shape_of(places[0]) if len(places) == 1 else (len(places), *shape_of(places[0]))
    if size != own.shape:
        return f"{name} is {list(size)}, and the adapter's is {list(own.shape)}"
    return None


def _unfit(name: str, places: list[list[Part]], change: Change) -> str | None:
    """What keeps a change from being merged; None: nothing."""
    parts = _by_expert(places)[0] if places else []
    layers = {"linear": (True,), "embedding": (False,), "parameter": (True, False)}[change.kind]
    if not parts or not all(part.transposed in layers and len(part.shape) == 2 for part in parts):
        what = {"linear": "linear layer", "embedding": "table of embeddings", "parameter": "matrix"}[change.kind]
        return f"{name} is no {what} of the model"
    size, found = _sizes(parts), (change.b.shape[0], change.a.shape[1])
    if size != found and (change.kind != "parameter" or size != found[::-1]):
        return f"{name} is {list(size)}, and the adapter's is {list(found)}"
    if change.a.shape[0] != change.rank * len(_by_expert(places)):
        return f"{name} has matrices of rank {change.a.shape[0]} for {len(_by_expert(places))} of rank r={change.rank}"
    if change.magnitude is not None and change.magnitude.shape != size[:1]:
        return (
            f"{name} has {size[0]} outputs, and the adapter's lora_magnitude_vector is {list(change.magnitude.shape)}"
        )
    return None


def _sizes(parts: list[Part]) -> tuple[int, int]:
    """The outputs and inputs of a matrix."""
    rows, columns = _size(parts)
    return (rows, columns) if parts[0].transposed else (columns, rows)


def _matrices(change: Change, places: list[list[Part]]) -> Sequence[tuple[np.ndarray, np.ndarray]]:
    """A `[r, in]` and B `[out, r]` of each matrix that is changed."""
    a, b = _float32(change.a.array()), _float32(change.b.array())
    firsts = a.reshape(len(places), change.rank, -1)
    seconds = np.moveaxis(b.reshape(-1, change.rank, len(places)), 2, 0)
    if (b.shape[0], a.shape[1]) == _sizes(places[0]):
        return list(zip(firsts, seconds, strict=True))
    return [(own.T, first.T) for first, own in zip(firsts, seconds, strict=True)]


def _float32(x: np.ndarray) -> np.ndarray:
    return np.asarray(x, np.float32)


def _matrix(tensor: Tensor, number: int) -> Tensor:
    """One of the matrices of a tensor."""
    return dataclasses.replace(tensor.rows(number, number + 1), shape=tensor.shape[1:])


def _replaced(array: Array, part: Part, own: Tensor) -> Array:
    """A parameter, or one of its matrices, read anew; it lies where it lay."""
    source = Source(own, part.transposed, array.dtype)
    if part.index is None:
        return source.placed(array.dtype, array.sharding)
    return _setter(array.sharding)(array, jnp.int32(part.index), np.asarray(source.placed(array.dtype, None)))


@functools.cache
def _setter(place: jax.sharding.Sharding) -> Callable[..., Array]:
    """Replaces one of several matrices `[X, in, out]`."""
    return jax.jit(lambda array, index, own: array.at[index].set(own), donate_argnums=0, out_shardings=place)


@functools.cache
def _adder(place: jax.sharding.Sharding) -> Callable[..., Array]:
    """Adds to a kernel `[in, out]`, or to one of several, `[X, in, out]`, and leaves it where it lies."""

    def added(kernel: Array, index: Array | None, scale: Array, a: Array, b: Array, magnitude: Array | None) -> Array:
        own = kernel if index is None else kernel[index]
        product = jnp.einsum("ri,or->io", a, b, precision="highest")
        summed = own.astype(jnp.float32) + scale * product
        if magnitude is not None:
            summed = summed * (magnitude / jnp.linalg.norm(summed, axis=0))[None]
        summed = summed.astype(kernel.dtype)
        return summed if index is None else kernel.at[index].set(summed)

    return jax.jit(added, donate_argnums=0, out_shardings=place)
