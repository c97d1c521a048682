"""The verifier contract: from the target's output over a tree to a verdict.

In the shape descriptions `B` denotes rows, `D` the deepest node a step may verify.
"""

import abc
import dataclasses
from typing import Any, ClassVar, get_args

import jax

from specjax.about import Named
from specjax.lm import Output, Wants
from specjax.pretty import Pretty
from specjax.sampling import Sampler
from specjax.tree import Children, Tree, TreeFacts

Array = jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Verdict(Pretty):
    """What a verifier decided, and what of it the row keeps.

    Attributes:
      path: `[B, D + 1]` int32 node ids, root first, -1 padded.
      accepted: `[B]` int32 in [0, D], accepted draft tokens.
      next_token: `[B]` int32, the target's own token after the path; -1 if its logits were not finite.
      committed: `[B]` int32, tokens the row really takes (after EOS and its length limit; 0 if it is not live).
        Filled in by the step before `observe` runs.
      emitted: `[B, D + 1]` int32, the accepted path below the root, then the target's own token; -1 after that. Filled
        in likewise.
    """

    path: Array
    accepted: Array
    next_token: Array
    committed: Any = None
    emitted: Any = None


class Verifier(abc.ABC):
    """Decides which path of the tree is kept. Implementations are frozen dataclasses."""

    about: ClassVar[Named] = None
    """Its names in the registry, and what its text is worth beside plain decoding's."""

    wants: Wants
    """What it reads of the target's Output."""
    keep_q: bool = False
    """Whether it reads `Tree.log_q`."""
    own_noise: bool = False
    """Whether its decisions rest on draws behind what it keeps, so that no step may use another's noise."""
    judges: tuple[Children, ...] = get_args(Children)
    """Of which children it can judge, by how they came to be."""

    def check(self, drafter: TreeFacts) -> None:
        """Says before any work whether this rule can judge the drafter's trees.

        Raises:
          ValueError: where it cannot.
        """
        if drafter.children not in self.judges:
            raise ValueError(
                f"the {type(self).__name__} verifier cannot judge {drafter.children} children, which this drafter proposes: "
                f"choose a drafter or an expander of {' or '.join(self.judges)} children, or the coupled verifier"
            )

    @abc.abstractmethod
    def __call__(self, output: Output, tree: Tree, sampler: Sampler) -> Verdict:
        """A verdict a row; `next_token` is -1 where the deciding logits are not finite."""
