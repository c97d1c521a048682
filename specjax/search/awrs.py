"""Adaptive weighted rejection sampling (Lipkin et al. 2025, arXiv:2504.05410): a draw among the tokens that a check allows.

The check sees only the tokens that are tried, and the weight is an unbiased estimate of the mass of all allowed tokens. In the
shape descriptions `N` denotes texts, `V` the vocabulary, `M` the most tokens that are tried.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

from specjax.arrays import Array, Bool, Float, Int

PEAKED = 2 / 3
"""If a token is this likely, draws with replacement need fewer checks (the authors' bound)."""
Check = Callable[[Int[Array, "N M"], Int[Array, "N M"], Bool[Array, " N"]], Bool[Array, "N 2 M"]]
"""Which tokens of two orders are allowed. It checks the first order up to the first allowed token. For texts that draw with
replacement it goes on in the second order, without tokens that were refused, and for others to the next token of the first.
What was not checked is False."""


def weighted_draw(
    log_probs: Float[Array, "N V"],
    noise: Float[Array, "2 N V"],
    coins: Float[Array, "N 2 M"],
    check: Check,
) -> tuple[Int[Array, " N"], Float[Array, " N"]]:
    """A token of each distribution that the check allows, and the logarithm of its weight; -inf if no such token was found.

    The mean of the weight, over draws that give a token v, is `p(v)` if v is allowed, for every M. At most two tokens are
    accepted. A peaked distribution is drawn from with replacement, if M is V.

    Args:
      log_probs: the distributions.
      noise: standard Gumbel noise, whose sums with `log_probs` sort the tokens into two orders.
      coins: uniforms in [0, 1).
      check: see `Check`.
    """
    tries, vocab = coins.shape[-1], log_probs.shape[1]
    orders = [jax.lax.top_k(log_probs + own, tries)[1] for own in noise]
    probs = [jnp.exp(jnp.take_along_axis(log_probs, order, axis=1)) for order in orders]
    again = (log_probs.max(axis=1) >= math.log(PEAKED)) & (tries == vocab)
    found = check(orders[0], orders[1], again)
    allowed = [own & (p > 0) for own, p in zip(jnp.moveaxis(found, 1, 0), probs, strict=True)]
    first = jnp.argmax(allowed[0], axis=1)
    rows = jnp.arange(first.shape[0])[:, None]
    others = jnp.exp(log_probs).at[rows, orders[0]].set(0.0).sum(axis=1, keepdims=True)
    rest = others + _from(probs[0])
    weight = _without_replacement(probs[0], rest, allowed[0], first)
    if tries == vocab:
        weight = jnp.where(again, _with_replacement(orders, probs[1], rest, allowed[1], first, coins), weight)
    return _at(orders[0], first), jnp.where(allowed[0].any(axis=1), jnp.log(weight), -jnp.inf)


def _at(x: Array, index: Array) -> Array:
    """The entry of each row of `[N, M]`."""
    return jnp.take_along_axis(x, index[:, None], axis=1)[:, 0]


def _from(p: Array) -> Array:
    """The sums of `[N, M]` from each place on. Small ones are not differences of large numbers."""
    return jnp.cumsum(p[:, ::-1], axis=1)[:, ::-1]


def _without_replacement(p: Array, rest: Array, allowed: Array, first: Array) -> Array:
    """The recursive estimate `[N]`, whose factors telescope: the mass that was not refused, or the token's own.

    The token after the first allowed one decides. If that one is refused, the token stands for itself alone.
    """
    tries = p.shape[1]
    another = _at(allowed, jnp.minimum(first + 1, tries - 1)) | (first + 1 == tries)
    return jnp.where(another, _at(rest, first), _at(p, first))


def _with_replacement(orders: list[Array], p: Array, rest: Array, allowed: Array, first: Array, coins: Array) -> Array:
    """The geometric estimate `[N]`: refusals are counted as if refused tokens were drawn again, until two tokens are accepted.

    How often refused tokens come up before a new one follows a geometric distribution. The estimate is that of a negative
    binomial distribution: `1 / (1 + refusals)`.
    """
    rows, place = jnp.arange(first.shape[0])[:, None], jnp.arange(p.shape[1])[None]
    count = first + _at(jnp.cumsum(_repeats(rest, coins[:, 0], place > 0), axis=1), first)
    rank = jnp.zeros(p.shape, jnp.int32).at[rows, orders[0]].set(jnp.broadcast_to(place, p.shape))
    new = rank[rows, orders[1]] >= first[:, None]
    left = _from(jnp.where(new, p, 0.0))
    some = new & ((first > 0)[:, None] | (jnp.cumsum(new, axis=1) > 1))
    counts = jnp.cumsum(new, axis=1) - new + jnp.cumsum(_repeats(left, coins[:, 1], some), axis=1)
    return 1 / (1 + count + _at(counts, jnp.argmax(allowed & new, axis=1)))


def _repeats(rest: Array, coins: Array, some: Array) -> Array:
    """How often refused tokens come up before one of mass `rest`, where there are `some`."""
    rest = jnp.clip(jnp.where(some, rest, 0.5), 1e-30, 1 - 1e-7)
    return jnp.where(some, jnp.floor(jnp.log1p(-coins) / jnp.log1p(-rest)), 0.0)
