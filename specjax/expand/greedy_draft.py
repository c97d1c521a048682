"""The likeliest tokens, and one draw from the rest (greedy draft sampling; Hu et al. 2025, arXiv:2502.18779)."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from specjax.about import About
from specjax.expand.iid import IID
from specjax.sampling.sampler import best

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class GreedyDraft(IID):
    """The first k - 1 of a node's k children are the likeliest tokens; the last is a draw from the distribution without these.

    A single child is a plain draw. See `IID` for the shape, and for greedy rows, whose children are the k likeliest
    tokens.
    """

    about = About(
        "greedy_draft", "the likeliest tokens and one draw from the rest: k sequences, or a tree", "arXiv:2502.18779"
    )

    @property
    def children(self):
        return "greedy"

    def drawn(self, scores, sampler, depth, counts):
        values, found = jax.lax.top_k(scores, max(counts))
        likeliest = jnp.where(values > -jnp.inf, found, -1)
        noise = sampler.children_noise(depth, len(counts), scores.shape[2])
        last = best(left_over(scores, likeliest, counts) + noise)
        return jnp.where(_ranks(counts) == 0, last[:, :, None], likeliest)

    def dist(self, sampler, logits, chosen, counts, paths):
        left = left_over(super().dist(sampler, logits, chosen, counts, paths), chosen, counts)
        mass = jax.nn.logsumexp(left, axis=2, keepdims=True)
        return jnp.where(mass > -jnp.inf, left - mass, -jnp.inf)


def _ranks(counts: tuple[int, ...]) -> np.ndarray:
    """How many siblings come after each one, `[1, F, k]`; negative where there is no child."""
    return (np.asarray(counts)[:, None] - 1 - np.arange(max(counts)))[None]


def left_over(values: Array, chosen: Array, counts: tuple[int, ...]) -> Array:
    """Values `[B, F, V]` with -inf at all of a node's children except the last.

    Args:
      values: by token or by column, whichever `chosen` numbers.
      chosen: `[B, F, k]` int32, -1 for none.
      counts: how many children each node has, at most k.
    """
    taken = jnp.where(_ranks(counts) > 0, chosen, -1)
    columns = jnp.arange(values.shape[2])[None, None, None]
    return jnp.where((columns == taken[..., None]).any(axis=2), -jnp.inf, values)
