"""Training of PARD-2: PARD with the target's features, weighted by how likely a row is to be reached (arXiv:2605.08632)."""

import dataclasses

import jax
import jax.numpy as jnp

from specjax.draft.pard.objective import Layout, TrainPard
from specjax.draft.pard2.features import Joined
from specjax.lm import Wants
from specjax.objectives.base import each_row
from specjax.objectives.losses import ForwardKL, Loss, surprise
from specjax.sharding.rules import replicated

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class TrainPard2(TrainPard):
    """Fits a PARD-2 model: `divergence` to the target's distributions, and `text` times the text's surprise.

    A row of d masks weighs as much as the target's probability of the d tokens of the text before the one that it
    predicts: what a step needs to reach it. Some rows of a batch have no features, so that the model also drafts without
    them (`pard`). The parameters are those of `Pard2`.

    The defaults are those of the authors' example for Llama 3; their example for Qwen3 leaves out 0.1 of all rows.

    Attributes:
      joined: what is read of the target.
      text: the weight of the cross-entropy to the text's own tokens.
      without: the share of a batch's texts that are read without features.
    """

    divergence: Loss = ForwardKL()
    depths: int = 16
    least: float = 0.1
    joined: Joined = dataclasses.field(kw_only=True, default=Joined())
    text: float = 0.1
    without: float = 0.2

    def __post_init__(self):
        super().__post_init__()
        if not 0 <= self.without <= 1 or not self.text >= 0:
            raise ValueError(
                f"pard2: without must lie in [0, 1] and text must not be negative, got {self.without} and {self.text}"
            )

    @property
    def reads(self):
        return Wants(final=True) | self.joined.wants(self.target.num_layers)

    def param_shardings(self, mesh, params):
        return {"lm": super().param_shardings(mesh, params["lm"]), "fc": replicated(mesh, params["fc"])}

    def init(self, key, target_params):
        """Random parameters of the draft and its projection."""
        own, other = jax.random.split(key)
        return {"lm": super().init(own, target_params), "fc": self.projection(other)}

    @property
    def joined_size(self) -> int:
        """Static: F, of the joined features."""
        return self.target.config.hidden_size * len(self.joined.target_layers)  # pyrefly: ignore[missing-attribute]

    def projection(self, key: Array) -> dict[str, Array]:
        """A random projection of the target's features, drawn as torch draws a linear layer."""
        size = self.joined_size
        shapes = {"kernel": (size, self.draft.config.hidden_size)}
        shapes |= {"bias": shapes["kernel"][1:]} if self.joined.bias else {}
        draw = lambda key, shape: jax.random.uniform(key, shape, minval=-1, maxval=1) * size**-0.5
        return {name: draw(key, shapes[name]) for name, key in zip(shapes, jax.random.split(key, 2), strict=False)}

    def held_out(self, target_params):
        return dataclasses.replace(self, without=0.0), target_params

    def model(self, params):
        return params["lm"]

    def read(self, params, layout, batch, output, key):
        block = layout.block(batch, self.mask)
        features = self.joined.features(output, self.target.num_layers)
        before = self.joined.projected(params["fc"], jnp.pad(features, ((0, 0), (1, 0), (0, 0)))[:, :-1])
        first = batch.positions == 0
        before = jnp.where(first[:, :, None], self.joined.nothing(params["fc"])[None, None], before)
        drawn = each_row(lambda key: jax.random.uniform(jax.random.fold_in(key, 1)), key, len(first))
        before = jnp.where((drawn >= self.without)[:, None, None], before, 0.0)
        more = jnp.take_along_axis(before, layout.anchor[:, :, None], axis=1)
        embeddings = self.draft.embed(params["lm"], block.tokens) + more
        fed = dataclasses.replace(block, embeddings=embeddings, embedded=jnp.ones(block.tokens.shape, bool))
        return self.draft(params["lm"], fed, None, wants=Wants(final=True)).final

    def numbers(self, dist, q, labels):
        text = jnp.maximum(labels, 0)
        more = {"text": surprise(q, text), "said": jnp.exp(-surprise(dist, text))}
        return {**super().numbers(dist, q, labels), **more}

    def taken(self, told, layout, batch, due, mean):
        said, depths = told["said"][:, : batch.tokens.shape[1]], len(self.kept(batch.tokens.shape[1]))
        weights = due * jax.lax.stop_gradient(reached(layout, said, depths))
        return self.divergence.taken(told["numbers"], weights, mean) + self.text * mean(told["text"], weights), weights


def reached(layout: Layout, said: Array, depths: int) -> Array:
    """`[B, R]`, the target's probability of the text's tokens after a row's anchor, up to the one that it predicts.

    Args:
      layout: the rows.
      said: `[B, T]`, the target's probability of the token after each one, given the text before it.
      depths: the most masks before a row.
    """
    length = said.shape[1]
    chances = [jnp.ones_like(said)]
    for depth in range(depths):
        following = jnp.pad(said[:, depth:], ((0, 0), (0, depth)), constant_values=1.0)[:, :length]
        chances.append(chances[-1] * following)
    return jnp.stack(chances, axis=2)[jnp.arange(len(said))[:, None], layout.anchor, layout.depth[None]]
