"""Momentum decoding: a repetition meets a resistance that grows with its length (Lan et al. 2022, arXiv:2212.02175)."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from specjax.about import About
from specjax.warpers.base import Warper, parameter

LONGEST = 5
MOST = 64


@dataclasses.dataclass(frozen=True)
class Momentum(Warper):
    """Takes the one of the k likeliest tokens with the highest `p - alpha * n`; n is the length of the repetition it
    would make.

    p is the model's probability. n is the largest of 1 to 5 for which the last n - 1 tokens and this one already stand
    in the text as a sequence, prompt included; it is 0 for a token that the text does not contain. That is the
    resistance of the paper's program, f(n) = n.

    Attributes:
      momentum_alpha: float32 >= 0; 0 is off.
      momentum_k: int32 in [1, 64]; all ties with the last one are considered.
    """

    about = About("momentum", "takes a likely token that repeats little", "arXiv:2212.02175", "same text")
    of_logits = True
    reads_text = True
    chooses = True

    momentum_alpha: float = parameter(
        0.0, "what each token of a repetition costs, in probability; 0 is off", "a finite number >= 0",
        lambda x: (x >= 0) & np.isfinite(x),
    )  # fmt: skip
    momentum_k: int = parameter(
        5, "number of likeliest tokens that are considered", "an integer in [1, 64]", lambda x: (x >= 1) & (x <= MOST),
        switch=False,
    )  # fmt: skip

    def warp(self, scores, own, text):
        vocab = scores.shape[-1]

        def one(tokens, length, scores, alpha, k):
            at = jnp.arange(tokens.shape[0])
            alive, run = at < length, jnp.zeros(tokens.shape, jnp.int32)
            for back in range(1, LONGEST):  # whether the tokens before a place equal those before the end
                mine = tokens[jnp.maximum(length - back, 0)]
                alive = alive & (at >= back) & (tokens[jnp.maximum(at - back, 0)] == mine)
                run = run + alive
            long = jnp.zeros((vocab,), jnp.int32).at[jnp.where(at < length, tokens, vocab)].max(1 + run, mode="drop")
            ranked = jax.lax.top_k(scores, min(MOST, vocab))[0]
            looked_at = scores >= jnp.maximum(ranked[jnp.minimum(k, vocab) - 1], jnp.finfo(jnp.float32).min)
            return jnp.where(looked_at, jax.nn.softmax(scores) - alpha * long, -jnp.inf)

        return text.each(one, scores, own["momentum_alpha"], own["momentum_k"])
