"""Recurrent speculators: small networks that go on from the target's last feature, token by token.

`mlp_speculator` is IBM's (Wertheimer et al. 2024, arXiv:2404.19124), `lstm_speculator` is Snowflake's. Both read the target's
features after its final norm, as the code of IBM and Snowflake does.
"""

import abc
import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from specjax.about import About, abouts
from specjax.draft.base import Proposal
from specjax.draft.feature import FeatureDrafter, head_config
from specjax.draft.head import head_kernel, head_scores
from specjax.draft.speculator.network import lstm_state, mlp_state, scaled, token_weight
from specjax.expand import Chain
from specjax.lm import Wants

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class Speculator(FeatureDrafter):
    """A state begins as the target's last feature and takes in one token per step; step i guesses the token after it.

    Every path of a tree has states of its own. In the shapes, `D` is the width of a state.

    Attributes:
      expander: turns next-token distributions into a tree. None for a chain of `heads` tokens.
      heads: how many steps it is trained for. The weight of tokens depends on it.
      inner: D; 0 for the target's width.
      scale_input: whether the feature is brought to a root mean square of `sqrt(1/2)`.
    """

    expander: Any = None
    heads: int = 3
    inner: int = 0
    scale_input: bool = True

    feature_wants = Wants(final=True)

    def __post_init__(self):
        if self.heads < 1 or self.inner < 0:
            raise ValueError(
                f"{self.name}: heads must be at least 1 and inner must not be negative, got heads={self.heads}, "
                f"inner={self.inner}"
            )
        expander = self.expander or Chain(self.heads)
        object.__setattr__(self, "expander", expander)
        super().__post_init__()
        if expander.depth > self.deepest:
            raise ValueError(
                f"{self.name}: a tree of depth {expander.depth} needs as many heads, there are {self.heads}"
            )

    @property
    def name(self) -> str:
        """In the registry."""
        return abouts(type(self))[0].name

    @property
    @abc.abstractmethod
    def deepest(self) -> float:
        """Static: the depth of the deepest tree that it can draft."""

    @property
    def feature_size(self) -> int:
        return head_config(self.target, self.name).hidden_size

    @property
    def weight(self) -> float:
        """Of a token's embedding in a state, see `token_weight`."""
        return token_weight(self.heads, self.inner)

    def bind(self, target):
        size = head_config(target, self.name).hidden_size
        return dataclasses.replace(self, target=target, inner=self.inner or size)

    def features(self, output):
        return output.final

    def read(self, params, features, block, cache, past=None):
        return features, None

    @abc.abstractmethod
    def advance(self, own: Any, step: int, above: Array, tokens: Array) -> Array:
        """The state after one more token.

        Args:
          own: `params["draft"]`.
          step: static; 0 reads the root.
          above: `[B, T, E]`, the target's features, in step 0; states `[B, T, S]` in the others.
          tokens: `[B, T]`.

        Returns:
          `[B, T, S]`, of which the first D numbers are the input of the next step and of the output layer.
        """

    def dist(self, own: Any, step: int, states: Array) -> Array:
        """The distribution `[..., U]` of the token after a state `[..., S]`."""
        return head_scores(states[..., : self.inner], of_step(own["heads"], step)["kernel"])

    def first(self, features: Array) -> Array:
        """What step 0 reads of the target's features `[B, T, E]`."""
        return scaled(features) if self.scale_input else features

    def outputs(self, key: Array, target_params: Any, count: int) -> list[dict[str, Array]]:
        """Fresh output layers: the target's if that has the width of a state, otherwise random ones."""
        if self.inner == self.feature_size:
            return [{"kernel": head_kernel(self.target, target_params)}] * count
        keys = jax.random.split(key, count)
        return [{"kernel": self.normal(key, self.inner, self.target.vocab_size)} for key in keys]

    def tables(self, key: Array, target_params: Any, count: int) -> list[dict[str, Array]]:
        """Fresh tables `[V, D]`: the target's embeddings if they are as wide, otherwise random ones."""
        if self.inner == self.feature_size:
            ids = jnp.arange(self.target.vocab_size, dtype=jnp.int32)
            return [{"embedding": self.target.embed(target_params, ids[None])[0]}] * count
        keys = jax.random.split(key, count)
        return [{"embedding": self.normal(key, self.target.vocab_size, self.inner)} for key in keys]

    def normal(self, key: Array, *shape: int) -> Array:
        """Random numbers of standard deviation `1 / sqrt(D)`, as the authors begin with."""
        return jax.random.normal(key, shape) / self.inner**0.5

    def norm(self) -> dict[str, Array]:
        """A fresh norm over D."""
        return {"scale": jnp.ones((self.inner,)), "bias": jnp.zeros((self.inner,))}

    def trimmed(self, params, target_params, ids):
        heads = [{"kernel": head["kernel"][:, ids]} for head in params["heads"]]
        return self, {**params, "heads": heads, "ids": jnp.asarray(ids, jnp.int32)}

    def widened(self, params, k, width):
        """Step 0 reads k copies of a feature; the width of states is the head's own and stays."""
        first, *others = params["proj"]
        return {**params, "proj": [{"kernel": jnp.tile(first["kernel"], (k, 1)) / k}, *others]}

    def propose(self, params, draft, view, sampler):
        own = params["draft"]

        def grow(states, level):  # states of the root and of every scored node, [B, 1 + P, S]
            above = jnp.take_along_axis(states, level.parent[:, :, None] + 1, axis=1)
            new = self.advance(own, level.depth, above, level.tokens)
            return jnp.concatenate([states, new], axis=1), self.dist(own, level.depth, new)

        root = self.advance(own, 0, draft.feature[:, None], view.root[:, None])
        dist = self.dist(own, 0, root)[:, 0]
        sampler = self.restricted(params, sampler)
        tree = self.expander(view.root, dist, grow, root, sampler, keep_q=view.keep_q)
        return Proposal(tree, draft)


