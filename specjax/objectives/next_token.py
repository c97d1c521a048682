"""The plain loss of language models: minus the log-probability of every next token of a text."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from specjax.kernels.chunks import chunked
from specjax.lm import Wants
from specjax.models.block_ffn import blocks_of, router_logits
from specjax.objectives.base import Objective, read
from specjax.objectives.losses import surprise
from specjax.objectives.means import MEAN
from specjax.objectives.sparsity import Sparsity
from specjax.objectives.teacher import positions_at_a_time
from specjax.sharding import shardings


@dataclasses.dataclass(frozen=True)
class NextToken(Objective):
    """Cross-entropy of the text's own tokens under a model that reads them from left to right.

    It is what draft models are pretrained with, and what they learn a target's completions with (FastDraft,
    arXiv:2411.11055, section 3). The mean is over all tokens of a batch that are to be predicted. A document's first
    token has nothing before it and is not predicted.

    Attributes:
      lm: the model that is trained.
      sparsity: losses that are added, of the routers of a model whose layers have BlockFFN; None: none are.
    """

    lm: Any
    sparsity: Sparsity | None = None

    def param_shardings(self, mesh, params):
        return shardings(mesh, self.lm.axes(params), params, self.lm.axis_counts())

    def init(self, key, target_params):
        """Random parameters."""
        return self.lm.init(key)

    def loss(self, params, target_params, batch, key, mean=MEAN):
        """The text's loss in nats, plus those of `sparsity`.

        `perplexity` is the exponential of the text's; `accuracy` is how often the likeliest token is the text's."""

        def compare(inputs):
            final, labels = inputs
            logits = self.lm.unembed(params, final)
            right = jax.lax.stop_gradient(jnp.argmax(logits, axis=-1) == labels)
            return surprise(logits, labels), right.astype(jnp.float32)

        with router_logits() as routers:
            final = read(self.lm, params, batch, Wants(final=True)).final[:, :-1]
        nats, right = chunked(compare, (final, batch.tokens[:, 1:]), positions_at_a_time(batch))
        due = batch.due(1)
        perplexity = jnp.exp(mean.whole(nats, due))  # of the whole batch: no mean of the parts' own
        metrics = {"perplexity": mean(jnp.full_like(nats, perplexity), due), "accuracy": mean(right, due)}
        loss, metrics = mean(nats, due), metrics | {"weight": due.sum()}
        if self.sparsity is None:
            return loss, metrics
        more, own = self.sparsity(routers, batch, blocks_of(self.lm.config).norm.eps, mean)
        return loss + more, metrics | own
