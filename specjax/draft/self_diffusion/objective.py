"""Training of a model of both kinds: it continues a text, and fills in a block of it (Nemotron-Labs-Diffusion, `block_diff`).

In the shape descriptions `B` denotes rows, `T` tokens per row, `V` the vocabulary.
"""

import dataclasses
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from specjax.lm import Block, Wants
from specjax.objectives.base import Batch, OfTarget, check_not_negative, each_row
from specjax.objectives.masked import surprise
from specjax.objectives.means import MEAN

if TYPE_CHECKING:
    from specjax.models import LlamaLM

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class TrainSelfDiffusion(OfTarget):
    """The published joint loss of a model's own parameters.

    One pass reads every row twice, at the same positions: with masks, and as it is. Each position of the first copy sees
    all of its own block there, and the text before the block in the second. The second copy is causal. A row's rate is
    drawn in [eps, 1], and its tokens are masked at it.

    The loss is the sum over masks of cross-entropy over the rate, for the mask's own token, plus `weight` times the sum
    over the text of the next token's cross-entropy. It is divided by the number of masks, plus `weight` times that of
    tokens. The prompt is never masked, and its tokens are not learned.

    Attributes:
      lm: the model.
      mask: the id of a mask.
      block: the length of blocks, which are counted from a row's beginning.
      weight: of the next tokens (`ar_loss_weight`).
      eps: the lowest rate.
    """

    lm: "LlamaLM"
    mask: int = -1
    block: int = 32
    weight: float = 1.0
    eps: float = 1e-3

    def __post_init__(self):
        if self.block < 1 or not 0 < self.eps <= 1:
            raise ValueError(
                f"self_diffusion needs block >= 1 and eps in (0, 1], got block={self.block} and eps={self.eps}"
            )
        check_not_negative("self_diffusion", self, "weight")

    def loss(self, params, target_params, batch, key, mean=MEAN):
        rows, width = batch.tokens.shape
        drawn = each_row(lambda key: jax.random.uniform(key, (width + 1,)), key, rows)
        rate = self.eps + (1 - self.eps) * drawn[:, 0]
        # a mask that the text itself holds is not one to fill in: no distribution of masks has it
        masked = batch.mask & (drawn[:, 1:] < rate[:, None]) & (batch.tokens != self.mask)
        logits = self.lm(params, self.both(batch, masked), None, wants=Wants(logits=True)).logits
        noisy, clean = logits[:, :width].at[:, :, self.mask].set(-jnp.inf), logits[:, width:-1]
        filled = jnp.where(masked, surprise(noisy, batch.tokens), 0.0) / rate[:, None]
        due = batch.due(1)
        continued = jnp.where(due, surprise(clean, batch.tokens[:, 1:]), 0.0)
        weights = jnp.concatenate([masked, self.weight * due], axis=1).astype(jnp.float32)
        right = lambda logits, tokens: (jnp.argmax(logits, axis=-1) == tokens).astype(jnp.float32)
        loss = mean(jnp.concatenate([filled, continued], axis=1), weights)
        return loss, {
            "accuracy": mean(right(noisy, batch.tokens), masked),
            "next": mean(right(clean, batch.tokens[:, 1:]), due),
            "weight": weights.sum(),
        }

    def both(self, batch: Batch, masked: Array) -> Block:
        """The pass over both copies, `[B, 2T]`: first the one with masks at `masked` `[B, T]`, then the text."""
        rows, width = batch.tokens.shape
        at = jnp.arange(width)
        of = at // self.block
        same, before = of[:, None] == of[None], of[:, None] > of[None]
        first = jnp.concatenate([same, before], axis=1)
        second = jnp.concatenate([jnp.zeros((width, width), bool), at[:, None] >= at[None]], axis=1)
        visible = jnp.concatenate([first, second])[None]
        tokens = jnp.concatenate([jnp.where(masked, self.mask, batch.tokens), batch.tokens], axis=1)
        positions = jnp.broadcast_to(jnp.concatenate([at, at])[None], tokens.shape)
        seen = visible & self._real(batch) | jnp.eye(2 * width, dtype=bool)[None]  # a row of padding sees something too
        return Block(tokens, positions, jnp.zeros((rows,), jnp.int32), seen)

    def _real(self, batch: Batch) -> Array:
        """`[B, 1, 2T]`, what is no padding: everything up to the last token that is to be predicted."""
        real = jnp.cumsum(batch.mask[:, ::-1], axis=1)[:, ::-1] > 0
        return jnp.concatenate([real, real], axis=1)[:, None]
