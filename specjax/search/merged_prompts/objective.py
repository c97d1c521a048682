"""Training of the inputs of merged tokens: the model goes on after a merged prompt as after the prompt itself.

The authors' network is trained beforehand for any tokens of any language (ZeTT, arXiv:2405.07883), over the
embeddings of a token's parts. This one is ours: small, and trained for one model.

In the shape descriptions `B` denotes rows, `T` tokens of a row, `E` the model width, `P` parts, `r` the rank, `V` the
vocabulary.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from specjax.kernels.chunks import chunked
from specjax.lm import LM, Block, Wants
from specjax.objectives.base import Batch, Objective, each_row, read
from specjax.objectives.means import MEAN
from specjax.objectives.teacher import positions_at_a_time
from specjax.search.merged_prompts.embedder import bent, fresh
from specjax.sharding.rules import replicated

Array = jax.Array
PyTree = Any


@dataclasses.dataclass(frozen=True)
class TrainMergedPrompts(Objective):
    """KL(after the prompt, after the merged prompt) of every token after it, in nats.

    Each row draws a share of its prompt's joints that are merged, evenly from 0 to 1, and then the joints. A row
    without a prompt draws where it is cut. Tokens that follow each other within a word can be merged
    (`Merger.edges`); a merged token has up to `parts` of them.

    `target_params` are {`lm`: the model's, `begins` `[V]` bool, `ends` `[V]` bool}.

    Attributes:
      lm: the model.
      parts: P. The authors' network reads 7.
      rank: r.

    Raises:
      ValueError: on numbers that are not possible.
    """

    lm: LM
    parts: int = 7
    rank: int = 128

    def __post_init__(self):
        for name, least in (("parts", 2), ("rank", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"merged_prompts: {name} must be at least {least}, got {getattr(self, name)}")

    @property
    def packed(self) -> bool:
        return False

    def param_shardings(self, mesh, params):
        return replicated(mesh, params)

    def init(self, key, target_params):
        """A network that adds nothing to the mean of the parts' embeddings."""
        whole = jax.eval_shape(self.lm.embed, target_params["lm"], jnp.zeros((1, 1), jnp.int32))
        return fresh(key, whole.shape[-1], self.parts, self.rank)

    def loss(self, params, target_params, batch, key, mean=MEAN):
        """See the class. `shorter` is the share of a prompt's tokens that went, `accuracy` how often the likeliest
        token stays."""
        lm, weights = self.lm, target_params["lm"]
        joins, cut = self.joins(target_params, batch, key)
        slots = jnp.cumsum(~joins, axis=1) - 1
        output = lm(weights, self.block(params, weights, batch.tokens, joins, slots), None, wants=Wants(final=True))
        merged = jnp.take_along_axis(output.final, slots[..., None], axis=1)
        plain = jax.lax.stop_gradient(read(lm, weights, batch, Wants(final=True)).final)

        def compare(inputs):
            told, said = (jax.nn.log_softmax(lm.unembed(weights, own), axis=-1) for own in inputs)
            divergence = (jnp.exp(told) * (told - said)).sum(axis=-1)
            same = jnp.argmax(told, axis=-1) == jnp.argmax(said, axis=-1)
            return divergence, jax.lax.stop_gradient(same).astype(jnp.float32)

        nats, same = chunked(compare, (plain[:, :-1], merged[:, :-1]), positions_at_a_time(batch))
        due = batch.due(1) & (jnp.arange(nats.shape[1])[None] >= cut[:, None] - 1)
        shares = joins.sum(axis=1) / cut
        shorter = mean(jnp.broadcast_to(shares[:, None], nats.shape), due)
        return mean(nats, due), {"accuracy": mean(same, due), "shorter": shorter, "weight": due.sum()}

    def joins(self, target_params: PyTree, batch: Batch, key: Array) -> tuple[Array, Array]:
        """Which tokens are read with the one before them, `[B, T]` bool, and how many tokens each prompt has, `[B]`
        int32."""
        rows, length = batch.tokens.shape
        at = jnp.arange(length)[None]
        first = jnp.argmax(batch.mask, axis=1)

        def drawn(key):
            of = jax.random.split(key, 3)
            cut = jax.random.randint(of[0], (), 1, length)
            return cut, jax.random.uniform(of[1], (length,)) < jax.random.uniform(of[2], ())

        cuts, chosen = each_row(drawn, key, rows)
        cut = jnp.where(first > 0, first, cuts)
        before = jnp.pad(batch.tokens[:, :-1], ((0, 0), (1, 0)))
        new = target_params["begins"][batch.tokens] | target_params["ends"][before] | (at == 0)
        place = at - jax.lax.cummax(jnp.where(new, at, 0), axis=1)
        return chosen & ~new & (place % self.parts != 0) & (at < cut[:, None]), cut

    def block(self, params: PyTree, weights: PyTree, tokens: Array, joins: Array, slots: Array) -> Block:
        """The rows with merged tokens, `[B, T]`, padded at the end."""
        at = jnp.arange(tokens.shape[1])[None]
        place = at - jax.lax.cummax(jnp.where(joins, 0, at), axis=1)
        each = self.lm.embed(weights, tokens).astype(jnp.float32)
        by_place = jnp.einsum("bte,per->btpr", each, params["into"], precision="highest")
        own = jnp.take_along_axis(by_place, place[..., None, None], axis=2)[:, :, 0]
        gather = jax.vmap(lambda x, to: jnp.zeros_like(x).at[to].add(x))
        count = gather(jnp.ones(tokens.shape), slots)
        mean = gather(each, slots) / jnp.maximum(count, 1.0)[..., None]
        inputs = mean + bent(params, gather(own, slots))
        last = jax.vmap(lambda x, to: jnp.zeros_like(x).at[to].max(x))(jnp.broadcast_to(at, tokens.shape), slots)
        ids = jnp.take_along_axis(tokens, last, axis=1)
        positions = jnp.broadcast_to(at.astype(jnp.int32), tokens.shape)
        start = jnp.zeros((len(tokens),), jnp.int32)
        return Block(ids, positions, start, embeddings=inputs, embedded=count > 1)