@dataclasses.dataclass(frozen=True)
class MLPSpeculator(Speculator):
    """Step i: `s = gelu(norm_i(proj_i s + weight * embed_i[token]))`, and `head_i s` guesses the next token.

    `params["draft"]` is {`embeds`: [{`embedding` `[V, D]`}], `proj`: [{`kernel` `[E, D]`}, {`kernel` `[D, D]`}, ...], `norms`:
    [{`scale` `[D]`, `bias` `[D]`}], `heads`: [{`kernel` `[D, U]`}]}, lists by step; the last entry is that of all later steps.
    It has `ids` `[U]` if it drafts fewer tokens than the target knows.

    Attributes:
      tied: whether all steps share their weights; only the projection of the feature stays apart. Then a tree may be deeper
        than `heads`. Otherwise every step has its own, as in the paper.
    """

    about = About(
        "mlp_speculator",
        "a small recurrent network that goes on from the target's last feature",
        "arXiv:2404.19124",
        expander="chain:length=3",
        paper="expander=chain,length=8",
        loads="head",
    )

    tied: bool = True

    @property
    def deepest(self) -> float:
        return math.inf if self.tied and self.heads > 1 else self.heads

    def init_params(self, key, target_params):
        """See `outputs` and `tables`; projections are random."""
        steps = 1 if self.tied else self.heads
        projections = min(self.heads, 2) if self.tied else self.heads
        widths = [self.feature_size, *[self.inner] * (projections - 1)]
        of_tables, of_proj, of_heads = jax.random.split(key, 3)
        keys = jax.random.split(of_proj, projections)
        return {
            "embeds": self.tables(of_tables, target_params, steps),
            "proj": [{"kernel": self.normal(key, width, self.inner)} for key, width in zip(keys, widths, strict=True)],
            "norms": [self.norm() for _ in range(steps)],
            "heads": self.outputs(of_heads, target_params, steps),
        }

    @classmethod
    def objective(cls):
        from specjax.draft.speculator.objective import TrainMLPSpeculator

        return TrainMLPSpeculator

    @classmethod
    def layout(cls):
        from specjax.draft.speculator.published import MLP_LAYOUT

        return MLP_LAYOUT

    def advance(self, own, step, above, tokens):
        x = above if step else self.first(above)
        proj, embed, norm = (of_step(own[name], step) for name in ("proj", "embeds", "norms"))
        return mlp_state(proj, embed, norm, x, tokens, self.weight)


@dataclasses.dataclass(frozen=True)
class LSTMSpeculator(Speculator):
    """Step i is a cell of a long short-term memory, which begins empty; all steps share their weights.

    `params["draft"]` is {`embed`: {`embedding` `[V, D]` or `[V, 4 D]`}, `proj`: [{`kernel` `[E, 4 D]`}, {`kernel` `[D, 4 D]`}],
    `cell_norm`, `state_norm`: {`scale` `[D]`, `bias` `[D]`}, `heads`: [{`kernel` `[D, U]`}]}. The four parts of a projection
    are the gates forget, input and output, and the candidate. It has `ids` `[U]` if it drafts fewer tokens than the target
    knows. S is 2 D: a state, and the cell beside it.

    Attributes:
      one_table: whether the four parts share one embedding.
    """

    about = About(
        "lstm_speculator",
        "mlp_speculator with the gates of an LSTM",
        "snowflakedb/ArcticInference",
        expander="chain:length=3",
        paper="expander=chain,length=8",
        loads="head",
    )

    one_table: bool = True

    @property
    def deepest(self) -> float:
        return math.inf

    def init_params(self, key, target_params):
        """See `outputs` and `tables`; projections are random."""
        of_tables, first, others, of_heads = jax.random.split(key, 4)
        tables = self.tables(of_tables, target_params, 1 if self.one_table else 4)
        widths = (first, self.feature_size), (others, self.inner)
        return {
            "embed": {"embedding": jnp.concatenate([table["embedding"] for table in tables], axis=1)},
            "proj": [{"kernel": self.normal(key, width, 4 * self.inner)} for key, width in widths],
            "cell_norm": self.norm(),
            "state_norm": self.norm(),
            "heads": self.outputs(of_heads, target_params, 1),
        }

    @classmethod
    def objective(cls):
        from specjax.draft.speculator.objective import TrainLSTMSpeculator

        return TrainLSTMSpeculator

    @classmethod
    def layout(cls):
        from specjax.draft.speculator.published import LSTM_LAYOUT

        return LSTM_LAYOUT

    def advance(self, own, step, above, tokens):
        x, cell = (above[..., : self.inner], above[..., self.inner :]) if step else (self.first(above), None)
        proj = of_step(own["proj"], step)
        return lstm_state(proj, own["embed"], own["cell_norm"], own["state_norm"], x, cell, tokens, self.weight)


def of_step(parts: list[Any], step: int) -> Any:
    """A step's part; the last one is that of all later steps."""
    return parts[min(step, len(parts) - 1)]
