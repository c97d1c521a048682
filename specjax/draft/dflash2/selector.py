"""DFlash 2's selector, which walks the likeliest tokens of each slot (z-lab/dflash).

Shapes: `E` width, `r` the selector's rank, `k` candidates, `F` nodes of a slot, `V` tokens, `U` columns of the draft head.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class Selector:
    """Scores of a slot's likeliest tokens by the token before, as functions of a params pytree.

    The score of token b after token a is b's logit plus `<before[a] * projection(h), after[b]>`, h being the slot's
    output. The parameters are `before` {`embedding` `[V, r]`}, `after` {`embedding` `[U, r]`} and `projection` {`kernel`
    `[E, r]`}.

    Attributes:
      width: E.
      rank: r.
      candidates: k, or all columns if there are fewer.
    """

    width: int
    rank: int
    candidates: int

    def init(self, key: Array, vocab: int, dtype: Any) -> Any:
        """Parameters with which scores are logits."""
        before, projection = jax.random.split(key)
        make = jax.nn.initializers.normal(0.02)
        return {
            "before": {"embedding": make(before, (vocab, self.rank), dtype)},
            "after": {"embedding": jnp.zeros((vocab, self.rank), dtype)},
            "projection": {"kernel": make(projection, (self.width, self.rank), dtype)},
        }

    def likeliest(self, logits: Array) -> tuple[Array, Array]:
        """The logits `[..., k]` of the likeliest columns, and the columns `[..., k]` int32, from logits `[..., U]`."""
        return jax.lax.top_k(logits, min(self.candidates, logits.shape[-1]))

    def __call__(self, params: Any, h: Array, tokens: Array, likeliest: tuple[Array, Array]) -> Array:
        """The scores `[..., F, k]` float32 of a slot's candidates after each of the tokens `[..., F]`.

        Args:
          params: see `init`.
          h: `[..., E]`, the slot's output.
          tokens: ids before the slot; ids outside the vocabulary are read as token 0.
          likeliest: see the method.
        """
        logits, columns = likeliest
        wide = lambda x: x.astype(jnp.float32)
        table, kernel = params["before"]["embedding"], params["projection"]["kernel"]
        known = (tokens >= 0) & (tokens < len(table))
        before = wide(table.at[jnp.where(known, tokens, 0)].get(mode="promise_in_bounds"))
        gate = wide(h.astype(kernel.dtype) @ kernel)[..., None, :]
        after = wide(params["after"]["embedding"].at[columns].get(mode="promise_in_bounds"))
        return wide(logits)[..., None, :] + jnp.einsum("...fr,...kr->...fk", before * gate, after)


def spread(scores: Array, columns: Array, size: int) -> Array:
    """The scores `[..., F, k]` of the columns `[..., k]` as logits `[..., F, U]`; other columns are impossible.

    `size` is U.
    """
    ids = jnp.broadcast_to(columns[..., None, :], scores.shape)
    rest = jnp.full((*scores.shape[:-1], size), -jnp.inf, scores.dtype)
    return jnp.put_along_axis(rest, ids, scores, axis=-1, inplace=False)
