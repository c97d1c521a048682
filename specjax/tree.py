"""The token tree: a struct of arrays, its topology, and the walks over it.

In the shape descriptions `B` denotes rows, `N` nodes, `D` the largest depth, `X` extra slots, `E` the model width.
"""

import abc
import dataclasses
import itertools
from collections.abc import Mapping
from typing import Any, Literal, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from specjax.arrays import Array, Bool, Float, Int
from specjax.pretty import Pretty

Children = Literal["deterministic", "coupled", "iid", "without_replacement", "greedy"]
"""How a node's children come to be, in the order of the nodes:

- deterministic: they are taken as they are and have no `log_q`: looked up, the likeliest, or kept for what was drawn;
- coupled: the best of `log q + g` with the position's own noise g, which are draws without replacement from q;
- iid: draws from q, so two may be equal;
- without_replacement: draws from q without the earlier ones, each with separate noise. Whether there is one more may
  depend on what was drawn before it, anywhere in the tree, but never on that draw itself;
- greedy: the likeliest of q, except that the last is drawn from q without the others; `log_q` is the distribution of
  that draw.
"""
DRAWN: tuple[Children, ...] = ("coupled", "iid", "without_replacement", "greedy")
"""The kinds that are drawn, and so have a `log_q`."""


class TreeFacts(Protocol):
    """Facts about a drafter's trees that are known before any is proposed. A verifier judges the drafter by them."""

    @property
    def nodes(self) -> int:
        """Static: tree nodes, the root included."""
        ...

    @property
    def depth(self) -> int:
        """Static: the depth of the deepest node."""
        ...

    @property
    def is_chain(self) -> bool:
        """Static: whether the trees are always chains."""
        ...

    @property
    def children(self) -> Children:
        """Static: how a node's children come to be."""
        ...

    @property
    def alone(self) -> bool:
        """Static: whether a row's tree depends on no other row."""
        ...

    @property
    def plain_tree(self) -> bool:
        """Static: whether the target reads the tree and nothing else, no extra slots and no head start."""
        ...


class OfTopology(abc.ABC):
    """The base of drafters and expanders whose trees have one shape that is known beforehand, as `TreeFacts`."""

    @property
    @abc.abstractmethod
    def topology(self) -> "Topology":
        """Static: the shape."""

    @property
    def nodes(self) -> int:
        return len(self.topology.parents)

    @property
    def depth(self) -> int:
        return max(self.topology.depths)

    @property
    def is_chain(self) -> bool:
        return self.topology.is_chain


