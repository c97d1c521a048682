"""Losses that make the experts of neighbouring tokens few and alike (BlockFFN, Song et al. 2025, arXiv:2507.08771, 3.2).

A decoding step reads the union of its tokens' experts (`specjax.kernels.union_mlp`), so these losses lower its cost. Both read
the logits of routers before the ReLU.

Shapes: `B` rows, `T` tokens of a row, `X` experts.
"""

import dataclasses

import jax
import jax.numpy as jnp

from specjax.models.norms import rms_norm
from specjax.objectives.base import Batch, check_not_negative
from specjax.objectives.means import Mean

Array = jax.Array

LEAST = 1e-5
"""Added to sums and to what a logarithm is taken of, as in the publication."""


@dataclasses.dataclass(frozen=True)
class Sparsity:
    """The losses and their factors. The authors take 0.05 for `chunk`, and 0.001 or 0.002 for `locality`.

    Attributes:
      chunk: the factor of `unused`; 0: none.
      chunk_length: the tokens of a chunk.
      locality: the factor of `changed`; 0: none.
      steepness: of the sigmoid that tells chosen experts from others.
    """

    chunk: float = 0.0
    chunk_length: int = 64
    locality: float = 0.0
    steepness: float = 100.0

    def __post_init__(self):
        check_not_negative("lm", self, "chunk", "locality", "steepness")
        if self.chunk_length < 1:
            raise ValueError(f"lm: chunk_length must be at least 1 token, got {self.chunk_length}")
        if not self.chunk and not self.locality:
            raise ValueError(
                "lm: both losses of BlockFFN are off: give chunk or locality a factor above 0, or leave all out"
            )

    def __call__(self, logits: list[Array], batch: Batch, eps: float, mean: Mean) -> tuple[Array, dict[str, Array]]:
        """The weighted sum of both losses, each the mean over layers, and metrics.

        Args:
          logits: every layer's, `[B, T, X]`.
          batch: the rows.
          eps: of the norm of weights.
          mean: takes the means.

        Returns:
          A scalar. The metrics are both losses (`chunk_sparsity`, `locality`), and the share of experts that a token
          (`token_experts`) and a chunk (`chunk_experts`) use.
        """
        each = [x.astype(jnp.float32) for x in logits]
        over = lambda values: jnp.stack(values).mean(axis=0)
        chunk = chunks(batch, self.chunk_length)
        some = in_chunk(batch.mask, chunk)
        sparse = mean(over([unused(shares(x, eps), batch.mask, chunk) for x in each]), some)
        local = mean(over([changed(x, self.steepness) for x in each]), batch.due(1))
        used = [jax.lax.stop_gradient(x > 0) & batch.mask[:, :, None] for x in each]
        metrics = {
            "chunk_sparsity": sparse, "locality": local,
            "token_experts": mean(over([x.mean(axis=-1) for x in used]), batch.mask),
            "chunk_experts": mean(over([(_summed(x, chunk) > 0).mean(axis=-1) for x in used]), some),
        }  # fmt: skip
        return self.chunk * sparse + self.locality * local, metrics


def shares(logits: Array, eps: float) -> Array:
    """A token's weights `[B, T, X]` divided by their sum, without the learned factors of their norm."""
    normed = rms_norm(jax.nn.relu(logits), None, eps)
    return normed / (normed.sum(axis=-1, keepdims=True) + LEAST)


def chunks(batch: Batch, length: int) -> Array:
    """`[B, T]` int32, the chunk of its row that a slot belongs to. Each document begins a chunk."""
    return jnp.cumsum(batch.positions % length == 0, axis=1, dtype=jnp.int32) - 1


def in_chunk(mask: Array, chunk: Array) -> Array:
    """`[B, T]` bool, whether a chunk of the row, by its number, has a slot of `mask`."""
    return _summed(mask[:, :, None], chunk)[:, :, 0] > 0


def unused(shares: Array, mask: Array, chunk: Array) -> Array:
    """The loss of chunk sparsity, `[B, T]` by chunk: 1 minus the mean over experts of `prod_t (1 - share_t)`.

    The product is near 1 for an expert that no token of the chunk uses.

    Args:
      shares: `[B, T, X]`.
      mask: `[B, T]`, which tokens count.
      chunk: `[B, T]`, see `chunks`.
    """
    logs = jnp.where(mask[:, :, None], jnp.log(1 - shares + LEAST), 0.0)
    return 1 - jnp.exp(_summed(logs, chunk)).mean(axis=-1)


def changed(logits: Array, steepness: float) -> Array:
    """The loss of locality, `[B, T - 1]`: the cross-entropy between soft choices of a token's experts and of the next one's,
    `sigmoid(steepness * logits)`, in the mean over experts."""
    before, after = steepness * logits[:, :-1], jax.nn.sigmoid(steepness * logits[:, 1:])
    return (jax.nn.softplus(before) - before * after).mean(axis=-1)


def _summed(values: Array, chunk: Array) -> Array:
    """The sums of values `[B, T, X]` over each chunk, by its number: `[B, T, X]`, with zeros after the last."""
    add = lambda values, chunk: jax.ops.segment_sum(values, chunk, num_segments=chunk.shape[0])
    return jax.vmap(add)(values.astype(jnp.float32), chunk)
