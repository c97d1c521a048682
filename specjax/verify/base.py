"""The verifier contract: from the target's output over a tree to a verdict.

In the shape descriptions `B` denotes rows, `D` the deepest node a step may verify.
"""

import abc
import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar, get_args

import jax

from specjax.about import Named, abouts
from specjax.arrays import Array, Int, PyTree
from specjax.lm import LM, Output, Wants
from specjax.pretty import Pretty
from specjax.sampling import Sampler
from specjax.tree import DRAWN, Children, Extra, Tree, TreeFacts

if TYPE_CHECKING:  # imported only when it is needed
    from specjax.objectives.base import Objective


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Verdict(Pretty):
    """The decision of a verifier, and the part of it that the row keeps.

    Attributes:
      path: `[B, D + 1]` int32 node ids, root first, padded with -1.
      accepted: `[B]` int32 in [0, D], accepted draft tokens.
      next_token: `[B]` int32, the target's own token after the path; -1 if its logits were not finite.
      committed: `[B]` int32, the number of tokens that the row really takes (after EOS and its length limit; 0 if it is
        not live). Filled in by the step before `observe` runs.
      emitted: `[B, D + 1]` int32, the accepted path below the root, then the target's own token; -1 after that. Also
        filled in by the step.
    """

    path: Int[Array, "B D+1"]
    accepted: Int[Array, " B"]
    next_token: Int[Array, " B"]
    committed: Int[Array, " B"] = None  # type: ignore[assignment]
    emitted: Int[Array, "B D+1"] = None  # type: ignore[assignment]


class Verifier(abc.ABC):
    """Decides which path of the tree is kept. Implementations are frozen dataclasses."""

    about: ClassVar[Named] = None
    """Its names in the registry, and what its text guarantees compared with plain decoding's."""

    wants: Wants
    """Which parts of the target's Output it reads."""
    keep_q: bool = False
    """Whether it reads `Tree.log_q`."""
    own_noise: bool = False
    """Whether its decisions depend on draws after the kept tokens, so that no step may use another's noise."""
    judges: tuple[Children, ...] = get_args(Children)
    """The kinds of children that it can judge."""
    text_follows_draft: bool = True
    """Whether another draft may lead to another text, of the same distribution if the rule is lossless."""
    keeps_greedy: bool = True
    """Whether rows at temperature 0 have plain decoding's text; some lossy rules do not keep it."""

    needs_params: bool = False
    """Whether its parameters are trained, so that they come only from a folder or the user."""

    def bind(self, target: LM) -> "Verifier":
        """This rule made ready for a target (itself, if there is nothing to fill in).

        Raises:
          ValueError: if it cannot judge by that target.
        """
        return self

    def check(self, drafter: TreeFacts) -> None:
        """Checks before any work whether this rule can judge the drafter's trees.

        Raises:
          ValueError: if it cannot.
        """
        name = next((about.name for about in abouts(type(self))), type(self).__name__)
        if self.text_follows_draft and not drafter.alone:
            raise ValueError(
                f"the {name} verifier takes drafters whose rows draft on their own; with this one a row's text would depend "
                "on the other rows: choose another drafter, or the coupled verifier"
            )
        drawn = set(self.judges) - {"deterministic"}
        if drafter.is_chain and drafter.children in DRAWN and drawn:
            return  # with one child per node it does not matter how siblings are drawn
        if drafter.children not in self.judges:
            raise ValueError(
                f"the {name} verifier cannot judge {drafter.children} children, which this drafter proposes: choose a drafter "
                f"or an expander of {' or '.join(self.judges)} children, or the coupled verifier"
            )

    def init_params(self, key: Array | None, target_params: PyTree) -> PyTree:
        """The rule's arrays, once bound to the target: a decoder's `params["verify"]`; None if it has none.

        They are made from the target's parameters; with `needs_params` they are the start of training.
        """
        return None

    @classmethod
    def objective(cls) -> "type[Objective] | None":
        """The objective with which `specjax train` fits its parameters, imported when needed. It is made of the bound
        verifier.

        None if they are not trained here.
        """
        return None

    def extra(self, tree: Tree, sampler: Sampler) -> Extra | None:
        """Slots that the target should read after the tree's nodes, X of them, in the same pass; None for none.

        The rule finds them in its `Output`, after the tree's. Nothing else uses them: they are neither observed nor
        committed. A proposal with them is read whole, whatever the drafter's rungs. A rule that has any checks for
        `TreeFacts.plain_tree`.
        """
        return None

    def given(self, params: PyTree) -> Callable[[Output, Tree, Sampler], Verdict]:
        """The rule as a step calls it, with `params["verify"]` (None if there are none)."""
        return self

    @abc.abstractmethod
    def __call__(self, output: Output, tree: Tree, sampler: Sampler) -> Verdict:
        """One verdict per row; `next_token` is -1 if the deciding logits are not finite."""
