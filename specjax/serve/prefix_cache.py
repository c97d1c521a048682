"""What was read of earlier prompts, kept for prompts that begin equally: a radix tree over blocks of tokens, in a pool of
fixed size.

Prompts are read in blocks. The pool keeps what a block adds to a row: its slots of the target's and the drafter's caches,
and as a whole whatever else the row has at the block's end (lengths, a last feature, running states). A prompt begins after
the longest path of blocks that the tree has for it. The block that was least recently used goes first, and never before
those that continue it. This is the cache of RadixAttention (Zheng et al. 2023, arXiv:2312.07104), with a page for a block.

Blocks are read one by one with one program, known or not. So a text does not depend on what the cache holds.

In the shape descriptions `N` denotes the pool's places, `M` the blocks of a buffer.
"""

import collections
import dataclasses
import functools
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax import decoder as decoding
from specjax.decoder import Decoder
from specjax.serve.options import read_size
from specjax.serve.request import Request
from specjax.serve.slots import Slots, Timing
from specjax.settings import settled
from specjax.sharding.rules import constrain
from specjax.speculative import PREFILL_WIDTHS
from specjax.state import Prefix

PyTree = Any
BLOCK = 128  # tokens
BLOCKS = (16, 32, 64, 128)
"""Sizes of blocks: every buffer of `Decoder.buffer` has a whole number of them, and they are widths of prefill."""

TWICE = "a prefix cache keeps the common beginning of prompts too: give it or a shared prefix, not both"
"""Why there is no shared prefix beside a prefix cache."""


@dataclasses.dataclass(eq=False)
class Node:
    """A block in the tree.

    Attributes:
      place: its place in the pool.
      key: its tokens and the next one, as bytes.
      before: the block before it; None for the root.
      buffer: the text buffer of the row in which it was read.
      after: the blocks that continue it, by their keys.
    """

    place: int
    key: bytes = b""
    before: "Node | None" = None
    buffer: int = 0
    after: dict[bytes, "Node"] = dataclasses.field(default_factory=dict)


class Tree:
    """Which blocks the pool has, and where. It lives on the host.

    Args:
      places: N; place 0 belongs to the root, the empty text, which stays.

    Attributes:
      root: the empty text.
      evicted: how many blocks had to go.
    """

    def __init__(self, places: int):
        self.root, self.evicted = Node(0), 0
        self._free = list(range(places - 1, 0, -1))
        # least recently used first; a block is always used after those that continue it, so the first one is a leaf
        self._order: collections.OrderedDict[Node, None] = collections.OrderedDict()

    def __len__(self) -> int:
        return len(self._order)

    def path(self, keys: Iterable[bytes]) -> list[Node]:
        """The longest known beginning, without the root. Its blocks count as used.

        >>> tree = Tree(3)
        >>> [tree.add(tree.path([b"a"]), key).place for key in (b"a", b"b")], len(tree.path([b"a", b"b", b"c"]))
        ([1, 2], 2)
        """
        found, node = [], self.root
        for key in keys:
            if (following := node.after.get(key)) is None:
                break
            node = following
            found.append(node)
        for node in reversed(found):
            self._order.move_to_end(node)
        return found

    def add(self, path: Sequence[Node], key: bytes, buffer: int = 0) -> Node | None:
        """A place for the block that continues a path; None if the path fills the pool.

        Args:
          path: all blocks before it, which were used last.
          key: its own.
          buffer: see `Node`.
        """
        if not self._free:
            if len(self._order) == len(path):
                return None
            oldest, _ = self._order.popitem(last=False)
            assert oldest.before is not None
            del oldest.before.after[oldest.key]
            self._free.append(oldest.place)
            self.evicted += 1
        before = path[-1] if path else self.root
        new = before.after[key] = Node(self._free.pop(), key, before, buffer)
        self._order[new] = None
        for node in reversed(path):
            self._order.move_to_end(node)
        return new

    def entries(self) -> tuple[list[Node], list[int]]:
        """Every block, those that were used last first, and which of them each continues; -1 stands for the root. No block
        comes before the one that it continues."""
        nodes = list(reversed(self._order))
        at = {id(self.root): -1} | {id(node): i for i, node in enumerate(nodes)}
        return nodes, [at[id(node.before)] for node in nodes]

    def fill(self, keys: Sequence[bytes], before: Sequence[int], buffers: Sequence[int]) -> None:
        """Forgets all blocks, and has these at the places 1, 2 and so on; see `entries` and `Node`."""
        places = len(self._free) + len(self._order)
        self.root.after.clear()
        nodes: list[Node] = []
        for i, (key, at, buffer) in enumerate(zip(keys, before, buffers, strict=True)):
            parent = self.root if at < 0 else nodes[at]
            nodes.append(Node(i + 1, key, parent, buffer))
            parent.after[key] = nodes[-1]
        self._order = collections.OrderedDict.fromkeys(reversed(nodes))
        self._free = list(range(places, len(nodes), -1))


