"""Lexical unit decoding: the target's own next tokens, read at pad tokens after every node (arXiv:2405.15208)."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.about import About
from specjax.draft.base import Drafter, Extra, Proposal
from specjax.lm import Wants
from specjax.tree import OfTopology, Topology, Tree, root_only

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class Lud(OfTopology, Drafter):
    """A chain of the tokens that the target said at pads after its last accepted node, as far as it was sure of them.

    The target must have been trained to continue a text that ends in pads (`specjax train lud`). A step reads the rest
    of the last unit and, after every node, `unit - 1` pads. The node's own output is the first token of the next unit,
    which is the target's own draw, and the pads' outputs are the others. A unit ends before the first pad whose largest
    probability is below `alpha`. Pads are never committed: accepted tokens are read again as themselves.

    With a lossless verifier the text is the target's. As published the unit stands unverified: a verifier that keeps
    every drafted token, `gad_plus` with a large `beta` and `tau=inf`, writes that text.

    The state is the logits `[B, unit - 1, V]` float32 at the last accepted node's pads.

    Attributes:
      pad: the pad token, which has a row in the target's table.
      unit: the most tokens of a unit; 1 is plain decoding.
      alpha: see above.
      vocab_size: filled in from the target.
    """

    about = About(
        "lud",
        "the target's own next tokens, read at pad tokens after every node",
        "arXiv:2405.15208",
        fields=("unit", "alpha"),
        loads="pad",
    )

    pad: int
    unit: int = 4
    alpha: float = 0.9
    vocab_size: int = dataclasses.field(default=0, kw_only=True)

    def __post_init__(self):
        if self.unit < 1 or not 0 <= self.alpha <= 1:
            raise ValueError(f"lud needs unit >= 1 and alpha in [0, 1], got unit={self.unit} and alpha={self.alpha}")

    plain_tree = False

    @property
    def topology(self) -> Topology:
        return Topology.chain(self.unit - 1)

    @property
    def wants(self) -> Wants:
        return Wants(logits=True)

    def bind(self, target):
        if not 0 <= self.pad < target.vocab_size:
            raise ValueError(f"lud: pad {self.pad} is outside the target's {target.vocab_size} tokens")
        return dataclasses.replace(self, vocab_size=target.vocab_size)

    def init(self, params, batch, capacity):
        """Logits of zeros, which are sure of nothing: a row's first unit is one token, unless alpha is at most 1 / V."""
        return jnp.zeros((batch, self.unit - 1, self.vocab_size), jnp.float32)

    def axes(self, draft):
        return ("batch", None, "vocab")

    def propose(self, params, draft, view, sampler):
        if self.unit == 1:
            return Proposal(root_only(view.root), draft)
        batch, count = draft.shape[:2]
        likely = sampler.scores(draft, jnp.broadcast_to(jnp.arange(count)[None], (batch, count)), None, count - 1)
        largest = jnp.exp(draft.max(axis=2) - jax.nn.logsumexp(draft, axis=2))
        known = (largest >= self.alpha) & (likely.max(axis=2) > -jnp.inf)
        sure = jnp.cumprod(known, axis=1, dtype=jnp.int32) > 0
        unit = jnp.where(sure, jnp.argmax(likely, axis=2).astype(jnp.int32), -1)
        tokens = jnp.concatenate([view.root[:, None], unit], axis=1)
        tree = Tree.of(self.topology, tokens, tokens >= 0)
        step, visible = pads(self.unit)
        slots = step.shape[0]
        extra = Extra(
            tokens=jnp.full((batch, slots), self.pad, jnp.int32),
            positions=view.length[:, None] - 1 + jnp.asarray(step)[None],
            visible=jnp.broadcast_to(jnp.asarray(visible)[None], (batch, *visible.shape)),
        )
        return Proposal(tree, draft, extra)

    def observe(self, params, draft, proposal, output, verdict):
        if self.unit == 1:
            return draft
        count = self.unit - 1
        last = jnp.maximum(jnp.take_along_axis(verdict.path, verdict.accepted[:, None], axis=1), 0)
        slots = proposal.tree.nodes + last * count + jnp.arange(count)[None]
        return jnp.take_along_axis(output.logits, slots[:, :, None], axis=1)


def pads(unit: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """The pads after each node of a chain, node by node: their places `[X]` after the root, and what they see `[X, N + X]`."""
    node, number = np.divmod(np.arange(unit * (unit - 1)), unit - 1)
    nodes = np.arange(unit)[None] <= node[:, None]
    own = (node[:, None] == node[None]) & (number[:, None] >= number[None])
    return (node + number + 1).astype(np.int32), np.concatenate([nodes, own], axis=1)
