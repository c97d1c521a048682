"""The optimal verifier for i.i.d. children: no rule that keeps the target's distribution lets more of them pass."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from specjax.about import About
from specjax.sampling.noise import ORDER
from specjax.verify.grades import COUNT, NARROW, Grades, grade, grades_of, over_tokens
from specjax.verify.top_down import TopDown, at, normalised

Array = jax.Array

HALVINGS = 40
"""Halvings of a token's part of the line when a place in it is searched for."""
ROUNDING = 8
"""Differences of up to so many units in the last place of 1 count as rounding."""


@dataclasses.dataclass(frozen=True)
class Optimal(TopDown):
    """Chooses one of k i.i.d. children, so that it is x with the chance c(x); it passes with b(x) / c(x).

    b = min(p, a q) is the most that can pass; its sum is `specjax.verify.bounds.optimal_acceptance`. The tokens of a
    set H cannot pass more often than 1 - (1 - q(H))^k, the chance that a child is one of them. With the tokens on [0,
    1] in the order of p / q, largest first, it suffices that this holds for every beginning of the line. c is b, but at
    least m q where p / q is small.

    The choice works on that line, where a token's part is as long as its q, so a child has a uniform place in its
    token's part. The first of k places has the density z(s) = k (1 - s)^(k - 1), and should have y(s) = c / q. No
    beginning of the line has less of z than of y.

    So places with z > y are paired with later places with z < y, in the order in which surplus and deficit add up. A
    child at s goes to its partner t with the chance (z(s) - y(s)) / (z(s) - z(t)). As many go one way as the other:
    places stay uniform, and the first of them is now of x with the chance c(x). The pairing is that of Jourdain and
    Margheriti's martingale coupling of two distributions (arXiv:1808.01390), here of c / q with z.

    Lossless in distribution for any number of children and any vocabulary. With more than a few tokens, grades lie on
    the line (`specjax.verify.grades`): nothing is sorted, the distribution is kept exactly, and a millionth of
    acceptance may be lost. It is the optimum at a node; of two children it does not prefer the one with more below it.
    """

    about = About(
        "optimal",
        "choose one of i.i.d. children so that as many pass as any rule can let pass",
        "arXiv:2310.15141, arXiv:2502.18779",
        "same distribution",
        tree="iid:length={depth}",
    )

    def noise(self, tree, sampler):
        drawn = sampler.uniform_of(jnp.concatenate([tree.depth] * 3, axis=1), ORDER)
        return jnp.stack(jnp.split(drawn, 3, axis=1), axis=-1)

    def enter(self, p, log_q, count):
        drafts = jnp.maximum(count, 1).astype(p.dtype)
        p, q = (dist / dist.sum(axis=-1, keepdims=True) for dist in (p, jnp.exp(log_q)))
        return p, q, *line_over(p, q, drafts)

    def compare(self, state, tokens, offered, noise):
        p, q, grades, line = state
        if grades is None:
            which, kept = tokens, line.kept
        else:
            of_tokens = lambda dist: jnp.take_along_axis(dist, jnp.maximum(tokens, 0), axis=1)
            which = grade(grades, of_tokens(p), of_tokens(q), noise[..., 2])
            kept = over_tokens(grades, line.kept[:, :-1] / jnp.maximum(grades.q[:, :-1], NARROW), p, q)
        here, there, goes = places(line, which, noise[..., 0])
        place = jnp.where(noise[..., 1] < goes, there, here)
        first = jnp.argmax(jnp.where(offered, place, -1), axis=1)
        left = jnp.where(offered.any(axis=1, keepdims=True), normalised(jnp.maximum(p - kept, 0), p), p)
        return Chosen(jnp.where(offered.any(axis=1), at(tokens, first), -1), at(line.passes, at(which, first)), left)

    def chance(self, state, tokens):
        return jnp.where(tokens == state.token, state.chance, 0)

    def rejected(self, state, tokens):
        return state._replace(token=jnp.where(tokens == state.token, -1, state.token))

    def rest(self, state):
        return state.left


class Chosen(NamedTuple):
    """The chosen one of a node's children.

    Attributes:
      token: `[B]`, its token; -1 if there is none, or it has not passed.
      chance: `[B]`, the chance that it passes.
      left: `[B, V]`, weights of the target's own token if it does not.
    """

    token: Array
    chance: Array
    left: Array


