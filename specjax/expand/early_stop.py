"""A chain that stops where the draft is unsure (Kangaroo, arXiv:2404.18911, section 3.2; SWIFT, arXiv:2410.06916)."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from specjax.about import About
from specjax.expand.base import Expander, Grow, Level, candidates, drawn_from, skippable
from specjax.sampling import Sampler
from specjax.tree import Topology, Tree, log_q_of

Array = jax.Array
SURE = (0.95, 0.8, 0.5)
"""Confidences above which a level of a `narrowing` tree has fewer nodes (SWIFT's values)."""
GREEDY, SAMPLED = (3, 5, 8), (1, 3, 5)
"""The numbers of nodes, including the chain's own, in rows at temperature 0 and in sampled rows."""
GoesOn = Callable[[int, Array, Any], Array]
"""`(depth, confidence [B], carry) -> [B]` bool: whether a row goes on below the token drawn at `depth`."""


@dataclasses.dataclass(frozen=True)
class EarlyStop(Expander):
    """At most `length` tokens in a row; a row stops below the first token whose confidence is less than the threshold.

    Confidence is the chance that the token is the target's draw given the shared noise (greedy: the draft's
    probability). That token itself is kept, so a sampled chain still serves the classical rejection rule. Once no live
    row goes on, the remaining levels are not computed. `rungs` lets the target verify the short tree alone.

    Attributes:
      length: the longest chain.
      threshold: the confidence below which a row stops; 0 never stops.
      width: nodes per level: the chain's token and its `width - 1` best siblings, which stay leaves.
      narrowing: whether a level with a high confidence has fewer siblings, as in SWIFT: see `SURE`. The siblings left
        out are invalid nodes; they do not shrink the tree that the target reads.
    """

    about = About("early_stop", "a chain that ends where the draft is unsure", "arXiv:2404.18911, section 3.2")

    length: int = 6
    threshold: float = 0.6
    width: int = 1
    narrowing: bool = False

    def __post_init__(self):
        if self.length < 1 or self.width < 1 or not 0 <= self.threshold <= 1:
            raise ValueError(f"early_stop needs length, width >= 1 and a threshold in [0, 1], got {self}")

    @property
    def topology(self) -> Topology:
        parents, ranks = [-1], [0]
        for depth in range(self.length):
            parents += [1 + (depth - 1) * self.width if depth else 0] * self.width
            ranks += range(self.width)
        return Topology(tuple(parents), tuple(ranks))

    @property
    def nodes(self) -> int:
        return 1 + self.length * self.width

    @property
    def depth(self) -> int:
        return self.length

    @property
    def is_chain(self) -> bool:
        return self.width == 1

    @property
    def rungs(self) -> tuple[int, ...]:
        levels = {2**i for i in range(self.length.bit_length())} | {self.length}
        return tuple(1 + n * self.width for n in sorted(levels))

    @property
    def children(self):
        # how many siblings a `narrowing` level keeps depends on the noise that they were drawn with
        return "deterministic" if self.narrowing and self.width > 1 else "coupled"

    def __call__(self, root, logits, grow, carry, sampler, *, keep_q=False):
        return self.run(root, logits, grow, carry, sampler, keep_q=keep_q)[0]

    def run(
        self,
        root: Array,
        logits: Array,
        grow: Grow,
        carry: Any,
        sampler: Sampler,
        *,
        keep_q: bool = False,
        goes_on: GoesOn | None = None,
    ) -> tuple[Tree, Any, Array]:
        """Does what a call does, and also returns the carry and the confidence `[B, length]` of the chain's tokens.

        The carry holds what a drafter computed for the nodes that it scored. If its shapes do not change, it passes a
        skipped level unchanged. If they grow, zeros come back, which nothing reads, because all levels below are
        skipped too.

        Args:
          root: see `Expander.__call__`, also for the next four.
          logits: `[B, V]`.
          grow: called for the chain's own nodes only.
          carry: for `grow`.
          sampler: the step's.
          keep_q: whether to record the distributions from which candidates are drawn.
          goes_on: the stop rule in place of the threshold.
        """
        keep_q = keep_q and self.children == "coupled"
        goes_on = goes_on or (lambda depth, confidence, carry: confidence >= self.threshold)
        alive = jnp.ones(root.shape, bool)
        picked = self._pick(logits, (), sampler, keep_q)
        levels, valid = [picked], [alive]
        for depth in range(1, self.length):
            alive = alive & goes_on(depth, picked[1], carry)
            above = tuple(ids[:, 0] for ids, *_ in levels)
            level = Level(
                tokens=above[-1][:, None],
                parent=jnp.full((root.shape[0], 1), depth - 2, jnp.int32),
                visible=jnp.ones((1, 1, depth), bool),
                depth=depth,
            )

            def on(carry, level=level, above=above):
                carry, logits = grow(carry, level)
                return carry, self._pick(logits[:, 0], above, sampler, keep_q)

            carry, picked = skippable(jnp.any(sampler.live & alive), on, carry)
            levels.append(picked)
            valid.append(alive)
        ids = jnp.concatenate([ids for ids, *_ in levels], axis=1)
        confidence = jnp.stack([confidence for _, confidence, _ in levels], axis=1)
        kept = jnp.repeat(jnp.stack(valid, axis=1), self.width, axis=1) & (ids >= 0)
        if self.narrowing:
            kept &= (jnp.arange(self.width)[None, None] < self._widths(confidence, sampler)[:, :, None]).reshape(
                kept.shape
            )
        kept = jnp.concatenate([jnp.ones((root.shape[0], 1), bool), kept], axis=1)
        known = {max(0, 1 + (i - 1) * self.width): dist for i, (*_, dist) in enumerate(levels) if dist is not None}
        log_q = log_q_of(known, self.nodes) if keep_q else None
        nodes = jnp.concatenate([root[:, None], ids], axis=1)
        tree = Tree.of(self.topology, nodes, kept, log_q=log_q, children=self.children)
        return tree, carry, confidence

    def _widths(self, confidence: Array, sampler: Sampler) -> Array:
        """Nodes `[B, length]` of levels, by the confidence of their first node."""
        sure = [confidence > bound for bound in SURE]
        greedy, sampled = (jnp.select(sure, counts, self.width) for counts in (GREEDY, SAMPLED))
        return jnp.where(sampler.params.temperature[:, None] > 0, sampled, greedy)

    def _pick(self, logits, above, sampler, keep_q):
        """Candidates `[B, width]` (-1: none), the first one's confidence `[B]`, and its distribution `[B, V]` if wanted."""
        logits = logits[:, None]
        paths = (lambda: jnp.stack(above, axis=1)[:, None]) if above else None
        few = candidates(sampler, logits, self.width, depth=len(above), paths=paths)
        dist = drawn_from(sampler, logits, paths)[:, 0] if keep_q else None
        return few.tokens[:, 0], jnp.exp(few.worth[:, 0, 0]), dist
