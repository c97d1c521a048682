"""Relaxed acceptance of GAD++ (Xia et al. 2022, arXiv:2203.16487), lossy: tokens among the target's likeliest are kept."""

import dataclasses

import jax
import jax.numpy as jnp

from specjax.about import About
from specjax.lm import Wants
from specjax.verify.base import Verifier
from specjax.verify.paths import kept
from specjax.verify.top_down import judged_by


@dataclasses.dataclass(frozen=True)
class GadPlus(Verifier):
    """A child passes if it is among the target's `beta` likeliest tokens, and at most `tau` below the likeliest one.

    Both conditions are about the logits after penalties and processors, whatever a row's temperature. Tokens as likely
    as the last of them pass too. The target's own draw passes in any case. The longest path of passing nodes is kept,
    on a tie the likeliest, and the target's own draw follows it.

    Lossy in greedy rows too. With `beta=1` or `tau=0` greedy rows are those of `Coupled`, except where logits are
    equal. In sampled rows the likeliest token always passes, so texts lean towards greedy ones at any setting. The
    defaults are those of the authors' run (WMT14 English to German, 25 masks).

    Three points are this library's: trees, sampled rows, and that tokens which the target's distribution rules out (a
    filter, a bad word) never pass.

    Attributes:
      beta: how many of the likeliest tokens may pass, at least 1.
      tau: how far below the largest logit one may lie, in nats, at least 0.
    """

    about = About(
        "gad_plus", "keep what is among the target's likeliest tokens, by rank and margin", "arXiv:2203.16487", "lossy"
    )

    wants = Wants(logits=True, draw=True)
    keeps_greedy = False

    beta: int = 5
    tau: float = 3.0

    def __post_init__(self):
        if self.beta < 1 or not self.tau >= 0:
            raise ValueError(f"gad_plus needs beta >= 1 and tau >= 0, got {self}")

    def __call__(self, output, tree, sampler):
        p, _, offered = judged_by(output, tree, sampler, soft=True)
        logits = sampler.penalised(output.logits[:, : tree.nodes], tree.path_tokens)
        likeliest = jax.lax.top_k(logits, min(self.beta, logits.shape[-1]))[0]
        least = jnp.maximum(likeliest[..., -1], likeliest[..., 0] - self.tau)
        rows, parent = jnp.arange(tree.tokens.shape[0])[:, None], jnp.maximum(tree.parent, 0)
        tokens = jnp.maximum(tree.tokens, 0)
        chance, draw = p[rows, parent, tokens], output.draw[:, : tree.nodes]
        near = (logits[rows, parent, tokens] >= least[rows, parent]) & (chance > 0)
        return kept((near | (tokens == draw[rows, parent])) & offered.valid, chance, draw, tree)
