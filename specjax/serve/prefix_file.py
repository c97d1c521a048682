"""A prefix cache in a file, for later processes: `save` and `load`.

A file tells its model by a sample of all parameters. What they cannot tell (settings of the model, the device) shows when
`load` reads a prompt of the file again: what comes out must be what the file has of it.

In the shape descriptions `N` denotes blocks, `T` the tokens of one.
"""

import functools
import hashlib
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
from specjax.serve.prefix_cache import PrefixCache, keys_of_blocks
from specjax.serve.slots import Timing
from specjax.sharding.distributed import is_first, to_host

ROUNDING = 4
"""In units of rounding of a leaf's type: how far apart two readings of a block may be, relative to its size (both by the
root of the mean square)."""
DIFFERENT = 0.001
"""The share of integers, of a cache in few bits, in which two readings may differ."""
SAMPLE = 64
"""Numbers of each parameter by which a model is told."""
TOGETHER = 16
"""Blocks that are put into the pool by one program."""
LEAF = "leaf_"
OWN = ("tokens", "before", "buffers")


def save(engine: Any, file: str | os.PathLike[str]) -> None:
    """Writes all blocks of an engine's cache as one safetensors file, atomically; it replaces an older one. Nothing is
    written without a block.

    All processes call this, and the first one writes.

    Args:
      engine: a `specjax.Engine` with a prefix cache.
      file: its folder must exist. It is as large as the blocks are on the device, and takes twice as much of the host's
        memory while it is made.

    Raises:
      ValueError: if the engine has no prefix cache.
      OSError: if it cannot be written.
    """
    cache = _cache_of(engine)
    if not len(cache):
        return
    nodes, before = cache.tree.entries()
    places = [node.place for node in nodes]
    arrays: dict[str, np.ndarray] = {
        name: np.ascontiguousarray(to_host(leaf)[places]).reshape(len(places), _numbers(leaf)).view(np.uint8)
        for name, leaf in _named(cache.pool)
    }
    arrays["tokens"] = np.stack([np.frombuffer(node.key, np.int32) for node in nodes])
    arrays["before"] = np.asarray(before, np.int32)
    arrays["buffers"] = np.asarray([node.buffer for node in nodes], np.int32)
    made_for = fingerprint(engine.params)
    if is_first():
        own = f"{os.fspath(file)}.{os.getpid()}"  # of two jobs that end together, the last one's file stays
        replace(own, [to_bytes(arrays, {"made_for": made_for})])
        os.replace(own, file)


def fingerprint(params: Any) -> str:
    """Tells parameters from others: a hash of their names, shapes and types, and of `SAMPLE` numbers of each."""
    leaves = jax.tree_util.tree_flatten_with_path(params)[0]
    about = [(jax.tree_util.keystr(path), leaf.shape, str(leaf.dtype)) for path, leaf in leaves]
    parts = to_host(_sampled([leaf for _, leaf in leaves]))
    digest = hashlib.blake2b(repr(about).encode(), digest_size=16)
    for part in parts:
        digest.update(np.asarray(part).tobytes())
    return digest.hexdigest()


@jax.jit
def _sampled(leaves: list[jax.Array]) -> list[jax.Array]:
    """Evenly spread numbers of each array; of an empty one, none."""

    def some(leaf):
        # by their places on each axis, so that nothing is made flat on a mesh
        size = int(np.prod(leaf.shape))
        flat = np.unique(np.linspace(0, size - 1, min(SAMPLE, size)).astype(int)) if size else np.zeros(0, int)
        return leaf[np.unravel_index(flat, leaf.shape)] if leaf.ndim else leaf

    return [some(leaf) for leaf in leaves]


def _cache_of(engine: Any) -> PrefixCache:
    if engine.prefix_cache is None:
        raise ValueError("this engine has no prefix cache: make it with prefix_cache='256MB', say")
    return engine.prefix_cache


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
    cache = _cache_of(engine)
    cache.clear()
    try:
        with safe_open(file, "np") as parts:
            count = _load(engine, cache, os.fspath(file), parts)
    except (OSError, SafetensorError) as error:
        cache.clear()
        raise ValueError(f"cannot read a prefix cache from {os.fspath(file)!r}: {error}") from error
    cache.requests = cache.hits = 0
    return count


