"""DSpark's sequential parts (deepseek-ai/DeepSpec): a bias on a slot's distribution by the token before it, and the
draft's confidence.

Shapes: `B` rows, `F` nodes of a slot, `E` width, `r` the bias's rank, `U` columns of the draft head.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from specjax.draft.head import head_scores

Array = jax.Array
KINDS = ("vanilla", "gated", "rnn")


@dataclasses.dataclass(frozen=True)
class MarkovHead:
    """A low-rank bias as functions of a params pytree.

    The parameters are `table` {`embedding` `[V, r]`} for the token before, `head` {`kernel` `[r, U]`}, and for the
    kinds `gated` and `rnn` also `mix` {`kernel`, `bias`}.

    Attributes:
      kind: `vanilla`: the token alone; `gated`: gated by the slot's output; `rnn`: a state that runs along the path.
      rank: r.
      width: E.
    """

    kind: str
    rank: int
    width: int

    @property
    def mixed(self) -> tuple[int, int]:
        """The inputs and outputs of `mix`, only for the kinds `gated` and `rnn`."""
        return (
            (self.width + self.rank, self.rank) if self.kind == "gated" else (self.width + 2 * self.rank, 3 * self.rank)
        )

    def init(self, key: Array, vocab: int, dtype: Any) -> Any:
        """A bias of zero."""
        table, mix = jax.random.split(key)
        params = {
            "table": {"embedding": jax.random.normal(table, (vocab, self.rank), dtype)},
            "head": {"kernel": jnp.zeros((self.rank, vocab), dtype)},
        }
        if self.kind == "vanilla":
            return params
        kernel = jax.nn.initializers.lecun_normal()(mix, self.mixed, dtype)
        return {**params, "mix": {"kernel": kernel, "bias": jnp.zeros((self.mixed[1],), dtype)}}

    def before(self, params: Any, tokens: Array) -> Array:
        """`[..., r]` for the tokens `[...]` before a slot; ids outside the table are read as token 0."""
        table = params["table"]["embedding"]
        known = (tokens >= 0) & (tokens < len(table))
        return table.at[jnp.where(known, tokens, 0)].get(mode="promise_in_bounds")

    def __call__(self, params: Any, before: Array, h: Array, state: Array) -> tuple[Array, Array]:
        """The bias of a slot's distribution.

        Args:
          params: see `init`.
          before: `[..., r]`, see the method.
          h: `[..., E]`, the slot's output.
          state: `[..., r]`, the state after the previous slot of the path; zeros at the first.

        Returns:
          `[..., U]` float32, and the state after it.
        """
        if self.kind == "vanilla":
            return self._biased(params, before), state
        parts = [h, before] if self.kind == "gated" else [state, before, h]
        made = jnp.concatenate([x.astype(before.dtype) for x in parts], axis=-1) @ params["mix"]["kernel"]
        made += jnp.reshape(params["mix"]["bias"], (1,) * (made.ndim - 1) + (-1,))
        if self.kind == "gated":
            return self._biased(params, jax.nn.sigmoid(made) * before), state
        gate, candidate, out = jnp.split(made, 3, axis=-1)
        gate = jax.nn.sigmoid(gate)
        return self._biased(params, jnp.tanh(out)), gate * state + (1 - gate) * jnp.tanh(candidate)

    def _biased(self, params: Any, x: Array) -> Array:
        return head_scores(x, params["head"]["kernel"])


def sureness(params: Any, h: Array, before: Array) -> Array:
    """Logits `[...]` float32 that a slot's token is accepted, from its output `[..., E]`.

    They also use the token before it `[..., r]` if the kernel reads that. `params` is {`kernel` `[E or E + r, 1]`,
    `bias` `[1]`}.
    """
    kernel = params["kernel"]
    read = h if len(kernel) == h.shape[-1] else jnp.concatenate([h, before.astype(h.dtype)], axis=-1)
    made = head_scores(read, kernel)[..., 0]
    return made + params["bias"][0].astype(jnp.float32)
