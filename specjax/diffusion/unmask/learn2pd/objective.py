"""Training of Learn2PD's filter: which predictions agree with the answer, along a replay of it (arXiv:2509.25188, section 3).

In the shape descriptions `B` denotes rows, `T` tokens per row, `W` the block length.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax

from specjax.diffusion.unmask.learn2pd import Learn2PD, judge
from specjax.objectives.base import each_row
from specjax.objectives.masked import MaskedObjective, seen
from specjax.objectives.means import MEAN

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class TrainFilter(MaskedObjective):
    """Binary cross-entropy of the filter along a replay of a block of each row.

    In each pass the replay commits the predictions that agree with the answer, or the whole block if none does, as a
    perfect filter would. The answers are what the model wrote at one token per pass. The paper stores the pairs of a
    replay and trains on them; here they are made anew in every step.

    Attributes:
      policy: what is trained.
      passes: of a replay.
    """

    saved = ("block_length", "hidden")

    policy: Learn2PD = Learn2PD()
    passes: int = 4

    def __post_init__(self):
        if self.passes < 1:
            raise ValueError(f"learn2pd needs passes >= 1, got {self.passes}")

    @property
    def method(self):
        return self.policy

    def param_shardings(self, mesh, params):
        return self.policy.param_shardings(mesh, params)

    def init(self, key, target_params):
        return self.policy.init_params(key, target_params)

    def merit(self, metrics):
        return -metrics["loss"]  # what the filter accepts may be wrong

    def loss(self, params: Any, target_params, batch, key, mean=MEAN):
        width = self.policy.block_length
        place = jnp.cumsum(batch.mask, axis=1) - 1
        count = batch.mask.sum(axis=1)
        blocks = jnp.maximum(count // width, 1)  # whole blocks; a shorter answer has a single one
        number = jnp.floor(each_row(jax.random.uniform, key, len(blocks)) * blocks).astype(jnp.int32)[:, None]
        first = jnp.argmax(batch.mask & (place == number * width), axis=1)
        at = first[:, None] + jnp.arange(width)[None]
        inside = (at < batch.tokens.shape[1]) & jnp.take_along_axis(batch.mask, at, axis=1, mode="clip")
        answer = jnp.take_along_axis(batch.tokens, at, axis=1, mode="clip")
        after = batch.mask & (place >= (number + 1) * width)
        canvas = jnp.where(after, self.mask_id, batch.tokens)
        pick = jax.vmap(lambda row, at: jnp.take(row, at, axis=0, mode="clip"))

        def one(masked, _):
            write = jax.vmap(lambda row, at, new: row.at[at].set(new, mode="drop"))
            tokens = write(canvas, jnp.where(inside, at, canvas.shape[1]), jnp.where(masked, self.mask_id, answer))
            logits = pick(self.logits(target_params, tokens, seen(batch)), at)
            sure = jnp.where(inside, jnp.exp(jax.nn.log_softmax(logits, axis=-1).max(axis=-1)), 1.0)
            right = jnp.argmax(logits, axis=-1) == answer
            left = masked & ~right
            stuck = jnp.all(left == masked, axis=1, keepdims=True)
            return jnp.where(stuck, False, left), (sure, right, masked)

        _, (sure, right, masked) = jax.lax.scan(one, inside, length=self.passes)
        sure, right, masked = jax.lax.stop_gradient((sure, right, masked))
        logits = judge(params, sure)
        each = optax.sigmoid_binary_cross_entropy(logits, right.astype(jnp.float32))
        kept = jax.nn.sigmoid(logits) > self.policy.threshold
        metrics = {
            "acceptance": mean(kept.astype(jnp.float32), masked),
            "right": mean(right.astype(jnp.float32), masked & kept),
            "weight": masked.sum(),
        }
        return mean(each, masked), metrics
