"""Two drafters, one tree: both proposals under one root."""

import dataclasses

import jax.numpy as jnp

from specjax.draft.base import Drafter, Proposal, ladder
from specjax.lm import Wants
from specjax.tree import Tree


@dataclasses.dataclass(frozen=True)
class Fused(Drafter):
    """Two drafters' trees under one root; the second one's nodes come after the first one's. See `fuse`.

    Its `params["draft"]` is the pair of their parameters, None for a part without parameters.

    Attributes:
      a: the first.
      b: the second.
      limit: None puts the trees side by side, in a fixed shape if both have one. A number merges them (`union`) and
        keeps that many nodes.
    """

    a: Drafter
    b: Drafter
    limit: int | None = None

    def __post_init__(self):
        if self.limit is not None and self.limit < 2:
            raise ValueError(f"fuse needs a limit of at least 2 nodes (the root and one more), got {self.limit}")

    @property
    def nodes(self) -> int:
        together = self.a.nodes + self.b.nodes - 1
        return together if self.limit is None else min(self.limit, together)

    @property
    def depth(self) -> int:
        return max(self.a.depth, self.b.depth)

    @property
    def is_chain(self) -> bool:
        return False

    @property
    def alone(self) -> bool:
        return self.a.alone and self.b.alone

    @property
    def skips(self) -> bool:
        return self.a.skips and self.b.skips

    @property
    def needs_own_verdicts(self) -> bool:
        return self.a.needs_own_verdicts or self.b.needs_own_verdicts

    @property
    def looks_back(self) -> float:
        return max(self.a.looks_back, self.b.looks_back)

    @property
    def needs_params(self) -> bool:
        return self.a.needs_params or self.b.needs_params

    @property
    def rungs(self) -> tuple[int, ...]:
        """A merged tree has its valid nodes first."""
        return (self.nodes,) if self.limit is None else ladder(self.nodes)

    @property
    def wants(self) -> Wants:
        return self.a.wants | self.b.wants

    @property
    def prefill_wants(self) -> Wants:
        return self.a.prefill_wants | self.b.prefill_wants

    def bind(self, target):
        for part in (self.a, self.b):
            if not part.plain_tree:
                raise ValueError(
                    f"fuse takes drafters that propose a tree and nothing else; {type(part).__name__} adds slots of its own or "
                    "a head start for the target: use it alone"
                )
        return dataclasses.replace(self, a=self.a.bind(target), b=self.b.bind(target))

    def init(self, params, batch, capacity):
        first, second = self._split(params)
        return self.a.init(first, batch, capacity), self.b.init(second, batch, capacity)

    def axes(self, draft):
        return self.a.axes(draft[0]), self.b.axes(draft[1])

    def param_shardings(self, mesh, params):
        if params is None:
            return None
        return self.a.param_shardings(mesh, params[0]), self.b.param_shardings(mesh, params[1])

    def encode(self, params, draft, source, tokens):
        first, second = self._split(params)
        return self.a.encode(first, draft[0], source, tokens), self.b.encode(second, draft[1], source, tokens)

    def prefill(self, params, draft, chunk, output):
        first, second = self._split(params)
        return self.a.prefill(first, draft[0], chunk, output), self.b.prefill(second, draft[1], chunk, output)

    def propose(self, params, draft, view, sampler):
        first, second = self._split(params)
        first = self.a.propose(first, draft[0], view, sampler)
        second = self.b.propose(second, draft[1], view, sampler)
        return Proposal(self._together(first.tree, second.tree), (first.draft, second.draft))

    def catch_up(self, params, draft, view):
        first, second = self._split(params)
        return self.a.catch_up(first, draft[0], view), self.b.catch_up(second, draft[1], view)

    def observe(self, params, draft, proposal, output, verdict):
        first, second = self._split(params)
        return (
            self.a.observe(first, draft[0], proposal, output, verdict),
            self.b.observe(second, draft[1], proposal, output, verdict),
        )

    def _together(self, a, b):
        return _join(a, b) if self.limit is None else union(a, b, self.nodes)

    def _split(self, params):
        first, second = params["draft"] or (None, None)
        return {**params, "draft": first}, {**params, "draft": second}


def fuse(a: Drafter, b: Drafter, limit: int | None = None) -> Fused:
    """One drafter from two. The text does not change; the step verifies both trees at once.

    Args:
      a: the first.
      b: the second.
      limit: None for both trees as they are; a number of nodes for their union without duplicates, with a's nodes
        first.

    Raises:
      ValueError: for a limit below 2.
    """
    return Fused(a, b, limit)


def union(a: Tree, b: Tree, nodes: int) -> Tree:
    """Both trees merged by their longest common prefixes: no two siblings have the same token.

    Valid nodes come first, a's before b's. If there are more than `nodes`, the last ones are dropped, so the rest is a
    tree.

    Args:
      a: `[B, N]`.
      b: `[B, M]`, with a's roots.
      nodes: of the result.
    """
    tree = _join(a, b)
    paths = tree.path_tokens()
    same = jnp.all(paths[:, :, None] == paths[:, None], axis=-1) & tree.valid[:, :, None] & tree.valid[:, None]
    index = jnp.arange(tree.nodes, dtype=jnp.int32)
    first = jnp.where(same, index[None, None], tree.nodes).min(axis=2)  # of the nodes with the same path
    stays = first == index[None]
    slot = jnp.cumsum(stays, axis=1, dtype=jnp.int32) - 1
    rows = jnp.arange(stays.shape[0])[:, None]
    target = jnp.where(stays, slot, nodes)
    source = jnp.zeros((stays.shape[0], nodes), jnp.int32).at[rows, target].set(index[None], mode="drop")
    valid = jnp.arange(nodes)[None] <= slot[:, -1:]
    take = lambda x, at: jnp.take_along_axis(x, at, axis=1)
    above = jnp.maximum(take(tree.parent, source), 0)
    parent = take(slot, jnp.minimum(take(first, above), tree.nodes - 1)).at[:, 0].set(-1)
    return Tree(
        tokens=jnp.where(valid, take(tree.tokens, source), -1),
        parent=jnp.where(valid, parent, 0),
        depth=jnp.where(valid, take(tree.depth, source), 1),
        valid=valid,
        max_depth=tree.max_depth,
    )


def _join(a: Tree, b: Tree) -> Tree:
    shift = a.nodes - 1
    parent = jnp.where(b.parent[:, 1:] > 0, b.parent[:, 1:] + shift, b.parent[:, 1:])
    cat = lambda x, y: jnp.concatenate([x, y], axis=1)
    return Tree(
        tokens=cat(a.tokens, b.tokens[:, 1:]),
        parent=cat(a.parent, parent),
        depth=cat(a.depth, b.depth[:, 1:]),
        valid=cat(a.valid, b.valid[:, 1:]),
        max_depth=max(a.max_depth, b.max_depth),
        topology=a.topology.join(b.topology) if a.topology and b.topology else None,
    )
