"""RASD: a drafted tree joined with retrieved continuations that the draft finds plausible (arXiv:2503.03434)."""

import dataclasses
from typing import Any

import jax.numpy as jnp

from specjax.about import About
from specjax.draft.base import Proposal, ladder
from specjax.draft.fuse import Fused, union
from specjax.expand.base import Expander, candidates
from specjax.tree import Tree


@dataclasses.dataclass(frozen=True)
class Rasd(Fused):
    """The union of drafter `a`'s tree and retriever `b`'s; of `b`'s, only sequences that `a` finds plausible.

    A retrieved sequence stays if its first token is among the `first` likeliest of `a`'s distribution after the root,
    whether `a`'s tree has that token or not. A row for which that distribution allows nothing keeps all of them.

    Attributes:
      a: a drafter that grows its tree with an expander.
      b: a retriever, any drafter with a plain tree.
      limit: nodes kept of the union, more than `a`'s tree has; None keeps all.
      first: how many tokens of `a`'s distribution a retrieved sequence may begin with.
    """

    about = About(
        "rasd",
        "a draft's tree and what a retriever found, as far as the draft finds it plausible",
        "arXiv:2503.03434",
        fields=("limit", "first"),
        parts={"draft": "draft:expander=eagle2", "retriever": "rest"},
    )

    first: int = 10

    def __post_init__(self):
        if self.limit is not None and (type(self.limit) is not int or self.limit <= self.a.nodes):
            raise ValueError(
                f"rasd needs a limit above the {self.a.nodes} nodes of the draft's tree, or nothing retrieved fits; got "
                f"{self.limit!r}"
            )
        if self.first < 1:
            raise ValueError(f"rasd needs first >= 1, got {self.first}")
        if "expander" not in (field.name for field in dataclasses.fields(self.a)):
            raise ValueError(
                f"rasd needs a draft that grows its tree with an expander, and {type(self.a).__name__} does not: it prunes "
                "by the draft's distribution after the root"
            )

    @property
    def rungs(self) -> tuple[int, ...]:
        return ladder(self.nodes)

    def propose(self, params, draft, view, sampler):
        first, second = self._split(params)
        grown: Any = self.a
        shown = grown.growing(_Shown(grown.expander, self.first))
        drafted = shown.propose(first, draft[0], dataclasses.replace(view, keep_q=False), sampler)
        found = self.b.propose(second, draft[1], view, sampler)
        tree, likeliest = _parted(drafted.tree, self.a.nodes)
        together = union(tree, pruned(found.tree, likeliest, self.first), self.nodes)
        return Proposal(together, (drafted.draft, found.draft))


@dataclasses.dataclass(frozen=True)
class _Shown(Expander):
    """An expander's tree, with the `count` likeliest tokens after the root, as its children, after the tree's nodes."""

    inner: Expander
    count: int

    nodes = property(lambda self: self.inner.nodes + self.count)
    depth = property(lambda self: self.inner.depth)
    width = property(lambda self: self.inner.width)

    def __call__(self, root, logits, grow, carry, sampler, *, keep_q=False):
        tree = self.inner(root, logits, grow, carry, sampler)
        most = min(self.count, logits.shape[-1])
        few = candidates(sampler, logits[:, None], most, coupled=False).tokens[:, 0]
        few = jnp.pad(few, ((0, 0), (0, self.count - most)), constant_values=-1)
        after = lambda old, new: jnp.concatenate([jnp.broadcast_to(old, tree.tokens.shape), new], axis=1)
        zeros = jnp.zeros_like(few)
        return Tree(
            tokens=after(tree.tokens, few),
            parent=after(tree.parent, zeros),
            depth=after(tree.depth, zeros + 1),
            valid=after(tree.valid, few >= 0),
            max_depth=tree.max_depth,
        )


def _parted(tree: Tree, nodes: int) -> tuple[Tree, Tree]:
    """The first `nodes` nodes of a tree, and the root with all others, which are its children."""
    part = lambda take: Tree(*map(take, (tree.tokens, tree.parent, tree.depth, tree.valid)), max_depth=tree.max_depth)
    beside = lambda x: jnp.concatenate([x[:, :1], x[:, nodes:]], axis=1)
    return part(lambda x: x[:, :nodes]), part(beside)


def pruned(retrieved: Tree, drafted: Tree, first: int) -> Tree:
    """`retrieved` `[B, M]`, keeping only sequences whose first token is among the `first` first children of `drafted`."""
    children = drafted.valid & (drafted.depth == 1)
    best = children & (jnp.cumsum(children, axis=1) <= first)
    known = jnp.any((retrieved.tokens[:, :, None] == drafted.tokens[:, None]) & best[:, None], axis=2)
    out = (retrieved.depth == 1) & ~known & children.any(axis=1, keepdims=True)
    stays = retrieved.valid & ~jnp.any(retrieved.ancestors() & out[:, None], axis=2)
    return dataclasses.replace(retrieved, valid=stays, tokens=jnp.where(stays, retrieved.tokens, -1))
