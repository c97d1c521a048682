"""Mirostat (Basu et al. 2021, arXiv:2007.14966): a cut that follows how surprising a text has been so far."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from specjax.about import About
from specjax.warpers.base import Columns, Warper, parameter
from specjax.warpers.ranking import reached

MOST = 101
"""The number of likeliest tokens from which version 1 estimates how fast probabilities fall with their rank."""
TOKENS = 50_000
"""The size of a vocabulary in version 1's formula of ranks; its authors' program uses it for any vocabulary."""
LN2 = float(np.log(2.0))


@dataclasses.dataclass(frozen=True)
class Mirostat(Warper):
    """Keeps tokens whose surprise is at most `mu` bits, and moves mu by `eta` times each drawn token's deviation from `tau`.

    A token's surprise is -log2 of its probability under the whole distribution after the temperature, both in the cut
    and in the error, as in the paper; llama.cpp computes the error after the cut. So mu is 2 tau - eta times the sum of
    the errors so far, and a row carries this sum. The likeliest token always stays.

    Attributes:
      mirostat: int32. 2 cuts by the surprise (the paper's section 5, alternative). 1 keeps the k likeliest, with k from
        mu and an estimate of Zipf's exponent (algorithm 1, as in its authors' program: k is rounded, and one more is
        kept). 0 is off.
      mirostat_tau: float32 > 0, bits; None is llama.cpp's 5, or for version 1 its authors' 3.
      mirostat_eta: float32 in [0, 1]; None is llama.cpp's 0.1, or for version 1 its authors' 1.
    """

    about = About(
        "mirostat", "cuts so that a text surprises evenly", "arXiv:2007.14966", "same text",
        fields=("mirostat", "mirostat_tau", "mirostat_eta"),
    )  # fmt: skip
    reads_text = True
    carries = True

    mirostat: int = parameter(
        0, "2 cuts by surprise, 1 by an estimated rank; 0 is off", "0, 1 or 2", lambda x: (x >= 0) & (x <= 2)
    )
    mirostat_tau: float | None = parameter(
        None, "bits of surprise that each token should have (default: 5; for version 1, 3)", "a finite number > 0",
        lambda x: np.isnan(x) | (x > 0) & np.isfinite(x), switch=False,
    )  # fmt: skip
    mirostat_eta: float | None = parameter(
        None, "how fast the cut follows the text (default: 0.1; for version 1, 1)", "in [0, 1]",
        lambda x: np.isnan(x) | (x >= 0) & (x <= 1), switch=False,
    )  # fmt: skip

    def cost(self, scores, own):
        return -jax.nn.log_softmax(scores, axis=-1) / LN2 - _settings(own)[0][..., None]

    def warp(self, scores, own, text):
        tau, eta = _settings(own)
        start = jnp.zeros(scores.shape[:1]) if text.carried is None else text.carried["mirostat"]
        cost = self.cost(scores, own)
        mu = 2 * tau - eta * text.summed(start, cost)
        surprise = cost + tau[..., None]
        most = jnp.maximum(mu, surprise.min(axis=-1))[..., None]
        second = jnp.where(surprise > most, -jnp.inf, scores)

        def first():
            best = jax.lax.top_k(scores, min(MOST, scores.shape[-1]))[0]
            lowest = reached(scores, 1.0, jnp.clip(rank(best, mu), 1, scores.shape[-1]))
            return jnp.where(scores < lowest[..., None], -jnp.inf, scores)

        version = own["mirostat"][:, None, None]
        return jax.lax.cond(jnp.any(version == 1), lambda: jnp.where(version == 1, first(), second), lambda: second)


def _settings(own: Columns) -> tuple[jax.Array, jax.Array]:
    """tau and eta, `[B, 1]` each."""
    first = own["mirostat"] == 1
    filled = lambda given, one, two: jnp.where(jnp.isnan(given), jnp.where(first, one, two), given)[:, None]
    return filled(own["mirostat_tau"], 3.0, 5.0), filled(own["mirostat_eta"], 1.0, 0.1)


def rank(best: jax.Array, mu: jax.Array) -> jax.Array:
    """How many of the likeliest tokens stay at `mu` bits, by Zipf's law (equations 2 and 30), `[B, T]` float32.

    Args:
      best: `[B, T, K]`, the highest scores in order, at most `MOST` of them.
      mu: `[B, T]` float32.
    """
    most = best.shape[-1]
    fell = best[..., :-1] - best[..., 1:]
    step = np.log(np.arange(2, most + 1) / np.arange(1, most)).astype(np.float32)[None, None]
    exponent = jnp.where(jnp.isfinite(fell), fell * step, 0.0).sum(axis=-1) / (step**2).sum()
    over = exponent - 1
    over = jnp.where(jnp.abs(over) < 1e-4, 1e-4, over)
    share = over / -jnp.expm1(-over * float(np.log(TOKENS)))
    return jnp.round(jnp.exp((jnp.log(share) + mu * LN2) / jnp.maximum(exponent, 1e-4))) + 1
