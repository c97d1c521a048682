"""The common part of trees whose shape depends on the draft's distributions: a beam is scored level by level, and the
best of all nodes are kept.
"""

import abc
import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from specjax.expand.base import Expander, Level, drawn_from, skippable
from specjax.sampling import Sampler
from specjax.sampling.sampler import Paths
from specjax.tree import DRAWN, Tree

Array = jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Ranked:
    """Possible children of the F nodes of a level; each node's are in the order in which a verifier should try them.

    Attributes:
      tokens: `[B, F, k]` int32, -1 for none.
      rank: `[B, F, k]`, by which they are chosen; -inf where there is none. The ranks of a node's children descend, and
        none is above the node's own rank, so that the chosen nodes form a tree.
      value: a pytree of `[B, F, k]`, by which their own children are ranked.
    """

    tokens: Array
    rank: Array
    value: Any


class DynamicTree(Expander):
    """Every level scores the `k` best-ranked nodes and takes `k` candidates of each. `keep` decides which of all are kept."""

    start: ClassVar[Any]
    """The root's value, see `Ranked.value`."""

    @property
    @abc.abstractmethod
    def k(self) -> int:
        """Static: how many nodes of a level are scored, and how many candidates a node has."""

    @property
    def width(self) -> int:
        return self.k

    @abc.abstractmethod
    def choose(
        self, sampler: Sampler, logits: Array, value: Any, *, nodes: int, depth: int, paths: Paths | None
    ) -> Ranked:
        """The candidates of a level.

        Args:
          sampler: the step's sampler, restricted if the logits' columns are not the whole vocabulary.
          logits: `[B, F, V]` float32, or `[B, 1, V]` if the nodes share one distribution.
          value: of the F nodes, a pytree of `[B, F]`.
          nodes: F.
          depth: of the nodes; 0 is the root.
          paths: see `specjax.expand.base.candidates`.
        """

    def keep(self, ranks: Array, beams: list[Array]) -> Array:
        """Which of all C candidates become nodes of the tree, `[B, nodes - 1]`: the best-ranked.

        Args:
          ranks: `[B, C]`, of all candidates, level by level.
          beams: the candidates `[B, k]` of every level that were scored, or would have been on the last.
        """
        return jax.lax.top_k(ranks, self.nodes - 1)[1]

    def goes_on(self, ranks: list[Array], going: Array) -> Array | None:
        """In which rows `[B]` another level is grown, given the ranks `[B, C]` so far; None for all rows."""
        return None

    def __call__(self, root, logits, grow, carry, sampler, *, keep_q=False):
        batch, k = root.shape[0], self.k
        keep_q = keep_q and self.children in DRAWN
        first = jax.tree.map(lambda x: jnp.full((batch, 1), x, jnp.float32), self.start)
        few = self.choose(sampler, logits[:, None], first, nodes=1, depth=0, paths=None)
        dists = [drawn_from(sampler, logits[:, None])] if keep_q else []
        flat = lambda x: x.reshape(batch, -1)
        tokens, ranks = [flat(few.tokens)], [flat(few.rank)]
        parents = [jnp.zeros((batch, 1), jnp.int32)]  # candidate id (1-based, 0 is the root) that a group of k hangs on
        beams = [jnp.broadcast_to(jnp.arange(k, dtype=jnp.int32)[None], (batch, k))]
        beam, value = tokens[0], jax.tree.map(flat, few.value)
        slot = jnp.full((batch, k), -1, jnp.int32)  # the beam's parents among scored nodes
        seen = jnp.zeros((batch, k, 0), bool)
        paths = beam[:, :, None]
        own = jnp.broadcast_to(jnp.eye(k, dtype=bool)[None], (batch, k, k))
        going = jnp.ones((batch,), bool)
        for depth in range(1, self.depth):
            seen = jnp.concatenate([seen, own], axis=2)
            level = Level(beam, slot, seen, depth)

            def score(carry, level=level, value=value, paths=paths, depth=depth):
                carry, logits = grow(carry, level)
                path = lambda: paths
                few = self.choose(sampler, logits, value, nodes=k, depth=depth, paths=path)
                return carry, (few, drawn_from(sampler, logits, path, nodes=k) if keep_q else None)

            more = self.goes_on(ranks, going)
            if more is None:
                carry, (few, dist) = score(carry)
            else:
                going = more
                carry, (few, dist) = skippable(jnp.any(sampler.live & going), score, carry)
                few = dataclasses.replace(few, rank=jnp.where(going[:, None, None], few.rank, -jnp.inf))
            dists += [dist] if keep_q else []
            tokens.append(flat(few.tokens))
            ranks.append(flat(few.rank))
            parents.append(beams[-1] + 1)
            _, chosen = jax.lax.top_k(ranks[-1], k)
            source = chosen // k
            beams.append(k + k * k * (depth - 1) + chosen)
            slot = (depth - 1) * k + source
            take = lambda x, chosen=chosen: jnp.take_along_axis(flat(x), chosen, axis=1)
            beam, value = take(few.tokens), jax.tree.map(take, few.value)
            seen = jnp.take_along_axis(seen, source[:, :, None], axis=1)
            above = jnp.take_along_axis(paths, source[:, :, None], axis=1)
            paths = jnp.concatenate([above, beam[:, :, None]], axis=2)
        rank = jnp.concatenate(ranks, axis=1)
        chosen = jnp.sort(self.keep(rank, beams), axis=1)
        tree = self._tree(root, jnp.concatenate(tokens, axis=1), rank, jnp.concatenate(parents, axis=1), chosen)
        if not keep_q:
            return tree
        return dataclasses.replace(tree, log_q=self._distributions(dists, beams[:-1], chosen, rank.shape[1]))

    def _tree(self, root, tokens, ranks, parents, chosen):
        """The tree of the chosen candidates, in their order: parents come first, and siblings keep their order."""
        batch, count = ranks.shape
        k, keep = self.k, chosen.shape[1]
        rows = jnp.arange(batch)[:, None]
        place = (
            jnp.zeros((batch, count + 1), jnp.int32)
            .at[rows, chosen + 1]
            .set(1 + jnp.arange(keep, dtype=jnp.int32)[None])
        )
        above = jnp.take_along_axis(parents, chosen // k, axis=1)
        level = np.where(np.arange(count) < k, 1, 2 + (np.arange(count) - k) // (k * k)).astype(np.int32)
        valid = jnp.take_along_axis(ranks, chosen, axis=1) > -jnp.inf
        kept = jnp.where(valid, jnp.take_along_axis(tokens, chosen, axis=1), -1)
        first = lambda x, value: jnp.concatenate([jnp.full((batch, 1), value, x.dtype), x], axis=1)
        return Tree(
            tokens=jnp.concatenate([root[:, None], kept], axis=1).astype(jnp.int32),
            parent=first(jnp.take_along_axis(place, above, axis=1), -1),
            depth=first(jnp.asarray(level)[chosen], 0),
            valid=first(valid, True),
            max_depth=self.depth,
            children=self.children,
        )

    def _distributions(self, dists, beams, chosen, count):
        """`Tree.log_q` of the chosen candidates; candidates that were not scored have no children and get the root's."""
        dists = jnp.concatenate(dists, axis=1)  # [B, 1 + scored, V]
        scored = jnp.concatenate(beams, axis=1) if beams else jnp.zeros((dists.shape[0], 0), jnp.int32)
        rows = jnp.arange(dists.shape[0])[:, None]
        numbers = 1 + jnp.arange(scored.shape[1], dtype=jnp.int32)[None]
        row_of = jnp.zeros((dists.shape[0], count), jnp.int32).at[rows, scored].set(numbers)
        row_of = jnp.pad(jnp.take_along_axis(row_of, chosen, axis=1), ((0, 0), (1, 0)))
        return dists[rows, row_of]
