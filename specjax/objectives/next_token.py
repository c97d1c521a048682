"""The plain loss of language models: minus the log-probability of every next token of a text."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from specjax.kernels.chunks import chunked
from specjax.lm import Wants
from specjax.models.block_ffn import blocks_of, router_logits
from specjax.objectives.base import Batch, OfModel, each_row, read
from specjax.objectives.losses import surprise
from specjax.objectives.means import MEAN
from specjax.objectives.sparsity import Sparsity
from specjax.objectives.teacher import positions_at_a_time


@dataclasses.dataclass(frozen=True)
class NextToken(OfModel):
    """Cross-entropy of the text's own tokens under a model that reads them from left to right.

    It is what draft models are pretrained with, and what they learn a target's completions with (FastDraft,
    arXiv:2411.11055, section 3). The mean is over all tokens of a batch that are to be predicted. A document's first
    token has nothing before it and is not predicted.

    Attributes:
      lm: the model that is trained.
      drop: the share of prompts that are dropped, drawn anew in every update, so that the model also learns what follows
        without a condition: the unconditional side of guidance (`specjax.models.guided`). What is left of such a prompt
        is its last token, which then has position 0, as guidance reads it. Of a piece of a long text, what it repeats
        of the text before counts as its prompt.
      sparsity: losses that are added, of the routers of a model whose layers have BlockFFN; None: none are.

    Raises:
      ValueError: for a share out of [0, 1].
    """

    lm: Any
    sparsity: Sparsity | None = None
    drop: float = 0.0

    def __post_init__(self):
        if not 0 <= self.drop <= 1:
            raise ValueError(f"lm needs a share of dropped prompts in [0, 1], got drop={self.drop}")

    def init(self, key, target_params):
        """Random parameters."""
        return self.lm.init(key)

    def held_out(self, target_params):
        return dataclasses.replace(self, drop=0.0), target_params

    def loss(self, params, target_params, batch, key, mean=MEAN):
        """The text's loss in nats, plus those of `sparsity`.

        `perplexity` is the exponential of the text's; `accuracy` is how often the likeliest token is the text's."""

        batch = without_prompts(batch, key, self.drop) if self.drop else batch

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


def without_prompts(batch: Batch, key: jax.Array, share: float) -> Batch:
    """A batch in which a share of the prompts, all but their last tokens, are documents of their own.

    Nothing of the text after them sees them, and its positions begin at the prompt's last token.

    Args:
      batch: the rows.
      key: a key, or one per row.
      share: the chance of each prompt.
    """
    rows, width = batch.tokens.shape
    documents = jnp.zeros_like(batch.tokens) if batch.documents is None else batch.documents
    slots = jnp.broadcast_to(jnp.arange(width)[None], (rows, width))
    begins = jnp.pad(documents[:, 1:] != documents[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    first = jax.lax.cummax(jnp.where(begins, slots, 0), axis=1)  # of each slot's document
    due = jnp.cumsum(batch.mask, axis=1) - batch.mask  # how many predicted tokens lie before a slot
    prompt = (due == jnp.take_along_axis(due, first, axis=1)) & ~batch.mask
    last = prompt & ~jnp.pad(prompt[:, 1:] & batch.together(1), ((0, 0), (0, 1)))
    drawn = each_row(lambda key: jax.random.uniform(key, (width,)), key, rows)
    dropped = jnp.take_along_axis(drawn, first, axis=1) < share
    return dataclasses.replace(batch, documents=2 * documents + (prompt & ~last & dropped))
