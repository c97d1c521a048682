"""The common part of expanders with a tree of fixed shape: it grows level by level, and a node takes the candidate of
its rank.
"""

import abc
import functools

import jax
import jax.numpy as jnp
import numpy as np

from specjax.expand.base import Expander, Level, drawn_from
from specjax.sampling import Sampler
from specjax.sampling.sampler import Paths
from specjax.tree import DRAWN, OfTopology, Tree, log_q_of

Array = jax.Array


class FixedTree(OfTopology, Expander):
    """A tree whose shape is known beforehand."""

    @abc.abstractmethod
    def choose(
        self, sampler: Sampler, logits: Array, counts: tuple[int, ...], *, depth: int, paths: Paths | None
    ) -> Array:
        """The tokens `[B, F, max(counts)]` int32 of every node's children by rank, -1 where there are fewer.

        Args:
          sampler: the step's sampler, restricted if the logits' columns are not the whole vocabulary.
          logits: `[B, F, V]` float32, or `[B, 1, V]` if the nodes share one distribution.
          counts: how many ranks each of the level's F nodes with children has; choices beyond them are not read.
          depth: of the nodes; 0 is the root.
          paths: see `specjax.expand.base.candidates`.
        """

    def dist(
        self, sampler: Sampler, logits: Array, chosen: Array, counts: tuple[int, ...], paths: Paths | None
    ) -> Array:
        """`Tree.log_q` `[B, F, V]` of a level's nodes with children. See `choose`, which made `chosen` `[B, F, k]`."""
        return drawn_from(sampler, logits, paths, nodes=len(counts))

    @property
    def width(self) -> int:
        return 1 + max(self.topology.ranks)

    def __call__(self, root, logits, grow, carry, sampler, *, keep_q=False):
        topology = self.topology
        parents, ranks, depths = (np.asarray(x) for x in (topology.parents, topology.ranks, topology.depths))
        above = topology.ancestors()
        columns, dists = {0: root}, {}
        scored: list[int] = []  # nodes with children, in the order in which they were scored, without the root
        frontier = [0]
        logits = logits[:, None]
        for depth in range(self.depth):
            paths = None
            if depth:
                lines = [[int(m) for m in np.flatnonzero(above[n]) if m] for n in frontier]
                paths = functools.partial(_gather, dict(columns), lines)
            children = [np.flatnonzero(parents == n).tolist() for n in frontier]
            counts = tuple(1 + int(ranks[group].max()) for group in children)
            chosen = self.choose(sampler, logits, counts, depth=depth, paths=paths)
            if keep_q and self.children in DRAWN:
                dist = self.dist(sampler, logits, chosen, counts, paths)
                dists.update((node, dist[:, row]) for row, node in enumerate(frontier))
            for row, group in enumerate(children):
                for node in group:
                    columns[node] = chosen[:, row, ranks[node]]
            frontier = [n for n in np.flatnonzero(depths == depth + 1).tolist() if (parents == n).any()]
            if not frontier:
                break
            seen = np.asarray([[above[n, m] for m in (*scored, *frontier)] for n in frontier])
            parent = [scored.index(parents[n]) if parents[n] else -1 for n in frontier]
            level = Level(
                tokens=jnp.stack([columns[n] for n in frontier], axis=1),
                parent=jnp.broadcast_to(jnp.asarray(parent, jnp.int32), (root.shape[0], len(frontier))),
                visible=jnp.asarray(seen)[None],
                depth=depth + 1,
            )
            carry, logits = grow(carry, level)
            scored += frontier
        tokens = jnp.stack([columns[n] for n in range(self.nodes)], axis=1)
        log_q = log_q_of(dists, self.nodes) if dists else None
        return Tree.of(topology, tokens, tokens >= 0, log_q=log_q, children=self.children)


def _gather(columns, lines):
    return jnp.stack([jnp.stack([columns[node] for node in line], axis=1) for line in lines], axis=1)
