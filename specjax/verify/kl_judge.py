"""Judge decoding without a head (Sun et al. 2026, arXiv:2601.04766), lossy: drafts stand where both models nearly agree."""

import dataclasses
import math

import jax.numpy as jnp
import jax.scipy.special as special

from specjax.about import About
from specjax.verify.top_down import TopDown, at, passing, residual


@dataclasses.dataclass(frozen=True)
class KLJudge(TopDown):
    """A drawn child passes where draft and target diverge by at most `threshold`; elsewhere the ordinary test decides.

    The divergence at a node is KL(p || q) in nats, of the target's distribution p and the children's q, both at the row's
    temperature and filters. Where the target is sure, max p > `sure`, the ordinary test decides too: x passes with
    min(1, p(x) / q(x)). After a rejection p becomes norm(max(p - q, 0)).

    Lossy: where a node is loose its tokens are those of the draft, but tokens that p rules out never pass. In greedy rows
    max p is 1, so they keep greedy text. At a threshold below 0 it is `Recursive`, which for chains is `Rejection`. A
    child that was not drawn has no distribution to compare, so the ordinary test decides about it.

    As published are chains and `sure=0.9`. Trees, the direction KL(p || q) and the default threshold are choices of this
    library.

    Attributes:
      threshold: of the divergence, in nats; finite.
      sure: the target's largest probability up to which a node may be loose, in [0, 1].
    """

    about = About(
        "kl_judge",
        "accept where draft and target nearly agree and the target is unsure, otherwise with p/q",
        "arXiv:2601.04766",
        "lossy",
        tree="chain:length={depth}",
    )

    threshold: float = 0.2
    sure: float = 0.9

    def __post_init__(self):
        if not math.isfinite(self.threshold) or not 0 <= self.sure <= 1:
            raise ValueError(f"kl_judge needs a finite threshold and sure in [0, 1], got {self}")

    def enter(self, p, log_q, count):
        q = jnp.exp(log_q)
        apart = special.rel_entr(p, q).sum(axis=-1)  # infinite where q rules out what p may draw
        return p, q, (apart <= self.threshold) & (p.max(axis=-1) <= self.sure)

    def chance(self, state, tokens):
        p, q, loose = state
        own = at(p, tokens)
        return jnp.where(loose, (own > 0).astype(own.dtype), passing(own, at(q, tokens)))

    def rejected(self, state, tokens):
        p, q, loose = state
        return residual(p, q), q, loose

    def rest(self, state):
        return state[0]
