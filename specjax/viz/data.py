"""The data of pictures, read from the library's results; figures and text share it."""

import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from specjax.tree import Tree


@dataclasses.dataclass(frozen=True)
class Node:
    """A valid node of a token tree.

    Attributes:
      id: its number in the tree.
      parent: its parent's number; -1 for the root.
      depth: 0 for the root.
      word: its token in readable form.
      kept: whether it is on the accepted path; if the path is known, the root always is.
      follows: whether it is the target's own token after the path, and not a node of the tree.
    """

    id: int
    parent: int
    depth: int
    word: str
    kept: bool = False
    follows: bool = False


def nodes_of(step: Any, row: int = 0, tokenizer: Any = None) -> list[Node]:
    """The valid nodes of one row's tree, parents before children; the target's own token, if known, comes last.

    Args:
      step: a `specjax.StepInfo`; or a `specjax.Tree`, whose path is not known.
      row: a row of the batch.
      tokenizer: turns ids into words; None: the ids are shown.

    Raises:
      ValueError: if there is no such row.
    """
    tree: Tree = getattr(step, "tree", step)
    verdict = getattr(step, "verdict", None)
    if not 0 <= row < tree.tokens.shape[0]:
        raise ValueError(f"there is no row {row} in a batch of {tree.tokens.shape[0]}")
    at = lambda array: np.asarray(array)[row].tolist()
    path, token = [], -1
    if verdict is not None:
        path, token = at(verdict.path)[: 1 + at(verdict.accepted)], at(verdict.next_token)
    tokens, parents, depths = at(tree.tokens), at(tree.parent), at(tree.depth)
    found = [
        Node(node, parents[node], depths[node], word_of(tokens[node], tokenizer), node in path)
        for node, valid in enumerate(at(tree.valid))
        if valid
    ]
    if token >= 0:
        found.append(Node(len(tokens), path[-1], depths[path[-1]] + 1, word_of(token, tokenizer), follows=True))
    return found


def word_of(token: int, tokenizer: Any) -> str:
    """A token in readable form: spaces and line breaks are visible; without a tokenizer it is the id."""
    return str(token) if tokenizer is None else repr(tokenizer.decode([token]))[1:-1].replace(" ", "\u2423")


def survival(accepted: Sequence[int]) -> tuple[float, ...]:
    """The shares of steps that accepted at least 1, 2, ... tokens, from counts of those that accepted 0, 1, 2, ...

    >>> survival((2, 1, 1))
    (0.5, 0.25)
    """
    total = max(sum(accepted), 1)
    return tuple(round(sum(accepted[depth:]) / total, 4) for depth in range(1, len(accepted)))


def acceptances(what: Any) -> dict[str, tuple[float, ...]]:
    """Shares of steps that accepted at least 1, 2, ... draft tokens, by decoder name, without decoders that draft
    nothing.

    Args:
      what: a report of `specjax bench` or its JSON; or a dict from names to records of `specjax.generate`, a decoder's
        state, or shares.
    """
    rows = _field(what, "rows")
    if rows is None:
        return {name: _shares(source) for name, source in what.items()}
    return {_field(row, "decoder"): tuple(_field(row, "acceptance_by_depth") or ()) for row in rows}


def _shares(source: Any) -> tuple[float, ...]:
    if hasattr(source, "stats"):
        return survival(np.asarray(source.stats.accepted).sum(axis=0).tolist())
    counts = [_field(record, "accepted") for record in source if not isinstance(record, float | int)]
    if not counts:
        return tuple(source)
    return survival([sum(column) for column in itertools.zip_longest(*filter(None, counts), fillvalue=0)])


@dataclasses.dataclass(frozen=True)
class Speed:
    """A decoder's or a peer's speed relative to plain decoding."""

    name: str
    ratio: float
    peer: bool = False


def speeds(report: Any) -> list[Speed]:
    """The speeds of every row and peer of a report of `specjax bench`, or of its JSON."""
    rows = _field(report, "rows")
    plain = _field(rows[0], "tokens_per_second")
    ours = [Speed(_field(row, "decoder"), _field(row, "ratio_to_plain")) for row in rows]
    return ours + [
        Speed(f"{_field(peer, 'peer')} {_field(peer, 'mode')}", _field(peer, "tokens_per_second") / plain, peer=True)
        for peer in _field(report, "peers") or ()
    ]


def orders(what: Any) -> dict[str, np.ndarray]:
    """The step that wrote each position (0: given), by a name that includes the number of passes.

    Args:
      what: rows of `specjax bench order`, their JSON, or a dict from names to orders.
    """
    if isinstance(what, Mapping) and "rows" not in what:
        return {f"{name} ({max(order, default=0)})": np.asarray(order) for name, order in what.items()}
    rows = what["rows"] if isinstance(what, Mapping) else what
    return {f"{_field(row, 'decoder')} ({_field(row, 'passes')})": np.asarray(_field(row, "order")) for row in rows}


def check_words(found: Mapping[str, np.ndarray], words: Sequence[str]) -> None:
    """Raises ValueError unless there is one decoder, with one word for each position."""
    if len(found) != 1:
        raise ValueError(f"words are those of one decoder, and there are {len(found)}: draw one at a time")
    (order,) = found.values()
    if len(words) != len(order):
        raise ValueError(f"{len(words)} words do not name {len(order)} positions")


