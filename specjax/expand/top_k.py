"""EAGLE-2's dynamic tree (Li et al. 2024, section 4): grow a beam by cumulative worth, then keep the best nodes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from specjax.about import About
from specjax.expand.base import Expander, Level, candidates
from specjax.tree import Tree


@dataclasses.dataclass(frozen=True)
class TopK(Expander):
    """Every level scores the `k` worthiest nodes and takes `k` candidates of each; the best `nodes - 1` of all are kept.

    Which nodes are kept depends on what was drawn, so no distribution says how a kept node's children came to be: a verifier
    takes them as they are, and there is no `log_q`.

    Attributes:
      k: beam width and candidates a node.
      depth: levels below the root.
      nodes: kept tree nodes, the root included.
      coupled: worth is `log softmax((log q + g) / tau)`, the chance that a candidate is the target's token given the
        shared noise; False is EAGLE-2 as published, worth `log q`.
      tau: see `coupled`.
    """

    about = (
        About("top_k", "a dynamic tree ranked by the chance to be the target's draw given the noise", "this library"),
        About(
            "eagle2",
            "a dynamic tree ranked by draft probability",
            "arXiv:2406.16858, section 4",
            defaults={"coupled": False},
        ),
    )

    k: int = 4
    depth: int = 4
    nodes: int = 12
    coupled: bool = True
    tau: float = 1.0

    def __post_init__(self):
        most = 1 + self.k + (self.depth - 1) * self.k * self.k
        if self.k < 1 or self.depth < 1 or not 2 <= self.nodes <= most or self.tau <= 0:
            raise ValueError(f"top_k needs k, depth >= 1, tau > 0 and nodes in [2, {most}], got {self}")

    @property
    def width(self) -> int:
        return self.k

    def __call__(self, root, logits, grow, carry, sampler, *, keep_q=False):
        batch, k = root.shape[0], self.k
        few = candidates(sampler, logits[:, None], k, coupled=self.coupled, tau=self.tau)
        total, beam = few.worth[:, 0], few.tokens[:, 0]  # [B, k]
        tokens, totals = [beam], [total]
        parents = [jnp.zeros((batch, 1), jnp.int32)]  # candidate id (1-based, 0 is the root) that a group of k hangs on
        ident = jnp.broadcast_to(1 + jnp.arange(k, dtype=jnp.int32)[None], (batch, k))
        slot = jnp.full((batch, k), -1, jnp.int32)  # the beam's parents among scored nodes
        seen = jnp.zeros((batch, k, 0), bool)
        paths = beam[:, :, None]
        own = jnp.broadcast_to(jnp.eye(k, dtype=bool)[None], (batch, k, k))
        for depth in range(1, self.depth):
            seen = jnp.concatenate([seen, own], axis=2)
            carry, logits = grow(carry, Level(beam, slot, seen, depth))
            few = candidates(
                sampler, logits, k, nodes=k, depth=depth, paths=lambda paths=paths: paths, coupled=self.coupled,
                tau=self.tau,
            )  # fmt: skip
            pool = (total[:, :, None] + few.worth).reshape(batch, k * k)
            tokens.append(few.tokens.reshape(batch, k * k))
            totals.append(pool)
            parents.append(ident)
            total, chosen = jax.lax.top_k(pool, k)
            source = chosen // k
            ident = 1 + k + k * k * (depth - 1) + chosen
            slot = (depth - 1) * k + source
            beam = jnp.take_along_axis(tokens[-1], chosen, axis=1)
            seen = jnp.take_along_axis(seen, source[:, :, None], axis=1)
            above = jnp.take_along_axis(paths, source[:, :, None], axis=1)
            paths = jnp.concatenate([above, beam[:, :, None]], axis=2)
        return self._keep(root, *(jnp.concatenate(x, axis=1) for x in (tokens, totals, parents)))

    def _keep(self, root, tokens, totals, parents):
        """Ranks all C candidates and keeps the best. A child is never worth more than its parent and comes after it,
        and `top_k` prefers the earlier of equals, so what is kept is a tree with parents first."""
        k, keep = self.k, self.nodes - 1
        best = jnp.sort(jax.lax.top_k(totals, keep)[1], axis=1)
        batch, count = totals.shape
        rows = jnp.arange(batch)[:, None]
        place = (
            jnp.zeros((batch, count + 1), jnp.int32).at[rows, best + 1].set(1 + jnp.arange(keep, dtype=jnp.int32)[None])
        )
        above = jnp.take_along_axis(parents, best // k, axis=1)
        level = np.where(np.arange(count) < k, 1, 2 + (np.arange(count) - k) // (k * k)).astype(np.int32)
        valid = jnp.take_along_axis(totals, best, axis=1) > -jnp.inf
        chosen = jnp.where(valid, jnp.take_along_axis(tokens, best, axis=1), -1)
        first = lambda x, value: jnp.concatenate([jnp.full((batch, 1), value, x.dtype), x], axis=1)
        return Tree(
            tokens=jnp.concatenate([root[:, None], chosen], axis=1).astype(jnp.int32),
            parent=first(jnp.take_along_axis(place, above, axis=1), -1),
            depth=first(jnp.asarray(level)[best], 0),
            valid=first(valid, True),
            max_depth=self.depth,
            children=self.children,
        )
