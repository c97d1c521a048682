"""Chooses among the lossless rules that follow the draft, by how a node's children come to be."""

import dataclasses
from types import MappingProxyType

from specjax.about import About
from specjax.lm import Wants
from specjax.tree import Tree
from specjax.verify.base import Verifier
from specjax.verify.block import Block
from specjax.verify.greedy_multi import GreedyMulti
from specjax.verify.recursive import Recursive
from specjax.verify.recursive_wor import RecursiveWOR
from specjax.verify.traversal import Traversal

RULES = MappingProxyType(
    {
        "deterministic": Recursive(),  # deterministic: by every rule one passes with the sum of their chances in p
        "coupled": RecursiveWOR(),  # with one child it keeps more than the target's own draw does, with several as many
        "iid": Recursive(),  # `Optimal` accepts hardly more, and the time that it takes is worth more than that
        "without_replacement": Traversal(),
        "greedy": GreedyMulti(),
    }
)
"""The rule for each of `specjax.tree.Children`; chains are judged by `Block`, whatever their kind."""


@dataclasses.dataclass(frozen=True)
class Best(Verifier):
    """Judges a tree by the rule for its kind of children, which is known before the first step.

    Lossless in distribution. At a node, `block` and `greedy_multi` reach the bound for their children
    (`specjax.verify.bounds`), and `recursive` nearly reaches it for i.i.d. children. For children without replacement
    no rule here does; `traversal` keeps at least as many as `recursive_wor`.
    """

    about = About(
        "best",
        "judge any tree by the rule that pays the most for its kind of children",
        "this library",
        "same distribution",
    )

    wants = Wants(logits=True)
    keep_q = True
    own_noise = True  # some of the rules need it

    def rule(self, tree: Tree) -> Verifier:
        """The rule for a tree; static."""
        if tree.is_chain:
            return Block()
        return RULES["deterministic" if tree.log_q is None else tree.children]

    def __call__(self, output, tree, sampler):
        return self.rule(tree)(output, tree, sampler)