def times(what: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Seconds by name and part. An engine's `Timing` has a part for each of its `..._seconds`."""
    end = "_seconds"
    own = lambda value: {name.removesuffix(end): x for name, x in vars(value).items() if name.endswith(end)}
    return {name: dict(value) if isinstance(value, Mapping) else own(value) for name, value in what.items()}


def unit_of(seconds: Iterable[float]) -> tuple[str, float]:
    """A suitable unit for the largest of these, and how many of it are in a second."""
    most = max(seconds, default=0.0)
    return ("s", 1.0) if most >= 1 else ("ms", 1e3) if most >= 1e-3 else ("us", 1e6)


@dataclasses.dataclass(frozen=True)
class Tile:
    """A part of a cache's array, held by one device or copied on several.

    Attributes:
      devices: their ids.
      spans: `(first, end)` of rows, heads and slots.
    """

    devices: tuple[int, ...]
    spans: tuple[tuple[int, int], ...]


@dataclasses.dataclass(frozen=True)
class Layout:
    """The layout of a cache over devices.

    Attributes:
      sizes: rows, heads and slots of an array; 1 for a missing dimension.
      tiles: of one array; other arrays of its shape are laid out in the same way.
      arrays: the number of such arrays; `dtype` is their type.
      bytes: of the whole cache, with copies counted once; `device_bytes` is the part on one device.
      lengths: the slots in use of every row, if known.
    """

    sizes: tuple[int, ...]
    tiles: tuple[Tile, ...]
    arrays: int
    dtype: str
    bytes: int
    device_bytes: int
    lengths: tuple[int, ...] | None


SIDES = {"rows": "batch", "heads": "kv_heads", "slots": "slots"}
"""The dimensions that a layout shows, and the logical axes of each."""


def layout(decoder: Any, state: Any) -> Layout:
    """The cache layout of a decoder's state, which may consist of `ShapeDtypeStruct`s with shardings.

    Raises:
      ValueError: if the state has no cache.
    """
    leaves, names = jax.tree.leaves(getattr(state, "cache", None)), []
    if not leaves:
        raise ValueError(f"the state of {type(decoder).__name__} has no cache")
    jax.tree.map(lambda leaf, axes: names.append(axes), state.cache, decoder.axes(state).cache)
    places = [_sharding(leaf) for leaf in leaves]
    kinds = [(leaf.shape, str(place)) for leaf, place in zip(leaves, places, strict=True)]
    size = lambda leaf, shape: int(np.prod(shape)) * leaf.dtype.itemsize
    at = max(range(len(leaves)), key=lambda i: (size(leaves[i], leaves[i].shape), -i))
    leaf, axes = leaves[at], names[at]
    dims = [axes.index(name) if name in axes else None for name in SIDES.values()]
    held: dict[tuple[tuple[int, int], ...], list[int]] = {}
    for device, index in places[at].devices_indices_map(leaf.shape).items():
        spans = tuple((0, 1) if dim is None else index[dim].indices(leaf.shape[dim])[:2] for dim in dims)
        held.setdefault(spans, []).append(device.id)
    return Layout(
        sizes=tuple(1 if dim is None else leaf.shape[dim] for dim in dims),
        tiles=tuple(Tile(tuple(sorted(devices)), spans) for spans, devices in sorted(held.items())),
        arrays=kinds.count(kinds[at]),
        dtype=leaf.dtype.name,
        bytes=sum(size(x, x.shape) for x in leaves),
        device_bytes=sum(size(x, place.shard_shape(x.shape)) for x, place in zip(leaves, places, strict=True)),
        lengths=tuple(np.asarray(state.length).tolist()) if isinstance(state.length, jax.Array) else None,
    )


def devices_of(tile: Tile) -> str:
    """The devices that hold a tile, as a short string."""
    ids = tile.devices
    text = ",".join(map(str, ids))
    run = len(ids) > 2 and ids == tuple(range(ids[0], ids[-1] + 1))
    return f"{ids[0]}-{ids[-1]}" if run else text


def size_of(found: Layout) -> str:
    """A layout's arrays and bytes, in one line."""
    rows, heads, slots = found.sizes
    count = len({device for tile in found.tiles for device in tile.devices})
    return (
        f"{found.arrays} arrays {found.dtype}, {rows} rows x {heads} heads x {slots} slots: {_bytes(found.bytes)}, "
        f"{_bytes(found.device_bytes)} on each of {count} devices"
    )


def _bytes(count: int) -> str:
    scale, unit = next((s, u) for s, u in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1, "B")) if count >= s or s == 1)
    return f"{count / scale:.3g} {unit}"


def _sharding(leaf: Any) -> Any:
    return leaf.sharding or jax.sharding.SingleDeviceSharding(jax.devices()[0])


def _field(value: Any, name: str) -> Any:
    """A field of an object or of its JSON; None if it has no such field."""
    return value.get(name) if isinstance(value, Mapping) else getattr(value, name, None)