class Line(NamedTuple):
    """The tokens on [0, 1], the largest p / q first. A place s is stored as 1 - s, the length after it.

    Attributes:
      kept: `[B, V]` by token, b.
      passes: `[B, V]` by token, b / c.
      rank: `[B, V]` int32 by token, its index on the line; all fields below are by rank.
      share: `[B, V]`, q, the length of its part.
      behind: `[B, V]`, 1 - s at the start of its part.
      level: `[B, V]`, y = c / q.
      above: `[B, V]`, the length of the beginning of its part in which z > y.
      surplus: `[B, V]`, the integral of z - y, where z > y, up to the part's end.
      deficit: `[B, V]`, the same for y - z where z < y.
      drafts: `[B]`, k.
    """

    kept: Array
    passes: Array
    rank: Array
    share: Array
    behind: Array
    level: Array
    above: Array
    surplus: Array
    deficit: Array
    drafts: Array


def line_over(p: Array, q: Array, drafts: Array) -> tuple[Grades | None, Line]:
    """The line of distributions `[B, V]`: of their grades, which are returned too, or for few tokens of the tokens
    themselves.
    """
    if p.shape[1] <= COUNT:
        return None, line_of(p, q, drafts)
    grades = grades_of(p, q, drafts)
    return grades, line_of(grades.p, grades.q, drafts)


def line_of(p: Array, q: Array, drafts: Array) -> Line:
    """The line of p and q `[B, V]` for `drafts` `[B]` children."""
    p, q = (dist / dist.sum(axis=-1, keepdims=True) for dist in (p, q))
    # greedy rows' children are not draws: the target's token stands first, and tokens that neither distribution has last
    ratio = jnp.where(q > 0, jnp.minimum(p / jnp.where(q > 0, q, 1), 1e30), jnp.where(p > 0, jnp.inf, -1))
    order = jnp.argsort(-ratio, axis=-1)
    rank = jnp.argsort(order, axis=-1).astype(jnp.int32)
    by_rank = lambda values: jnp.take_along_axis(values, order, axis=-1)
    by_token = lambda values: jnp.take_along_axis(values, rank, axis=-1)
    target, share, ratio = (by_rank(values) for values in (p, q, ratio))
    behind = jnp.cumsum(share[:, ::-1], axis=-1)[:, ::-1]
    high, cap, floor = levels(target, share, ratio, behind, drafts)
    level = jnp.where(high, jnp.minimum(ratio, cap), jnp.maximum(ratio, floor))
    level = jnp.where(share > 0, level, 0)
    kept = jnp.where(high, jnp.minimum(target, cap * share), target)
    kept = jnp.where(share > 0, kept, 0)
    taken = level * share
    passes = jnp.where(taken > 0, jnp.minimum(kept / jnp.where(taken > 0, taken, 1), 1), target > 0)
    turn = jnp.power(level / drafts[:, None], 1 / jnp.maximum(drafts - 1, 1)[:, None])  # the place at which z equals y
    above = jnp.clip(behind - turn, 0, share)
    surplus = excess(behind, above, level, drafts[:, None])
    deficit = -excess(behind - above, share - above, level, drafts[:, None])
    total = lambda parts: jnp.cumsum(jnp.maximum(parts, 0), axis=-1)
    return Line(
        by_token(kept), by_token(passes), rank, share, behind, level, above, total(surplus), total(deficit), drafts
    )


