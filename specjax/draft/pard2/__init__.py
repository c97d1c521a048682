"""PARD-2: PARD whose draft model reads the target's features beside the text (arXiv:2605.08632)."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from specjax.about import About
from specjax.draft.base import caught_up
from specjax.draft.model import ModelDraft
from specjax.draft.pard import Pard
from specjax.draft.pard2.features import Joined
from specjax.draft.trim import trimmed_model
from specjax.sharding.rules import replicated

Array = jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class FedDraft(ModelDraft):
    """The state of the draft model, and what it reads beside the text.

    Attributes:
      fed: `[B, S, E]`, what is added to the embedding of the token in each slot: the projected features of the token
        before it.
      told: `[B]` int32, for how many tokens that is known: all of the text.
    """

    fed: Any
    told: Any

    def of(self, model: ModelDraft) -> "FedDraft":
        """The same features with another state of the draft model."""
        return FedDraft(model.cache, model.length, self.fed, self.told)


@dataclasses.dataclass(frozen=True)
class Pard2(Pard):
    """`Pard` with a model that reads every token together with the target's features of the token before it.

    The features of several layers are joined and projected, and a multiple of that is added to the token's embedding.
    Masks get what the last token gets. A step costs one pass of the model, as in `Pard`. The features are those of the
    target's own pass; the state keeps their projections, so a row may be caught up at any time.

    `params["draft"]` is `lm`, the model's parameters, and `fc`: {`kernel` `[F, E]`}, with a `bias` `[E]` if it has one.

    Attributes:
      joined: which features are read, and how they are added.
      layers: how many the target has; filled in by `bind`.
    """

    about = About(
        "pard2",
        "a PARD model that reads the target's features beside the text",
        "arXiv:2605.08632",
        expander="chain:length=12",
        fields=(),
        loads="fed_draft",
    )
    tiles = True

    joined: Joined = dataclasses.field(kw_only=True, default=Joined())
    layers: int = dataclasses.field(kw_only=True, default=0)

    def bind(self, target):
        bound = super().bind(target)
        return dataclasses.replace(bound, joined=self.joined.of(target.num_layers), layers=target.num_layers)

    @property
    def wants(self):
        return self.joined.wants(self.layers)

    @property
    def prefill_wants(self):
        return self.wants

    def init(self, params, batch, capacity):
        first = self.joined.nothing(params["draft"]["fc"])
        fed = jnp.broadcast_to(first, (batch, capacity, *first.shape))
        model = super().init(_plain(params), batch, capacity)
        return FedDraft(model.cache, model.length, fed, jnp.ones((batch,), jnp.int32))

    def axes(self, draft):
        model = super().axes(draft)
        return FedDraft(model.cache, model.length, ("batch", "slots", None), ("batch",))

    def param_shardings(self, mesh, params):
        return {"lm": super().param_shardings(mesh, params["lm"]), "fc": replicated(mesh, params["fc"])}

    def encode(self, params, draft, source, tokens):
        return super().encode(_plain(params), draft, source, tokens)

    def prefill(self, params, draft, chunk, output):
        draft = self._told(params, draft, self.joined.features(output, self.layers), chunk.real.sum(axis=1))
        return self._read(params, draft, chunk, output)

    def catch_up(self, params, draft, view):
        return caught_up(self._read, params, draft, view)

    def propose(self, params, draft, view, sampler):
        proposal = super().propose(_plain(params), draft, view, sampler)
        return dataclasses.replace(proposal, draft=draft.of(proposal.draft))

    def observe(self, params, draft, proposal, output, verdict):
        features = self.joined.features(output, self.layers)
        features = jnp.take_along_axis(features, jnp.maximum(verdict.path, 0)[:, :, None], axis=1)
        return self._told(params, draft, features, verdict.committed)

    def fed(self, params, draft, block, slots):
        more = jnp.take_along_axis(draft.fed, slots[:, :, None], axis=1, mode="clip")
        embeddings = self.lm.embed(params, block.tokens) + more
        return dataclasses.replace(block, embeddings=embeddings, embedded=jnp.ones(block.tokens.shape, bool))

    def _read(self, params, draft, chunk, output):
        """The draft model reads a chunk."""
        own = _plain(params)
        block = self.fed(own["draft"], draft, chunk.block, chunk.block.positions)
        return draft.of(super().prefill(own, draft, dataclasses.replace(chunk, block=block), output))

    def _told(self, params: Any, draft: FedDraft, features: Array, count: Array) -> FedDraft:
        """The state with the first `count` `[B]` of the features `[B, T, F]` that follow. Later slots are written again."""
        new = self.joined.projected(params["draft"]["fc"], features).astype(draft.fed.dtype)
        slots = draft.told[:, None] + jnp.arange(features.shape[1])[None]
        fed = draft.fed.at[jnp.arange(len(slots))[:, None], slots].set(new, mode="drop", unique_indices=True)
        return dataclasses.replace(draft, fed=fed, told=draft.told + count.astype(jnp.int32))

    def trimmed(self, params, target_params, ids):
        lm, own = trimmed_model(self.lm, params["lm"], ids)
        return dataclasses.replace(self, lm=lm), {**params, "lm": own}


def _plain(params: Any) -> Any:
    """The parameters as `Pard` has them: the draft model's alone."""
    return {**params, "draft": params["draft"]["lm"]}
