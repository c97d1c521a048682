"""A drafter that counts which nodes of its tree are accepted."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from specjax.draft.base import Drafter, of_inner
from specjax.tree import Topology

Array = jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Tally:
    """The state of a `Counted`.

    Attributes:
      draft: the drafter's own state.
      accepted: `[N]` int32, how often each node was accepted, in all rows so far; the root's is the number of steps.
    """

    draft: Any
    accepted: Array


@dataclasses.dataclass(frozen=True)
class Counted(Drafter):
    """Another drafter's proposals, with a tally of the nodes that the target accepts. The text is that drafter's.

    Attributes:
      drafter: with a tree of one shape.
    """

    drafter: Any

    needs_params = of_inner("needs_params")
    wants = of_inner("wants")
    prefill_wants = of_inner("prefill_wants")
    nodes = of_inner("nodes")
    depth = of_inner("depth")
    is_chain = of_inner("is_chain")
    children = of_inner("children")
    alone = of_inner("alone")
    looks_back = of_inner("looks_back")
    skips = of_inner("skips")
    rungs = of_inner("rungs")
    weighs_rungs = of_inner("weighs_rungs")
    plain_tree = of_inner("plain_tree")

    @property
    def topology(self) -> Topology:
        """Static: the shape of its trees.

        Raises:
          ValueError: if they have no fixed shape.
        """
        found = getattr(self.drafter, "topology", None) or getattr(
            getattr(self.drafter, "expander", None), "topology", None
        )
        if found is None:
            raise ValueError(
                f"{type(self.drafter).__name__} has no tree of one shape to be measured: ask for expander=static"
            )
        return found

    def bind(self, target):
        return dataclasses.replace(self, drafter=self.drafter.bind(target))

    def recording(self, keep_q):
        return dataclasses.replace(self, drafter=self.drafter.recording(keep_q))

    def init(self, params, batch, capacity):
        return Tally(self.drafter.init(params, batch, capacity), jnp.zeros(self.nodes, jnp.int32))

    def axes(self, draft):
        return dataclasses.replace(draft, draft=self.drafter.axes(draft.draft), accepted=(None,))

    def param_shardings(self, mesh, params):
        return self.drafter.param_shardings(mesh, params)

    def encode(self, params, draft, source, tokens):
        return dataclasses.replace(draft, draft=self.drafter.encode(params, draft.draft, source, tokens))

    def prefill(self, params, draft, chunk, output):
        return dataclasses.replace(draft, draft=self.drafter.prefill(params, draft.draft, chunk, output))

    def propose(self, params, draft, view, sampler):
        made = self.drafter.propose(params, draft.draft, view, sampler)
        return dataclasses.replace(made, draft=dataclasses.replace(draft, draft=made.draft))

    def catch_up(self, params, draft, view):
        return dataclasses.replace(draft, draft=self.drafter.catch_up(params, draft.draft, view))

    def observe(self, params, draft, proposal, output, verdict):
        own = dataclasses.replace(proposal, draft=proposal.draft.draft)
        inner = self.drafter.observe(params, draft.draft, own, output, verdict)
        counts = (verdict.path >= 0) & (verdict.committed > 0)[:, None]
        return Tally(inner, draft.accepted.at[jnp.where(counts, verdict.path, self.nodes)].add(1, mode="drop"))