def _load(engine: Any, cache: PrefixCache, file: str, parts: Any) -> int:
    other = f"the prefix cache in {file!r} is of another model, drafter or device: name another file, or delete it"
    if not {*OWN} <= {*parts.keys()}:
        raise ValueError(f"{file!r} is no prefix cache: name another file")
    tokens, before, buffers = (parts.get_tensor(name) for name in OWN)
    if tokens.shape[1] != cache.block + 1:
        raise ValueError(
            f"{file!r} has blocks of {tokens.shape[1] - 1} tokens, and this prefix cache has blocks of {cache.block}: name "
            "another file"
        )
    if (parts.metadata() or {}).get("made_for") != fingerprint(engine.params):
        raise ValueError(other)
    rows = _read_again(engine, tokens, before, buffers)
    named = dict(_named(cache.pool))
    size = lambda leaf: (len(tokens), _numbers(leaf) * leaf.dtype.itemsize)
    if {*parts.keys()} != {*OWN, *named} or any(
        tuple(parts.get_slice(name).get_shape()) != size(leaf) for name, leaf in named.items()
    ):
        cache.clear()
        raise ValueError(other)
    count = min(len(tokens), cache.pool[0].shape[0] - 1)
    for i, (name, leaf) in enumerate(named.items()):
        kept = parts.get_tensor(name).view(leaf.dtype).reshape(len(tokens), *leaf.shape[1:])
        if not _agree(to_host(leaf[np.arange(1, 1 + len(rows))]), kept[rows]):
            cache.clear()
            raise ValueError(other)
        cache.pool[i] = _filled(leaf, kept[:count])
    cache.tree.fill([one.tobytes() for one in tokens[:count]], before[:count].tolist(), buffers[:count].tolist())
    return count


def _read_again(engine: Any, tokens: np.ndarray, before: np.ndarray, buffers: np.ndarray) -> list[int]:
    """Reads a prompt of the file into the empty cache, where its blocks have the places 1, 2 and so on. It is read in a
    buffer of the size in which its first block was, up to a block that was read in another.

    Args:
      engine: whose cache is empty.
      tokens: `[N, T + 1]` int32.
      before: `[N]` int32.
      buffers: `[N]` int32.

    Returns:
      The rows in which the file has these blocks.
    """
    cache, decoder, params = engine.prefix_cache, engine.decoder, engine.params
    at = int(np.setdiff1d(np.arange(len(before)), before)[0])  # a block that no other continues
    path = []
    while at >= 0:
        path.append(at)
        at = int(before[at])
    path.reverse()
    path = path[: next((i for i, at in enumerate(path) if buffers[at] != buffers[path[0]]), len(path))]
    ids = [*tokens[path, :-1].ravel().tolist(), int(tokens[path[-1], -1])]
    dtype = jax.tree.leaves(params["target"])[0].dtype
    state = decoding.empty(decoder, params, 1, int(buffers[path[0]]), dtype)
    cache.read(decoder, params, state, ids, Timing())
    return path[: len(cache.tree.path(keys_of_blocks(ids, cache.block)))]


def _agree(own: np.ndarray, found: np.ndarray) -> bool:
    """Whether two readings of the same blocks are equal up to rounding."""
    if not jnp.issubdtype(own.dtype, jnp.inexact):
        return not own.size or bool(np.mean(own != found) <= DIFFERENT)
    eps = float(jnp.finfo(own.dtype).eps)
    own, found = own.astype(np.float64), found.astype(np.float64)
    return bool(np.sum((own - found) ** 2) <= (ROUNDING * eps) ** 2 * np.sum(own**2))


def _filled(leaf: jax.Array, blocks: np.ndarray) -> jax.Array:
    """A leaf of the pool `[N, ...]` with blocks at the places 1, 2 and so on."""
    count = len(blocks)
    for begin in range(0, count, TOGETHER):
        places = np.arange(begin, begin + TOGETHER) + 1
        some = blocks[np.minimum(places, count) - 1]
        leaf = _put(leaf, np.where(places > count, leaf.shape[0], places), some, leaf.sharding)
    return leaf


@functools.partial(jax.jit, static_argnums=3, donate_argnums=0)
def _put(leaf: jax.Array, places: Any, blocks: Any, sharding: jax.sharding.Sharding) -> jax.Array:
    """A leaf `[N, ...]` with blocks at these places; those that are none are left out."""
    return jax.lax.with_sharding_constraint(leaf.at[places].set(blocks, mode="drop"), sharding)
