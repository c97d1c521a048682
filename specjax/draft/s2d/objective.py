"""Sorted fine-tuning (SoFT): every exit of a draft model learns the text under the same norm and head (arXiv:2407.01955)."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from specjax.draft.s2d.exits import Exits, check_exits
from specjax.kernels.chunks import chunked
from specjax.objectives.base import OfModel
from specjax.objectives.losses import surprise
from specjax.objectives.means import MEAN
from specjax.objectives.teacher import positions_at_a_time


@dataclasses.dataclass(frozen=True)
class TrainS2D(OfModel):
    """The sum over exits of the cross-entropy of the text's own tokens, each exit with the weight 1.

    No target takes part, so one draft model serves every target of its vocabulary.

    Attributes:
      lm: the model that is trained.
      exits: ascending layer counts, the last of which is the whole model.
    """

    lm: Any
    exits: tuple[int, ...]

    def __post_init__(self):
        check_exits(self.exits, self.lm.num_layers)

    def init(self, key, target_params):
        """Random parameters."""
        return self.lm.init(key)

    def loss(self, params, target_params, batch, key, mean=MEAN):
        """The loss in nats. `perplexity` is the whole model's; `accuracy_N` is how often N layers say the text's token."""
        model, block, due = Exits(self.lm, params, None, self.exits, (), None), batch.block(), batch.due(1)

        def compare(inputs):
            h, labels = inputs
            logits = model.head(h)
            right = jax.lax.stop_gradient(jnp.argmax(logits, axis=-1) == labels)
            return surprise(logits, labels), right.astype(jnp.float32)

        size = positions_at_a_time(batch)
        told = [chunked(compare, (h[:, :-1], batch.tokens[:, 1:]), size) for h in model.streams(block)]
        loss = sum((mean(nats, due) for nats, _ in told), jnp.zeros(()))
        metrics = {f"accuracy_{exit}": mean(right, due) for exit, (_, right) in zip(self.exits, told, strict=True)}
        perplexity = jnp.exp(mean.whole(told[-1][0], due))  # of the whole batch: no mean of the parts' own
        return loss, metrics | {"perplexity": mean(jnp.full_like(told[-1][0], perplexity), due), "weight": due.sum()}
