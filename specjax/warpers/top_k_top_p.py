"""Top-k and top-p (nucleus) filtering as one cut: both keep a prefix of the ranked tokens, so both share one ranking."""

import dataclasses

import jax
import jax.numpy as jnp

from specjax.about import About
from specjax.warpers.base import Cut, parameter
from specjax.warpers.ranking import reached

Array = jax.Array

WIDTH = 128  # how many tokens are ranked before the whole vocabulary is searched


@dataclasses.dataclass(frozen=True)
class TopKTopP(Cut):
    """Keeps the k likeliest tokens, and of these the smallest set of the likeliest with the mass `top_p`.

    Attributes:
      top_k: int32; ties at the cut are all kept; 0 is off.
      top_p: float32 in (0, 1]; the set has at least this mass; 1 is off.
    """

    about = (
        About("top_k", "keeps the k likeliest tokens", "arXiv:1805.04833, section 5.4", "same text", fields=("top_k",)),
        About(
            "top_p", "keeps the smallest set of a mass", "arXiv:1904.09751, section 3.1", "same text", fields=("top_p",)
        ),
    )
    usual = True

    top_k: int = parameter(0, "keep the k likeliest tokens; 0 is off", "an integer >= 0 (0 is off)", lambda x: x >= 0)
    top_p: float = parameter(
        1.0,
        "keep the fewest likeliest tokens with this total probability; 1 is off",
        "in (0, 1]",
        lambda x: (x > 0) & (x <= 1),
    )

    def lowest(self, scores, own, on):
        return cut(scores, own["top_k"], own["top_p"], on)


def cut(scores: Array, top_k: Array, top_p: Array, active: Array) -> Array:
    """The lowest score that survives, `[B, T]`; all survive if both are off.

    Top-p acts on the distribution renormalised after top-k, as in `transformers`; ties at the cut are all kept. The
    ranking covers the `WIDTH` largest; the whole vocabulary is searched only if an active row's cut lies beyond them.

    Args:
      scores: `[B, T, V]` float32 after temperature.
      top_k: `[B]` int32, 0 is off.
      top_p: `[B]` float32, 1 is off.
      active: `[B]` bool, rows whose cut will be used.
    """
    vocab = scores.shape[-1]
    width = min(WIDTH, vocab)
    k = jnp.where(top_k > 0, jnp.minimum(top_k, vocab), vocab)[:, None]
    total = jax.nn.logsumexp(scores, axis=-1)
    ranked = jax.lax.top_k(scores, width)[0]
    lowest, enough = _cut_ranked(ranked, k, top_p[:, None], total, vocab)
    if width == vocab:
        return lowest
    used = active[:, None] & ((k < vocab) | (top_p[:, None] < 1))
    full = lambda: jnp.where(enough, lowest, _cut_searched(scores, k, top_p[:, None], total))
    return jax.lax.cond(jnp.any(used & ~enough), full, lambda: lowest)


def _cut_ranked(ranked, k, top_p, total, vocab):
    """The cut `[B, T]` from descending scores, and whether they reach far enough for it to be right."""
    width = ranked.shape[-1]
    rank = jnp.arange(width)[None, None]
    in_k = rank < k[:, :, None]
    kept_total = jnp.where(k < vocab, jax.nn.logsumexp(jnp.where(in_k, ranked, -jnp.inf), axis=-1), total)
    mass = jnp.where(in_k, jnp.exp(ranked - kept_total[:, :, None]), 0.0)
    before = jnp.cumsum(mass, axis=-1) - mass
    keep = in_k & ((before < top_p[:, :, None]) | (top_p >= 1)[:, :, None])
    count = jnp.maximum(keep.sum(axis=-1), 1)
    lowest = jnp.take_along_axis(ranked, count[:, :, None] - 1, axis=-1)[:, :, 0]
    off = (k >= vocab) & (top_p >= 1)
    enough = (k <= width) | ((k >= vocab) & (mass.sum(axis=-1) >= top_p)) | (width == vocab)
    return jnp.where(off, -jnp.inf, lowest), enough


def _cut_searched(scores, k, top_p, total):
    """The cut `[B, T]`, wherever it lies."""
    vocab = scores.shape[-1]
    count = jnp.broadcast_to(k, total.shape).astype(jnp.float32)
    in_k = jax.lax.cond(
        jnp.any(k < vocab), lambda: reached(scores, 1.0, count), lambda: jnp.full(total.shape, -jnp.inf)
    )
    kept = jnp.where(scores >= in_k[:, :, None], scores, -jnp.inf)
    kept_total = jnp.where(k < vocab, jax.nn.logsumexp(kept, axis=-1), total)
    in_p = reached(kept, jnp.exp(kept - kept_total[:, :, None]), jnp.broadcast_to(top_p, total.shape))
    return jnp.where(top_p < 1, jnp.maximum(in_k, in_p), in_k)
