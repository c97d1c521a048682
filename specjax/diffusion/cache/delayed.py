"""dKV-Cache: a token's keys and values are kept from one pass after it was decoded (arXiv:2505.15781)."""

import dataclasses

import jax
import jax.numpy as jnp

from specjax.about import About
from specjax.diffusion.cache.base import Cache, every
from specjax.diffusion.cache.dual import check_refresh, due
from specjax.diffusion.unmask.base import ranks


@dataclasses.dataclass(frozen=True)
class Delayed(Cache):
    """dKV-Cache-Decode: recomputes open positions and those just decoded; the first two passes of a block compute everything.

    Attributes:
      refresh: the interval, in passes over a block, at which everything is computed; 1 is no cache.
    """

    about = About("delayed", "reuses known tokens, from one pass after they became known", "arXiv:2505.15781", "lossy")

    refresh: int = 8

    def __post_init__(self):
        check_refresh(self, 1)

    def active(self, canvas):
        return canvas.masked | canvas.fresh | every(canvas, (canvas.step < 2) | due(canvas.step, self.refresh))


@dataclasses.dataclass(frozen=True)
class Greedy(Cache):
    """dKV-Cache-Greedy: recomputes the next positions, those just decoded, and open neighbours of the next ones.

    The next positions are known beforehand if positions are written in a drawn order (`fixed:rule=order`), as in the
    published sampler. If predictions decide, all open positions of the active block count as next, and the neighbours
    are those of the positions just decoded.

    Attributes:
      refresh: as in `Delayed`.
      reach: how many open neighbours of each next position; if predictions decide, how far away they may be.
    """

    about = About(
        "greedy", "computes what comes next, what was just decoded, and neighbours", "arXiv:2505.15781", "lossy"
    )

    refresh: int = 2
    reach: int = 4

    def __post_init__(self):
        check_refresh(self, 1)
        if self.reach < 0:
            raise ValueError(f"greedy needs reach >= 0, got {self}")

    def active(self, canvas):
        asked = self._near_decoded(canvas) if canvas.plan is None else self._near_planned(canvas)
        return asked | every(canvas, due(canvas.step, self.refresh))

    def _near_decoded(self, canvas):
        fresh = canvas.fresh.astype(jnp.int32)
        total = jnp.pad(jnp.cumsum(fresh, axis=1), ((0, 0), (1, 0)))
        size = fresh.shape[1]
        low, high = jnp.maximum(canvas.at - self.reach, 0)[0], jnp.minimum(canvas.at + self.reach + 1, size)[0]
        near = canvas.masked & (total[:, high] > total[:, low])
        return canvas.fresh | near | (canvas.masked & canvas.inside)

    def _near_planned(self, canvas):
        """For each position of the plan in turn, the nearest open positions that were not asked for yet, left before right."""
        planned = canvas.plan < canvas.plan.shape[1]
        if not self.reach:
            return canvas.fresh | planned

        def more(turn, asked):
            here = canvas.plan == turn
            place = jnp.argmax(here, axis=1)[:, None]
            nearness = -2 * jnp.abs(canvas.at - place) + (canvas.at < place)
            chosen = ranks(nearness, canvas.masked & ~asked) < self.reach
            return asked | (chosen & here.any(axis=1, keepdims=True))

        return jax.lax.fori_loop(0, planned.sum(axis=1).max(), more, canvas.fresh | planned)