def keys_of_blocks(ids: Sequence[int], size: int) -> list[bytes]:
    """The keys of a prompt's whole blocks. The last token is not read, and a drafter's part of a block depends on the
    token after it.

    >>> len(keys_of_blocks(range(32), 16)), len(keys_of_blocks(range(33), 16))
    (1, 2)
    """
    tokens = np.asarray(ids, np.int32)
    return [tokens[at : at + size + 1].tobytes() for at in range(0, len(ids) - size, size)]


@dataclasses.dataclass(frozen=True)
class Layout:
    """How the leaves of a row's caches lie in the pool.

    Attributes:
      size: tokens of a block.
      capacity: text buffer slots of a row.
      names: of every leaf, the logical names of its axes; empty for a leaf that rows share, which is not kept.
      slots: of every leaf, how many slots it has for a position; 0 for a leaf that is kept as a whole.
    """

    size: int
    capacity: int
    names: tuple[tuple[str | None, ...], ...]
    slots: tuple[int, ...]

    @classmethod
    def of(cls, decoder: Any, row: Prefix, size: int) -> "Layout":
        """The layout of a row of a decoder, whose leaves may be `ShapeDtypeStruct`."""
        capacity = row.tokens.shape[1]
        axes = decoder.prefix_axes(row)
        kept = (row.cache, row.draft)
        leaves = jax.tree.leaves(kept)
        names = jax.tree.structure(kept).flatten_up_to((axes.cache, axes.draft))
        names = tuple(tuple(own) if leaf.ndim else () for leaf, own in zip(leaves, names, strict=True))
        slots = (
            0 if "slots" not in own or leaf.shape[own.index("slots")] % capacity else leaf.shape[own.index("slots")]
            for leaf, own in zip(leaves, names, strict=True)
        )
        return cls(size, capacity, names, tuple(count // capacity for count in slots))

    def axis(self, leaf: int) -> int:
        """The axis of a leaf's slots."""
        return self.names[leaf].index("slots")

    def shapes(self, row: Prefix) -> list[jax.ShapeDtypeStruct]:
        """What a block has of every leaf, `[...]` without the axis of rows; a scalar for a leaf that is not kept."""
        shapes = []
        for i, leaf in enumerate(jax.tree.leaves((row.cache, row.draft))):
            shape = list(leaf.shape)
            if self.slots[i]:
                shape[self.axis(i)] = self.size * self.slots[i]
            shapes.append(jax.ShapeDtypeStruct(shape[1:], leaf.dtype))
        return shapes

    def axes(self) -> list[tuple[str | None, ...]]:
        """Logical names of the pool's leaves `[N, ...]`: heads are split over a mesh as in a row, slots are not."""
        plain = lambda own: tuple(None if name in ("batch", "slots") else name for name in own)
        return [plain(own) or (None,) for own in self.names]

    def block(self, leaves: Sequence[Any], begin: Any) -> list[Any]:
        """A block of a row, from its leaves."""
        blocks = []
        for i, leaf in enumerate(leaves):
            if count := self.slots[i]:
                leaf = jax.lax.dynamic_slice_in_dim(leaf, begin * count, self.size * count, self.axis(i))
            blocks.append(leaf[0] if leaf.ndim else leaf)
        return blocks

    def joined(self, pool: Sequence[Any], places: Any, last: Any) -> list[Any]:
        """The leaves of a row with these blocks.

        Args:
          pool: leaves `[N, ...]`.
          places: `[M]` int32; 0 after the last block.
          last: `[]` int32, the last block's.
        """
        leaves = []
        for i, leaf in enumerate(pool):
            if not self.slots[i]:
                leaves.append(leaf[last][None] if self.names[i] else jnp.zeros((), leaf.dtype))
                continue
            axis = self.axis(i)
            blocks = jnp.moveaxis(leaf[places], 0, axis - 1)  # [..., M, slots of a block, ...]
            shape = blocks.shape
            slots = blocks.reshape(*shape[: axis - 1], shape[axis - 1] * shape[axis], *shape[axis + 1 :])
            short = self.slots[i] * self.capacity - slots.shape[axis - 1]
            pad = [(0, short if n == axis - 1 else 0) for n in range(slots.ndim)]
            leaves.append(jnp.pad(slots, pad)[None])
        return leaves


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
@settled
def empty_pool(decoder: Decoder, layout: Layout, places: int, row: Prefix) -> list[Any]:
    """Leaves `[N, ...]`, with a row that has read nothing at place 0.

    Args:
      decoder: the decoder.
      layout: of the row.
      places: N.
      row: the row.
    """
    blocks = layout.block(jax.tree.leaves((row.cache, row.draft)), 0)
    pool = [jnp.zeros((places, *own.shape), own.dtype).at[0].set(own) for own in blocks]
    return constrain(getattr(decoder, "mesh", None), layout.axes(), pool)


def put(decoder: Decoder, layout: Layout, pool: list[jax.Array], row: Prefix, begin: Any, place: Any) -> list[Any]:
    """The pool with the block of a row that begins at a token, at a place.

    Args:
      decoder: the decoder.
      layout: of the row.
      pool: leaves `[N, ...]`.
      row: after the block was read.
      begin: `[]` int32, the block's first token.
      place: `[]` int32; N: nowhere.
    """
    blocks = layout.block(jax.tree.leaves((row.cache, row.draft)), begin)
    pool = [old.at[place].set(new, mode="drop") for old, new in zip(pool, blocks, strict=True)]
    return constrain(getattr(decoder, "mesh", None), layout.axes(), pool)


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=(3, 4, 5))
@settled
def read_block(
    decoder: Any, layout: Layout, params: PyTree, state: Any, pool: list[jax.Array], row: Prefix, begin: Any, end: Any,
    place: Any,
) -> tuple[Any, list[Any], Prefix]:  # fmt: skip
    """The state, the pool and the row after a whole block was read, and put at a place; all three are donated.

    See `put` and `Decoder.read_on`."""
    state, row = decoder.read_on(params, state, row, begin, end, layout.size)
    return state, put(decoder, layout, pool, row, begin, place), row


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=(3, 4))
@settled
def read_rest(
    decoder: Any, width: int, params: PyTree, state: Any, row: Prefix, begin: Any, end: Any
) -> tuple[Any, Prefix]:
    """The state and the row after the tokens after the last whole block were read; both are donated."""
    return decoder.read_on(params, state, row, begin, end, width)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
