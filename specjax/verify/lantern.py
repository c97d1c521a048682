"""LANTERN (Jang et al. 2024, arXiv:2410.03355) and LANTERN++ (Park et al. 2025, arXiv:2502.06352), lossy: a token may
use the chances of its nearest tokens.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from specjax.about import About
from specjax.verify.base import Verifier
from specjax.verify.top_down import (
    TopDown,
    at,
    descend,
    judged_by,
    normalised,
    passing,
    residual,
    verdict_of,
    where,
    without,
)
from specjax.warpers.base import marked

Array = jax.Array
CHUNK = 256


@dataclasses.dataclass(frozen=True)
class Lantern(Verifier):
    """Tries i.i.d. children as `Recursive` does, but adds to p(x) the chances of the tokens nearest to x.

    It pools as many of the nearest tokens as have at most `bound` together. x passes with the chance min(1, (p(x) +
    pooled) / q(x)); at temperature 0 it passes if that sum is above every other token's p.

    A rejected x leaves norm(max(p - q', 0)). Here q' is q, except that it is 0 at the `neighbours` + 1 tokens nearest
    to x if anything was pooled. For children that are taken as they are, p loses x and these tokens. If nothing at all
    would be left, only x is taken from p; the released code uses the uniform distribution then.

    Lossy, in greedy rows too. The distribution that x is tested against is within `bound` of p in total variation;
    tokens that p rules out never pass. At a bound of 0 it is `Recursive`.

    Nearness is that of rows of the target's embedding, in place of the papers' codes of an image tokenizer;
    `preset=paper` is for a vocabulary of such codes.

    Attributes:
      neighbours: how many tokens may be pooled, at least 1.
      bound: how much chance they may have together, in [0, 1]. Above 1 it is LANTERN++'s bound, relative to x: p(x) and
        the pooled chances are at most `bound` times p(x).
    """

    about = About(
        "lantern",
        "accept with the chances of the nearest tokens too, by the target's embedding",
        "arXiv:2410.03355, arXiv:2502.06352",
        "lossy",
        tree="chain:length={depth}",
        paper="neighbours=1000",
    )

    wants = TopDown.wants
    keep_q = True
    judges = TopDown.judges
    keeps_greedy = False

    neighbours: int = 10
    bound: float = 0.1
    target: Any = dataclasses.field(default=None, kw_only=True)
    """The target LM; filled in by `bind`."""

    def __post_init__(self):
        if self.neighbours < 1 or not 0 <= self.bound < float("inf"):
            raise ValueError(f"lantern needs at least one neighbour and a bound of at least 0, got {self}")

    def bind(self, target):
        """See `Verifier.bind`; there must be more tokens than neighbours."""
        if self.neighbours >= target.vocab_size:
            raise ValueError(f"lantern pools {self.neighbours} of {target.vocab_size} tokens: choose fewer neighbours")
        return dataclasses.replace(self, target=target)

    def init_params(self, key, target_params):
        """The table of every token's nearest tokens, nearest first: `{"nearest": [V, min(neighbours + 1, V - 1)]}` int32."""
        table = self.target.embed(target_params, jnp.arange(self.target.vocab_size)[None])[0]
        return {"nearest": nearest(table, min(self.neighbours + 1, self.target.vocab_size - 1))}

    def given(self, params):
        return functools.partial(self, params=params)

    def __call__(self, output, tree, sampler, params=None):
        if params is None:
            raise ValueError(
                'lantern reads a table of near tokens: params["verify"] = verifier.bind(target).init_params(key, params)'
            )
        p, finite, offered = judged_by(output, tree, sampler, soft=True)
        rule = _Pooling(params["nearest"], self.neighbours, self.bound, sampler.params.temperature == 0)
        order = jnp.argsort(tree.depth.at[:, 0].set(-1), axis=1)[:, 1:]
        found = descend(rule, p, offered, sampler.uniform_of(tree.depth), order)
        return verdict_of(found, finite, tree, sampler)


def nearest(table: Array, count: int) -> Array:
    """The `count` rows of a table `[V, E]` that are closest to each row, `[V, count]` int32, nearest first and without
    the row itself.
    """
    table = table.astype(jnp.float32)
    norms = (table**2).sum(axis=-1)

    def of(row):
        distance = norms - 2 * jnp.matmul(table, table[row], precision="highest")
        return jax.lax.top_k(jnp.where(jnp.arange(norms.size) == row, -jnp.inf, -distance), count)[1]

    return jax.lax.map(of, jnp.arange(norms.size), batch_size=CHUNK).astype(jnp.int32)


@dataclasses.dataclass(frozen=True)
class _Pooling:
    """See `specjax.verify.top_down.Rule`. The state is the distribution, the draft's distribution, and the original
    distribution.
    """

    nearest: Array
    neighbours: int
    bound: float
    greedy: Array

    def enter(self, p, log_q, count):
        return p, None if log_q is None else jnp.exp(log_q), p

    def compare(self, state, tokens, offered, noise):
        return state

    def chance(self, state, tokens):
        p, q, first = state
        own = at(p, tokens)
        together = own + self.pooled(p, tokens)[0]
        drawn = jnp.minimum(together, 1) if q is None else passing(together, at(q, tokens))
        itself = jnp.arange(p.shape[1])[None] == tokens[:, None]
        top = jnp.argmax(jnp.where(itself, together[:, None], first), axis=-1) == tokens
        return jnp.where(own > 0, jnp.where(self.greedy, top.astype(p.dtype), drawn), 0)

    def pooled(self, p: Array, tokens: Array) -> tuple[Array, Array]:
        """What the nearest tokens have together `[B]`, as many as stay within the bound, and whether there are any `[B]`."""
        sums = jnp.cumsum(jnp.take_along_axis(p, self.nearest[tokens, : self.neighbours], axis=1), axis=1)
        bound = self.bound if self.bound <= 1 else ((self.bound - 1) * at(p, tokens))[:, None]
        within = (sums <= bound) & (self.bound > 0)
        return jnp.where(within, sums, 0).max(axis=1), within[:, 0]

    def rejected(self, state, tokens):
        p, q, first = state
        near = marked(self.nearest[tokens], p.shape[1]) & self.pooled(p, tokens)[1][:, None]
        if q is None:
            others = without(p, tokens, 0)
            left = normalised(jnp.where(near, 0, others), normalised(others, p))
        else:
            left = residual(p, jnp.where(near, 0, q))
        return where(self.greedy, p, left), q, first

    def rest(self, state):
        p, _, first = state
        return where(self.greedy, jax.nn.one_hot(jnp.argmax(first, axis=-1), p.shape[-1], dtype=p.dtype), p)
