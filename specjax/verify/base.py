"""The verifier contract: from the target's output over a tree to a verdict."""

import abc
from typing import ClassVar

from specjax.about import Named
from specjax.draft.base import Drafter, Verdict
from specjax.lm import Output, Wants
from specjax.sampling import Sampler
from specjax.tree import Tree


class Verifier(abc.ABC):
    """Decides which path of the tree is kept. Implementations are frozen dataclasses."""

    about: ClassVar[Named] = None
    """Its names in the registry, and what its text is worth beside plain decoding's."""

    wants: Wants
    """What it reads of the target's Output."""
    keep_q: bool = False
    """Whether it reads `Tree.log_q`."""

    def check(self, drafter: Drafter) -> None:
        """Raises ValueError where this rule cannot judge the drafter's trees; the default judges any."""
        return None

    @abc.abstractmethod
    def __call__(self, output: Output, tree: Tree, sampler: Sampler) -> Verdict:
        """A verdict a row; `next_token` is -1 where the deciding logits are not finite."""
