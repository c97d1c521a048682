"""Block verification for chains (Sun et al. 2025, algorithm 2): joint probabilities decide how long the kept prefix is."""

import dataclasses

import jax
import jax.numpy as jnp

from specjax.about import About
from specjax.sampling.sampler import best
from specjax.verify.base import Verdict
from specjax.verify.rejection import SMALLEST, Rejection, draft_probs

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class Block(Rejection):
    """Keeps the longest prefix i with u_i < h_i, see `chances`; a draw of norm(max(P_i p - q, 0)) follows.

    Lossless in distribution for chains. No such rule for one chain keeps more tokens on average. Every uniform and
    every drafted token decides something, even those after the kept prefix, so each step has separate noise.
    """

    about = About(
        "block",
        "keep the longest prefix that the joint distribution allows; chains only",
        "arXiv:2403.10444",
        "same distribution",
        tree="chain:length={depth}",
    )

    own_noise = True

    def __call__(self, output, tree, sampler):
        self.check_chain(tree)
        logits = output.logits[:, : tree.nodes]
        finite = jnp.isfinite(logits.max(axis=-1))
        p = jnp.exp(sampler.log_probs(logits, tree.path_tokens))  # [B, D + 1, V]
        q = draft_probs(tree, p.shape[-1])  # [B, D, V]
        proposed = jnp.cumprod(tree.valid[:, 1:] & finite[:, :-1], axis=1).astype(bool)
        weight = carried(p, q, tree.tokens[:, 1:], proposed)
        passes = sampler.uniform(tree.max_depth) < chances(p, q, weight, proposed)[:, 1:]
        steps = jnp.arange(tree.max_depth + 1)[None]
        accepted = jnp.max(jnp.where(passes & proposed, steps[:, 1:], 0), axis=1, initial=0).astype(jnp.int32)
        left = residual(p, q, weight, proposed, accepted)
        noise = sampler.residual_noise(accepted, p.shape[-1])
        token = best(jnp.where(left > 0, jnp.log(left), -jnp.inf) + noise)
        stopped = jnp.take_along_axis(finite, accepted[:, None], axis=1)[:, 0]
        path = jnp.where(steps <= accepted[:, None], steps, -1).astype(jnp.int32)
        return Verdict(path, accepted, jnp.where(stopped, token, -1))


def carried(p: Array, q: Array, tokens: Array, proposed: Array) -> Array:
    """P_i, `[B, D + 1]`: P_0 is 1, and P_i = min(1, P_(i-1) p(x_i) / q(x_i)); 0 after the last proposed token.

    Args:
      p: `[B, D + 1, V]`.
      q: `[B, D, V]`.
      tokens: `[B, D]`, x.
      proposed: `[B, D]` bool, whether x_i and all before it were proposed.
    """
    at = jnp.maximum(tokens, 0)[:, :, None]
    ours, theirs = (jnp.take_along_axis(dist, at, axis=2)[:, :, 0] for dist in (p[:, :-1], q))
    ratios = jnp.where(proposed & (theirs > 0), ours / jnp.where(theirs > 0, theirs, 1), 0)
    each = [jnp.ones_like(p[:, 0, 0])]
    for ratio in ratios.T:
        each.append(jnp.minimum(1, each[-1] * ratio))
    return jnp.stack(each, axis=1)


def chances(p: Array, q: Array, weight: Array, proposed: Array) -> Array:
    """h_i, `[B, D + 1]`: S_i / (S_i + 1 - P_i) with S_i the mass of max(P_i p - q, 0); P_i at the last proposed token.

    Args:
      p: see `carried`, also for q and proposed.
      weight: P, of `carried`.
    """
    mass = jnp.maximum(weight[:, :-1, None] * p[:, :-1] - q, 0).sum(axis=-1)
    below = mass + (1 - weight[:, :-1])  # where P is 1, exactly the mass
    inner = jnp.where(below > 0, mass / jnp.where(below > 0, below, 1), 1)
    return jnp.where(jnp.pad(proposed, ((0, 0), (0, 1))), jnp.pad(inner, ((0, 0), (0, 1))), weight)


def residual(p: Array, q: Array, weight: Array, proposed: Array, accepted: Array) -> Array:
    """Weights `[B, V]` of the next token: max(P p - q, 0) if more was proposed, otherwise p.

    Args:
      p: see `chances`, also for q, weight and proposed.
      accepted: `[B]`.
    """
    here = accepted[:, None]
    dist = jnp.take_along_axis(p, here[:, :, None], axis=1)[:, 0]
    drafted = jnp.pad(jnp.where(proposed[:, :, None], q, 0), ((0, 0), (0, 1), (0, 0)))
    goes_on = jnp.take_along_axis(jnp.pad(proposed, ((0, 0), (0, 1))), here, axis=1)
    scale = jnp.where(goes_on, jnp.take_along_axis(weight, here, axis=1), 1)
    left = jnp.maximum(scale * dist - jnp.take_along_axis(drafted, here[:, :, None], axis=1)[:, 0], 0)
    return jnp.where(left.sum(axis=-1, keepdims=True) > SMALLEST, left, dist)
