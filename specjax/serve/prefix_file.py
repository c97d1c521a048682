"""A prefix cache in a file, for later processes: `save` and `load`.

A block is of one model, drafter and kind of device, and a file does not name them. Instead, `load` reads one prompt of the
file again: what comes out must be what the file has of it.

In the shape descriptions `N` denotes blocks, `T` the tokens of one.
"""

import functools
import os
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save as to_bytes

from specjax import decoder as decoding
from specjax.models.on_disk import replace
from specjax.serve.prefix_cache import Node, PrefixCache, keys_of_blocks
from specjax.serve.slots import Timing
from specjax.sharding.distributed import is_first, to_host

ROUNDING = 256
"""In units of rounding of a leaf's type, relative to its largest number: how far apart two readings of a block may be."""
DIFFERENT = 0.02
"""The share of integers, of a cache in few bits, in which two readings may differ."""
TOGETHER = 16
"""Blocks that are put into the pool by one program."""
LEAF = "leaf_"


def save(cache: PrefixCache, file: str | os.PathLike[str]) -> None:
    """Writes all blocks as one safetensors file, atomically; it replaces an older one. Nothing is written without a block.

    All processes call this, and the first one writes.

    Args:
      cache: that has served an engine.
      file: its folder must exist. It is as large as the blocks are on the device.

    Raises:
      OSError: if it cannot be written.
    """
    if not len(cache):
        return
    places, keys, before = cache.tree.entries()
    leaves = {
        name: np.ascontiguousarray(to_host(leaf)[places]).reshape(len(places), _numbers(leaf)).view(np.uint8)
        for name, leaf in _named(cache.pool)
    }
    tokens = np.stack([np.frombuffer(key, np.int32) for key in keys])
    if is_first():
        replace(file, [to_bytes({"tokens": tokens, "before": np.asarray(before, np.int32), **leaves})])


def _named(pool: Sequence[jax.Array]) -> Iterator[tuple[str, jax.Array]]:
    """The leaves `[N, ...]`, by the names that a file has for them."""
    return ((f"{LEAF}{i}", leaf) for i, leaf in enumerate(pool))


def _numbers(leaf: jax.Array) -> int:
    """How many numbers a block has in a leaf `[N, ...]`."""
    return int(np.prod(leaf.shape[1:]))


def load(engine: Any, file: str | os.PathLike[str]) -> int:
    """Fills an engine's cache with the blocks of a file, and returns how many. It forgets what it had.

    The blocks that were used last come first: a smaller cache takes as many as it has room for.

    Args:
      engine: a `specjax.Engine` with a prefix cache.
      file: from `save`.

    Raises:
      ValueError: if the engine has no prefix cache, or the file cannot be read, has blocks of another size, or is of
        another model, drafter or device. The cache is then empty.
    """
    if (cache := engine.prefix_cache) is None:
        raise ValueError("this engine has no prefix cache: make it with prefix_cache='256MB', say")
    cache.clear()
    try:
        with safe_open(file, "np") as parts:
            tokens, before = parts.get_tensor("tokens"), parts.get_tensor("before")
            if tokens.shape[1] != cache.block + 1:
                raise ValueError(
                    f"{str(file)!r} has blocks of {tokens.shape[1] - 1} tokens, and this prefix cache has blocks of "
                    f"{cache.block}: name another file"
                )
            nodes, path = _read_again(engine, tokens, before)
            if not _agree(cache.pool, [node.place for node in nodes], path[: len(nodes)], parts):
                cache.clear()
                raise ValueError(
                    f"the prefix cache in {str(file)!r} is of another model, drafter or device: name another file, or "
                    "delete it"
                )
            cache.requests = cache.hits = 0
            return _fill(cache, tokens, before, parts)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"cannot read a prefix cache from {str(file)!r}: {error}") from error


def _read_again(engine: Any, tokens: np.ndarray, before: np.ndarray) -> tuple[list[Node], list[int]]:
    """The blocks of a prompt that was read just now, and where the file has them; the tree and the pool have no others.

    Args:
      engine: whose cache is empty.
      tokens: `[N, T + 1]` int32.
      before: `[N]` int32.
    """
    cache, decoder, params = engine.prefix_cache, engine.decoder, engine.params
    at = int(np.setdiff1d(np.arange(len(before)), before)[0])  # a block that no other continues
    path = []
    while at >= 0:
        path.append(at)
        at = int(before[at])
    path.reverse()
    ids = [*tokens[path, :-1].ravel().tolist(), int(tokens[path[-1], -1])]
    dtype = jax.tree.leaves(params["target"])[0].dtype
    state = decoding.empty(decoder, params, 1, decoder.buffer(len(ids) + decoder.slack), dtype)
    cache.read(decoder, params, state, ids, Timing())
    return cache.tree.path(keys_of_blocks(ids, cache.block)), path


def _rows(parts: Any, name: str, rows: Sequence[int] | np.ndarray, leaf: jax.Array) -> np.ndarray:
    """Blocks of a leaf as the file has them."""
    return parts.get_tensor(name)[rows].view(leaf.dtype).reshape(len(rows), *leaf.shape[1:])


def _agree(pool: Sequence[jax.Array], places: list[int], rows: list[int], parts: Any) -> bool:
    """Whether these places of the pool hold what the file has in these rows, up to rounding."""
    names = dict(_named(pool))
    if set(names) != set(parts.keys()) - {"tokens", "before"}:
        return False
    for name, leaf in names.items():
        if parts.get_slice(name).get_shape()[1] != _numbers(leaf) * leaf.dtype.itemsize:
            return False
        own, found = (np.asarray(x) for x in (to_host(leaf[np.asarray(places)]), _rows(parts, name, rows, leaf)))
        if not jnp.issubdtype(leaf.dtype, jnp.inexact):
            if np.mean(own != found) > DIFFERENT:
                return False
            continue
        own, found = own.astype(np.float32), found.astype(np.float32)
        if not np.allclose(own, found, rtol=0, atol=ROUNDING * float(jnp.finfo(leaf.dtype).eps) * np.abs(own).max()):
            return False
    return True


def _fill(cache: PrefixCache, tokens: np.ndarray, before: np.ndarray, parts: Any) -> int:
    """Puts the blocks that there is room for into the pool, in the order of the file."""
    count = min(len(tokens), cache.pool[0].shape[0] - 1)
    cache.tree.fill([one.tobytes() for one in tokens[:count]], before[:count].tolist())
    for name, leaf in _named(cache.pool):
        i = int(name.removeprefix(LEAF))
        for begin in range(0, count, TOGETHER):
            places = np.arange(begin, begin + TOGETHER) + 1
            blocks = _rows(parts, name, np.minimum(places, count) - 1, leaf)
            cache.pool[i] = _put(cache.pool[i], np.where(places > count, leaf.shape[0], places), blocks, leaf.sharding)
    return count


@functools.partial(jax.jit, static_argnums=3, donate_argnums=0)
def _put(leaf: jax.Array, places: Any, blocks: Any, sharding: jax.sharding.Sharding) -> jax.Array:
    """A leaf `[N, ...]` with blocks at these places; those that are none are left out."""
    return jax.lax.with_sharding_constraint(leaf.at[places].set(blocks, mode="drop"), sharding)