def levels(p: Array, q: Array, ratio: Array, behind: Array, drafts: Array) -> tuple[Array, Array, Array]:
    """For which tokens too much is wanted `[B, V]` bool, a for these `[B, 1]`, and m for the others `[B, 1]`.

    They are the beginning of the line whose p exceeds most the chance that a child is in it. They use up all of that
    chance, so the others can have all of their p, and what these lack goes to the last of the others.

    Args:
      p: `[B, V]` by rank, also for q, ratio and behind.
      q: see p.
      ratio: p / q, infinite where q is 0.
      behind: 1 - s at the start of a token's part.
      drafts: `[B]`, k.
    """
    inner, after = jnp.cumsum(q, axis=-1), jnp.maximum(behind - q, 0)
    mass, tail = jnp.cumsum(p, axis=-1), jnp.cumsum(p[:, ::-1], axis=-1)[:, ::-1] - p
    missing = mass + jnp.expm1(drafts[:, None] * jnp.log1p(-jnp.minimum(inner, 1)))
    last = jnp.argmax(missing, axis=-1, keepdims=True)
    most = jnp.take_along_axis(missing, last, axis=-1)
    most = jnp.where(most > ROUNDING * jnp.finfo(p.dtype).eps, most, 0)
    high = (jnp.arange(p.shape[-1])[None] <= last) & (most > 0)
    finite = jnp.where(q > 0, ratio, 0)

    over = mass - inner * finite  # the mass of tokens above this ratio: small if both are
    capped = (high & (over < most)).sum(axis=-1, keepdims=True)
    width, least = upto(inner, capped, 0), upto(finite, capped, 0)
    cut = (most - upto(over, capped, 0)) / jnp.where(width > 0, width, 1)
    first = jnp.take_along_axis(jnp.where(high, finite, 0), jnp.minimum(capped, p.shape[-1] - 1), axis=-1)
    cap = jnp.where(width > 0, jnp.maximum(least - cut, first), jnp.inf)  # never below the next token's

    under = jnp.where(q > 0, finite * after - tail, jnp.where(p > 0, jnp.inf, -jnp.inf))  # the mass of tokens below it
    free = (high | (under >= most)).sum(axis=-1, keepdims=True)
    width = upto(after, free, 1)
    floor = (most + upto(tail, free, 1)) / jnp.where(width > 0, width, 1)
    floor = jnp.where(width > 0, jnp.minimum(floor, upto(ratio, free, jnp.inf)), 0)
    return high, cap, floor


def upto(sums: Array, count: Array, none: float) -> Array:
    """The values of cumulative sums `[B, V]` after `count` `[B, 1]` tokens, and `none` after 0."""
    return jnp.where(count > 0, jnp.take_along_axis(sums, jnp.maximum(count - 1, 0), axis=-1), none)


def excess(behind: Array, length: Array, level: Array, drafts: Array) -> Array:
    """The integral of z - y over places from `behind` on; all arguments have one shape. Exact for small lengths."""
    whole = jnp.where(behind > 0, behind, 1)
    first = -jnp.power(behind, drafts) * jnp.expm1(drafts * jnp.log1p(-jnp.minimum(length / whole, 1)))
    return first - level * length


def places(line: Line, tokens: Array, uniforms: Array) -> tuple[Array, Array, Array]:
    """For children of `tokens` `[B, N]`: a place in their token's part, its partner, and the chance of going there.

    Both places are stored as the length after them. All results are `[B, N]`, like the uniforms.
    """
    rank = jnp.take_along_axis(line.rank, jnp.maximum(tokens, 0), axis=-1)
    drafts = line.drafts[:, None]
    own = lambda values, index: jnp.take_along_axis(values, index, axis=-1)
    before = lambda sums, index: jnp.where(index > 0, own(sums, jnp.maximum(index - 1, 0)), 0)

    behind, above, level = own(line.behind, rank), own(line.above, rank), own(line.level, rank)
    step = uniforms * own(line.share, rank)
    more = step < above  # this place has too much
    surplus = before(line.surplus, rank) + excess(behind, step, level, drafts)
    deficit = before(line.deficit, rank) - excess(behind - above, step - above, level, drafts)
    amount = jnp.maximum(jnp.where(more, surplus, deficit), 0)

    def among(sums, start, length, sign):
        """The place at which the surplus or deficit adds up to `amount`."""
        wanted = jnp.minimum(amount, sums[:, -1:])
        # In a loop all readers share one result; computed separately for each, it might be rounded to either side.
        index = jnp.minimum(jax.vmap(jnp.searchsorted)(sums, wanted), sums.shape[-1] - 1)
        wanted = wanted - before(sums, index)
        start, length, level = own(start, index), own(length, index), own(line.level, index)

        low, high = jnp.zeros_like(length), length
        for _ in range(HALVINGS):  # one pass over a few numbers; a loop would run one program per iteration
            middle = (low + high) / 2
            short = sign * excess(start, middle, level, drafts) < wanted
            low, high = jnp.where(short, middle, low), jnp.where(short, high, middle)
        return start - high

    later = among(line.deficit, line.behind - line.above, line.share - line.above, -1)
    earlier = among(line.surplus, line.behind, line.above, 1)
    here, there = behind - step, jnp.maximum(jnp.where(more, later, earlier), 0)
    density = lambda place: drafts * jnp.power(jnp.maximum(place, 0), drafts - 1)
    gap = density(here) - density(there)
    goes = jnp.where(gap != 0, (density(here) - level) / jnp.where(gap != 0, gap, 1), 0)
    return here, there, jnp.clip(goes, 0, 1)