@dataclasses.dataclass(frozen=True)
class Topology:
    """A tree shape that is known at trace time, a constant of the program.

    Attributes:
      parents: parent of every node, root first (-1); a parent comes before its children.
      ranks: which of its parent's ranked candidates a node is (0 is the best; the root has 0).
    """

    parents: tuple[int, ...]
    ranks: tuple[int, ...]

    @classmethod
    def chain(cls, length: int) -> "Topology":
        """The root and a chain of `length` nodes below it."""
        return cls(tuple(range(-1, length)), (0,) * (length + 1))

    @classmethod
    def from_choices(cls, choices: tuple[tuple[int, ...], ...]) -> "Topology":
        """From rank paths, `((0,), (1,), (0, 0), ...)`: a node is the path of ranks that leads to it.

        Raises:
          ValueError: if a path is not a list of ranks, lacks its parent, or is repeated.
        """
        bad = [c for c in choices if len(c) == 0 or min(c) < 0]
        if bad:
            raise ValueError(f"tree choice {bad[0]!r} must be one or more ranks, each at least 0 (the root is implied)")
        paths = [(), *sorted({tuple(c) for c in choices}, key=lambda c: (len(c), c))]
        if len(paths) != len(choices) + 1:
            raise ValueError("tree choices repeat a path")
        index = {path: i for i, path in enumerate(paths)}
        orphans = [path for path in paths[1:] if path[:-1] not in index]
        if orphans:
            raise ValueError(f"tree choice {orphans[0]} has no parent among the choices")
        parents = (-1, *(index[path[:-1]] for path in paths[1:]))
        return cls(parents, (0, *(path[-1] for path in paths[1:])))

    @classmethod
    def from_counts(cls, text: str) -> "Topology":
        """From child counts level by level, `"3 | 2 1x2"`: `cxn` is count c for n nodes; missing counts at the end are zeros.

        Raises:
          ValueError: if the text cannot be read so, or a level has more counts than nodes.
        """
        parents, ranks, level = [-1], [0], [0]
        for part in text.split("|"):
            counts = []
            for word in part.split():
                count, _, times = word.partition("x")
                if not count.isdecimal() or not (times or "1").isdecimal():
                    raise ValueError(f"tree {text!r}: {word!r} is neither a child count nor count x times, like 1x4")
                counts += [int(count)] * int(times or 1)
            if len(counts) > len(level):
                raise ValueError(f"tree {text!r} gives {len(counts)} child counts to {len(level)} nodes")
            below = []
            for node, count in zip(level, counts, strict=False):
                for rank in range(count):
                    below.append(len(parents))
                    parents.append(node)
                    ranks.append(rank)
            level = below
        return cls(tuple(parents), tuple(ranks))

    @property
    def counts(self) -> str:
        """The shape as `from_counts` reads it, if every node's children are its best candidates (`leaves_out_none`).

        >>> Topology.from_counts("3 | 2 0 1 | 1 1 1 | 1 0 0").counts
        '3 | 2 0 1 | 1x3 | 1'
        """
        depths, levels = self.depths, []
        for depth in range(max(depths)):
            counts = [self.parents.count(node) for node, own in enumerate(depths) if own == depth]
            last = max(i for i, count in enumerate(counts) if count)
            runs = [(count, len(list(same))) for count, same in itertools.groupby(counts[: last + 1])]
            levels.append(" ".join(str(count) if times == 1 else f"{count}x{times}" for count, times in runs))
        return " | ".join(levels)

    @property
    def paths(self) -> tuple[tuple[int, ...], ...]:
        """Every node as the path of ranks that leads to it; the root's is empty."""
        paths: list[tuple[int, ...]] = []
        for parent, rank in zip(self.parents, self.ranks, strict=True):
            paths.append((*paths[parent], rank) if parent >= 0 else ())
        return tuple(paths)

    @property
    def depths(self) -> tuple[int, ...]:
        depths: list[int] = []
        for parent in self.parents:
            depths.append(0 if parent < 0 else depths[parent] + 1)
        return tuple(depths)

    @property
    def is_chain(self) -> bool:
        return self.parents == tuple(range(-1, len(self.parents) - 1))

    @property
    def leaves_out_none(self) -> bool:
        """Whether every node's children are its best candidates in order, with no better one left out."""
        following = [0] * len(self.parents)
        for parent, rank in zip(self.parents[1:], self.ranks[1:], strict=True):
            if rank != following[parent]:
                return False
            following[parent] += 1
        return True

    def ancestors(self) -> np.ndarray:
        """`[N, N]` bool: whether column j is row i or an ancestor of it."""
        out = np.eye(len(self.parents), dtype=bool)
        for node, parent in enumerate(self.parents[1:], start=1):
            out[node] |= out[parent]
        return out

    def prefix(self, nodes: int) -> "Topology":
        """The shape's first nodes; parents come first, so these form a tree."""
        return Topology(self.parents[:nodes], self.ranks[:nodes])

    def join(self, other: "Topology") -> "Topology":
        """Both trees under one root; the other's nodes come after ours."""
        shift = len(self.parents) - 1
        moved = tuple(p if p == 0 else p + shift for p in other.parents[1:])
        return Topology(self.parents + moved, self.ranks + other.ranks[1:])


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Tree(Pretty):
    """Candidate continuations of every row. Node 0 is the root, the last committed token.

    Attributes:
      tokens: `[B, N]` int32; -1 in invalid nodes.
      parent: `[B, N]` int32, parent < child; -1 for the root. An invalid node may name any earlier node.
      depth: `[B, N]` int32.
      valid: `[B, N]` bool. A valid node's parent is valid.
      log_q: `[B, N, V]` float32, only if the verifier asks for it and children are drawn: the distribution from which
        node n's children were drawn (greedy rows: one-hot). The first child is drawn from all of it; of `greedy`
        children, the last is drawn from it. It means nothing at nodes without valid children.
      max_depth: static, no node is deeper.
      children: static, how a node's children come to be.
      topology: static, the shape, if it does not depend on data.
    """

    tokens: Int[Array, "B N"]
    parent: Int[Array, "B N"]
    depth: Int[Array, "B N"]
    valid: Bool[Array, "B N"]
    log_q: Float[Array, "B N V"] | None = None
    max_depth: int = dataclasses.field(default=0, metadata={"static": True})
    children: Children = dataclasses.field(default="deterministic", metadata={"static": True})
    topology: Topology | None = dataclasses.field(default=None, metadata={"static": True})

    @classmethod
    def of(cls, topology: Topology, tokens: Int[Array, "B N"], valid: Bool[Array, "B N"], **fields: Any) -> "Tree":
        """A tree of constant shape. Every node under an invalid one is made invalid (`valid` is `[B, N]`)."""
        shape = tokens.shape
        closed = valid
        if len(topology.parents) > 1:
            above = jnp.asarray(topology.ancestors())
            closed = jnp.all(valid[:, None, :] | ~above[None], axis=-1)
        return cls(
            tokens=jnp.where(closed, tokens, -1),
            parent=jnp.broadcast_to(jnp.asarray(topology.parents, jnp.int32), shape),
            depth=jnp.broadcast_to(jnp.asarray(topology.depths, jnp.int32), shape),
            valid=closed,
            max_depth=max(topology.depths),
            topology=topology,
            **fields,
        )

    def prefix(self, nodes: int) -> "Tree":
        """The tree of its first nodes, without `log_q`."""
        topology = None if self.topology is None else self.topology.prefix(nodes)
        return Tree(
            tokens=self.tokens[:, :nodes],
            parent=self.parent[:, :nodes],
            depth=self.depth[:, :nodes],
            valid=self.valid[:, :nodes],
            max_depth=min(self.max_depth, nodes - 1) if topology is None else max(topology.depths),
            children=self.children,
            topology=topology,
        )

    @property
    def nodes(self) -> int:
        return self.tokens.shape[1]

    @property
    def is_chain(self) -> bool:
        """Static: whether node i + 1 is node i's child throughout, so that a path is a prefix of the nodes."""
        return self.topology is not None and self.topology.is_chain

    def ancestors(self) -> Bool[Array, "B N N"]:
        """`[B, N, N]` bool (or `[1, N, N]` if constant): whether column j is row i or an ancestor of it."""
        if self.topology is not None:
            return jnp.asarray(self.topology.ancestors())[None]
        slots = jnp.arange(self.nodes)
        above = (slots[None, None] == self.parent[:, :, None]) | jnp.eye(self.nodes, dtype=bool)[None]
        for _ in range(max(self.max_depth, 1).bit_length()):  # each squaring doubles the reach
            reach = above.astype(jnp.float32)  # a GPU's libraries multiply no matrices of bool
            above = jnp.einsum("bij,bjk->bik", reach, reach) > 0
        return above

    def path_to(self, node: Int[Array, " B"], above: Bool[Array, "B N N"]) -> Int[Array, "B D+1"]:
        """Node ids `[B, D + 1]` from the root to `node` `[B]`, padded with -1. `above` is `ancestors()`."""
        above = jnp.broadcast_to(above, (node.shape[0], *above.shape[1:]))
        chosen = jnp.take_along_axis(above, node[:, None, None], axis=1)[:, 0]
        levels = jnp.arange(self.max_depth + 1)[None, :, None]
        here = chosen[:, None, :] & (self.depth[:, None, :] == levels)
        return jnp.where(here.any(axis=-1), jnp.argmax(here, axis=-1), -1).astype(jnp.int32)

    def path_tokens(self) -> Int[Array, "B N D"]:
        """Tokens from the root's children down to every node, `[B, N, D]` by depth 1..D; -1 below the node's own depth."""
        above = self.ancestors()
        levels = jnp.arange(1, self.max_depth + 1)[None, None, :, None]
        here = above[:, :, None, :] & (self.depth[:, None, None, :] == levels)
        return jnp.max(jnp.where(here, self.tokens[:, None, None, :], -1), axis=-1)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Extra(Pretty):
    """Slots beside the tree (prompt, pseudo, pad or window slots, or a copy of the draft): computed, never verified or
    committed.

    A tree node never sees an extra slot. A drafter observes its own extra slots; the verifier's extra slots are only
    for the verifier. Slots that begin at an inner layer are slots of the proposal's head start as well
    (`specjax.lm.Partial.beside`).

    Attributes:
      tokens: `[B, X]` int32.
      positions: `[B, X]` int32.
      visible: `[B, X, N + X]` bool, over tree nodes and extra slots.
      embeddings: `[B, X, E]` that replace the tokens' embeddings, or None.
    """

    tokens: Int[Array, "B X"]
    positions: Int[Array, "B X"]
    visible: Bool[Array, "B X N+X"]
    embeddings: Float[Array, "B X E"] | None = None


def log_q_of(known: Mapping[int, Float[Array, "B V"]], nodes: int) -> Float[Array, "B N V"]:
    """`Tree.log_q` `[B, N, V]` from one `[B, V]` for each node with children; -inf at the others."""
    nothing = jnp.full_like(next(iter(known.values())), -jnp.inf)
    return jnp.stack([known.get(node, nothing) for node in range(nodes)], axis=1)


def root_only(root: Int[Array, " B"]) -> Tree:
    """The tree of plain decoding: the root `[B]` and nothing below."""
    tokens = root[:, None]
    return Tree.of(Topology((-1,), (0,)), tokens, jnp.ones(tokens.shape, bool))