@settled
def known_row(
    decoder: Any, layout: Layout, structure: Any, pool: list[jax.Array], tokens: Any, places: Any, last: Any
) -> Prefix:
    """A row with the blocks of a path.

    Args:
      decoder: the decoder.
      layout: of the row.
      structure: of the row's caches, as a tree.
      pool: leaves `[N, ...]`.
      tokens: `[1, L]` int32, the whole prompt.
      places: see `Layout.joined`.
      last: see `Layout.joined`.
    """
    leaves = constrain(getattr(decoder, "mesh", None), list(layout.names), layout.joined(pool, places, last))
    cache, draft = jax.tree.unflatten(structure, leaves)
    return Prefix(tokens, cache, draft, layout.capacity)


class PrefixCache:
    """What an engine has read of prompts, for later prompts that begin equally: `specjax.Engine(prefix_cache=...)`.

    It belongs to the first engine that takes it, and to others with the same parameters. It stays from call to call. An
    `Engine.update` empties it. All of its memory is taken at the first prompt.

    A drafter may keep something whose size depends on the text buffer's. Then the cache begins anew with a call whose buffer
    has another size, or that call is refused if its blocks are too large.

    Args:
      size: bytes of device memory over all devices, or words such as `"256MB"`.
      block: tokens of a block, one of `BLOCKS`. Shorter ones find more, and take longer to read.

    Attributes:
      requests: how many prompts were asked for.
      hits: how many of them began with a known block.
      tree: which blocks it has.
      pool: what it has of them, leaves `[N, ...]`; empty before the first prompt.

    Raises:
      ValueError: for a size or a block that is none.
    """

    def __init__(self, size: int | str, block: int = BLOCK):
        self.size = read_size(size, "prefix_cache") if isinstance(size, str) else size
        if self.size < 1:
            raise ValueError(f"a prefix cache needs a size above 0, got {size}")
        if block not in BLOCKS:
            raise ValueError(f"a prefix cache has blocks of {', '.join(map(str, BLOCKS))} tokens, not of {block}")
        self.block, self.requests, self.hits = block, 0, 0
        self.clear()
        self._owner: tuple[Any, list[Any]] | None = None
        self._target: Any = None
        self._layouts: dict[Any, tuple[Layout, Any, list[jax.ShapeDtypeStruct]]] = {}

    @staticmethod
    def of_engine(given: "PrefixCache | int | str | None", engine: Any) -> "PrefixCache | None":
        """The cache of an engine: as given, or one of a size.

        Raises:
          ValueError: see `PrefixCache`, `check_shares` and `take`.
        """
        if given is None:
            return None
        own = given if isinstance(given, PrefixCache) else PrefixCache(given)
        check_shares(engine, "prefix cache")
        own.take(engine.decoder, engine.params)
        return own

    def __repr__(self) -> str:
        return (
            f"PrefixCache({self.size}, block={self.block}): {len(self)} blocks, {self.hits} of {self.requests} prompts"
        )

    def __len__(self) -> int:
        """How many blocks it holds."""
        return len(self.tree)

    @property
    def evicted(self) -> int:
        """How many blocks went to make room, since it began."""
        return self.tree.evicted

    def clear(self) -> None:
        """Forgets everything that was read, and gives its memory back."""
        self.tree = Tree(1)
        self.pool: list[jax.Array] = []
        self._shapes: list[jax.ShapeDtypeStruct] = []

    def take(self, decoder: Any, params: PyTree) -> None:
        """Serves an engine's decoder.

        Raises:
          ValueError: if it serves an engine with another decoder or other parameters, if no row of this decoder can be
            kept, or if the size holds no block.
        """
        if not decoder.reads_prefix:
            raise ValueError(f"{type(decoder).__name__} reads every prompt as a whole: leave the prefix cache out")
        if getattr(getattr(decoder, "target", None), "old", None) is not None:
            raise ValueError(
                "a cache that forgets folds older blocks by all of a prompt: leave the prefix cache out, or decode with "
                "the usual cache"
            )
        owner = decoder, jax.tree.leaves(params)
        if self._owner is not None and not _same(self._owner, owner):
            raise ValueError("this prefix cache belongs to an engine with other parameters: give each engine its own")
        row = jax.eval_shape(functools.partial(_blank, decoder, decoder.buffer(1)), params)
        self._places(Layout.of(decoder, row, self.block).shapes(row))
        self._owner = owner

    def _places(self, shapes: Sequence[jax.ShapeDtypeStruct]) -> int:
        """N: how many blocks of these shapes there is room for, the empty text included.

        Raises:
          ValueError: if there is none for a block.
        """
        size = sum(int(np.prod(one.shape)) * one.dtype.itemsize for one in shapes)
        if self.size < 2 * size:
            raise ValueError(
                f"a prefix cache of {self.size} bytes holds no block of {self.block} tokens of this model: give at least "
                f"{-(-2 * size // 100_000) / 10:.1f}MB"
            )
        return self.size // size

    def read(self, decoder: Any, params: PyTree, state: Any, ids: Sequence[int], timing: Timing) -> tuple[Any, Prefix]:
        """The state of B rows, and a row with a prompt that has been read, for an insert of the whole prompt.

        Args:
          decoder: the engine's.
          params: its parameters.
          state: the rows' state, which is donated; the part that the rows share learns from what is read.
          ids: the prompt.
          timing: counts tokens.
        """
        state, layout, structure = self._ready(decoder, params, state)
        size, keys = self.block, keys_of_blocks(ids, self.block)
        path = self.tree.path(keys)
        self.requests, self.hits = self.requests + 1, self.hits + bool(path)
        timing.prompt_tokens += len(ids) - 1
        timing.known_tokens += len(path) * size
        tokens = np.zeros((1, layout.capacity), np.int32)
        tokens[0, : len(ids)] = ids
        places = np.zeros(layout.capacity // size, np.int32)
        places[: len(path)] = [node.place for node in path]
        last = np.int32(path[-1].place if path else 0)
        row = known_row(decoder, layout, structure, self.pool, *jax.device_put((tokens, places, last)))
        nowhere = self.pool[0].shape[0]
        for i in range(len(path), len(keys)):
            # once a block finds no room, neither do those after it
            node = self.tree.add(path, keys[i], layout.capacity) if len(path) == i else None
            path += [] if node is None else [node]
            where = jax.device_put((np.int32(i * size), np.int32(len(ids)), np.int32(node.place if node else nowhere)))
            state, self.pool, row = read_block(decoder, layout, params, state, self.pool, row, *where)
        begin = len(keys) * size
        if rest := len(ids) - 1 - begin:
            width = min(next(width for width in PREFILL_WIDTHS if width >= rest), layout.capacity - begin)
            state, row = read_rest(
                decoder, width, params, state, row, *jax.device_put((np.int32(begin), np.int32(len(ids))))
            )
        return state, row

    def _ready(self, decoder: Any, params: PyTree, state: Any) -> tuple[Any, Layout, Any]:
        """The state, the layout of its rows and their structure; the pool has room for them."""
        if params["target"] is not self._target:  # what it has is of other parameters
            self.clear()
            self._target = params["target"]
        kind = decoder, state.tokens.shape[1]
        if kind not in self._layouts or self._layouts[kind][2] != self._shapes:
            state, row = decoding.read_prefix(decoder, params, state, jax.device_put(np.zeros(1, np.int32)))
            row = dataclasses.replace(row, length=kind[1])
            layout, structure = Layout.of(decoder, row, self.block), jax.tree.structure((row.cache, row.draft))
            self._layouts[kind] = layout, structure, layout.shapes(row)
            if self._layouts[kind][2] != self._shapes:
                self._begin(decoder, layout, row)
        return state, *self._layouts[kind][:2]

    def _begin(self, decoder: Any, layout: Layout, row: Prefix) -> None:
        """Takes the memory, of which the empty text has the first place."""
        places = self._places(layout.shapes(row))
        self.clear()
        self._shapes = layout.shapes(row)
        self.tree, self.pool = Tree(places), empty_pool(decoder, layout, places, row)


def _blank(decoder: Any, capacity: int, params: PyTree) -> Prefix:
    """A row that has read nothing."""
    dtype = jax.tree.leaves(params["target"])[0].dtype
    state = decoder.empty(params, 1, capacity, dtype)
    return decoder.read_prefix(params, state, jnp.zeros((1,), jnp.int32))[1]


def _same(one: tuple[Any, list[Any]], other: tuple[Any, list[Any]]) -> bool:
    pairs = itertools.zip_longest(one[1], other[1])
    return one[0] == other[0] and all(a is b for a, b in pairs)


@dataclasses.dataclass(frozen=True)
class Reader:
    """Reads the prompts of an engine's rows with its prefix cache; see `Served.reader`.

    Attributes:
      cache: the cache.
      timing: the engine's.
    """

    cache: PrefixCache
    timing: Timing

    def insert(
        self, slots: Slots, state: Any, rows: Sequence[int], requests: Sequence[Request], keys: np.ndarray, prefix: Any
    ) -> Any:
        """See `Slots.insert`."""
        served = slots.served
        for row, request, key in zip(rows, requests, keys, strict=True):
            state, read = self.cache.read(served.decoder, served.params, state, request.ids, self.timing)
            prompts = slots.prompts([request], key[None], read.length, self.cache.block)
            state = decoding.insert(served.decoder, served.params, state, np.asarray([row]), prompts, prefix=read)
        return state

    def read_prefix(self, slots: Slots, ids: Any) -> Any:
        """Raises ValueError, see `TWICE`."""
        raise ValueError(TWICE)

    def read_ahead(self, slots: Slots, requests: Sequence[Request], keys: np.ndarray, prefix: Any) -> None:
        """Does nothing: prompts are read where rows decode."""


def check_shares(engine: Any, what: str) -> None:
    """Raises ValueError if what an engine reads of a prompt cannot serve another one.

    Args:
      engine: a `specjax.serve.engine.Engine`.
      what: how the error calls it.
    """
    model = engine.model
    if engine.encodes:
        raise ValueError(f"{model.name} has an encoder, which reads every prompt as a whole: leave the {what} out")
    if engine.writes_steps:
        raise ValueError(f"{type(engine.decoder).__name__} reads every prompt by itself: leave the {what} out")
    if model.masked:
        if model.canvas or model.masked.block:
            why = "only the prompts of autoregressive models can share one"
        else:
            why = "it reads a text in both directions, so what it computes for a prefix depends on what follows"
        raise ValueError(f"{model.name} is {model.kind} without a {what}: {why}; leave it off")
