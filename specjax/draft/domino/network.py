"""Domino's sequential part (arXiv:2605.29707): a recurrent network over a path's tokens, and a low-rank correction of a
slot's logits by its state.

Shapes: `E` width, `G` the state's, `r` the correction's rank, `U` columns of the draft head.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from specjax.draft.head import head_scores

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class Correction:
    """Gated recurrent units (GRU) and the correction, as functions of a params pytree.

    The parameters are `token` {`kernel` `[E, 3G]`} and `memory` {`kernel` `[G, 3G]`}, each for the reset gate, the update
    gate and the candidate in this order; `inner` {`kernel` `[E + G, r]`} and `head` {`kernel` `[r, U]`}.

    Attributes:
      width: E.
      state: G.
      rank: r.
    """

    width: int
    state: int
    rank: int

    def init(self, key: Array, vocab: int, dtype: Any) -> Any:
        """A correction of zero."""
        make, keys = jax.nn.initializers.lecun_normal(), jax.random.split(key, 3)
        sizes = {
            "token": (self.width, 3 * self.state),
            "memory": (self.state, 3 * self.state),
            "inner": (self.width + self.state, self.rank),
        }
        made = {name: {"kernel": make(own, size, dtype)} for own, (name, size) in zip(keys, sizes.items(), strict=True)}
        return {**made, "head": {"kernel": jnp.zeros((self.rank, vocab), dtype)}}

    def states(self, params: Any, embeds: Array, above: Array) -> Array:
        """The states `[..., G]` after tokens.

        Args:
          params: see `init`.
          embeds: `[..., E]`, the tokens' embeddings.
          above: `[..., G]`, the states before them; zeros before the first.
        """
        kernel = params["token"]["kernel"]
        above = above.astype(kernel.dtype)
        token = jnp.split(embeds.astype(kernel.dtype) @ kernel, 3, axis=-1)
        memory = jnp.split(above @ params["memory"]["kernel"], 3, axis=-1)
        reset, update = (jax.nn.sigmoid(token[i] + memory[i]) for i in (0, 1))
        candidate = jnp.tanh(token[2] + reset * memory[2])
        return (1 - update) * candidate + update * above

    def __call__(self, params: Any, h: Array, states: Array) -> Array:
        """The correction `[..., U]` float32 of logits, from a slot's output `[..., E]` and the states before it
        `[..., G]`.
        """
        kernel = params["inner"]["kernel"]
        read = jnp.concatenate([h.astype(kernel.dtype), states.astype(kernel.dtype)], axis=-1)
        return head_scores(jax.nn.silu(read @ kernel), params["head"]["kernel"])
