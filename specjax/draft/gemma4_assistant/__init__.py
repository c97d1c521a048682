"""Gemma 4's assistant: a small model that drafts from the target's keys and values, and has none of its own (Google, 2026)."""

import dataclasses
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from specjax.about import About
from specjax.draft.base import Proposal
from specjax.draft.feature import FeatureDrafter
from specjax.draft.head import draft_logits
from specjax.expand import Chain, Expander
from specjax.lm import Block, Wants
from specjax.models.param_axes import head_shardings

if TYPE_CHECKING:
    from specjax.models.llama import LlamaLM
    from specjax.models.model_config import ModelConfig


@dataclasses.dataclass(frozen=True)
class Gemma4Assistant(FeatureDrafter):
    """Feeds on its own features at one position, and attends to the target's last layer of each kind that has keys.

    A node's distribution follows from its token and its parent's feature alone. So any tree costs a small pass per
    level and leaves nothing afterwards: the state is the target's last feature.

    `params["draft"]` is AssistantHead's with `head`: {`kernel` `[E, U]`}, and `ids` `[U]` for fewer draft tokens. If it
    reads only some `clusters` of the vocabulary, see `specjax.draft.gemma4_assistant.network.clustered`.

    Attributes:
      expander: turns next-token distributions into a tree.
      layers: decoder layers, if `config` does not say it.
      clusters: the number of equal clusters into which the vocabulary is split; 0: it is read whole.
      top: how many of them are read.
      config: the layers' `ModelConfig`; None for the target's own sizes.
    """

    about = About(
        "gemma4_assistant",
        "a small model over the target's keys and values (Gemma 4)",
        "google/gemma-4-E2B-it-assistant",
        expander="chain:length=3",
        loads="head",
    )

    expander: Expander = Chain(3)
    layers: int = 1
    clusters: int = 0
    top: int = 32
    config: Any = None

    @property
    def feature_wants(self) -> Wants:
        return Wants(final=True)

    @property
    def feature_size(self) -> int:
        return self.target.config.hidden_size

    @property
    def looks_back(self) -> float:
        """Its windows are wider than the target's by two tokens."""
        return 2

    @property
    def head(self):
        """The head's module, as functions."""
        from specjax.draft.gemma4_assistant.network import AssistantHead

        theirs = self.target.config
        own = [i for i in range(theirs.num_hidden_layers) if _keeps_keys(theirs, i)]
        places = tuple(own.index(layer) for layer in sources(self.config, theirs))
        return AssistantHead(self.config, self.feature_size, places)

    def param_shardings(self, mesh, params):
        return head_shardings(mesh, params, self.config)

    def bind(self, target):
        from specjax.models.llama import LlamaLM

        if not isinstance(target, LlamaLM):
            raise ValueError(
                f"gemma4_assistant reads the keys and values of a target of the Llama family, not of {type(target).__name__}"
            )
        if self.layers < 1:
            raise ValueError(f"gemma4_assistant: a head has at least one layer, got layers={self.layers}")
        own = self.config or own_config(target.config, self.layers)
        _check_heads(own, target)
        if self.clusters and (target.vocab_size % self.clusters or not 0 < self.top <= self.clusters):
            raise ValueError(
                f"gemma4_assistant: {self.clusters} clusters, of which {self.top} are read, do not split {target.vocab_size} "
                "tokens"
            )
        return dataclasses.replace(self, config=own, layers=own.num_hidden_layers, target=target)

    def init_params(self, key, target_params):
        own, size, vocab = self.head.init(key), self.config.hidden_size, self.target.vocab_size
        draw = lambda *shape: size**-0.5 * jax.random.normal(jax.random.fold_in(key, len(shape)), shape)
        if not self.clusters:
            return {**own, "head": {"kernel": draw(size, vocab)}}
        each = vocab // self.clusters
        members = jnp.arange(vocab, dtype=jnp.int32).reshape(self.clusters, each)
        kernels = {"centroids": draw(size, self.clusters), "clusters": draw(self.clusters, size, each)}
        return {**own, **{name: {"kernel": x} for name, x in kernels.items()}, "members": members}

    @classmethod
    def objective(cls):
        from specjax.draft.gemma4_assistant.objective import TrainGemma4Assistant

        return TrainGemma4Assistant

    @classmethod
    def layout(cls):
        from specjax.draft.gemma4_assistant.published import LAYOUT

        return LAYOUT

    def features(self, output):
        return output.final

    def read(self, params, features, block, cache, past=None) -> Any:
        return features, None

    def trimmed(self, params, target_params, ids):
        if self.clusters:
            raise ValueError("gemma4_assistant reads some clusters of its tokens alone: there is no head to trim")
        return super().trimmed(params, target_params, ids)

    def propose(self, params, draft, view, sampler):
        ask = lambda tokens, features: self.ask(params, tokens, features, view.length - 1, view.cache)

        def grow(carry, level):  # the features of the root and of every scored node, [B, 1 + P, W]
            dists, left = ask(level.tokens, jnp.take_along_axis(carry, level.parent[:, :, None] + 1, axis=1))
            return jnp.concatenate([carry, left], axis=1), dists

        first, left = ask(view.root[:, None], draft.feature[:, None])
        sampler = self.restricted(params, sampler)
        return Proposal(self.expander(view.root, first[:, 0], grow, left, sampler, keep_q=view.keep_q), draft)

    def ask(self, params, tokens, features, position, cache):
        """The predictions after tokens `[B, M]`, all at `position` `[B]`.

        Args:
          params: {"target": ..., "draft": ...}.
          tokens: ids.
          features: `[B, M, W]`, the features before each.
          position: also how much of the cache they see.
          cache: the target's.

        Returns:
          Their distributions `[B, M, U]`, and the features `[B, M, W]` for the next pass.
        """
        block = Block(tokens, jnp.broadcast_to(position[:, None], tokens.shape), position)
        embeds = self.target.embed(params["target"], tokens)
        h, left = self.head(params["draft"], embeds, features, block, cache)
        return self.logits(params, h), left

    def logits(self, params, h):
        """The distributions `[B, T, U]` of outputs `[B, T, E]`."""
        from specjax.draft.gemma4_assistant.network import clustered

        return clustered(params["draft"], h, self.top) if self.clusters else draft_logits(self.target, params, h)

    def hidden(self, carry):
        """The features `[B, W]` from which the last distribution was computed."""
        return carry[:, -1]


def own_config(target: "ModelConfig", layers: int) -> "ModelConfig":
    """The config of an assistant with the target's sizes and so many of its last layers of plain attention, without
    experts.

    Raises:
      ValueError: if the target has fewer of them.
    """
    bare = {"feed": target.dense, "beside": None, "input_size": 0, "laurel": 0, "streams": 0}
    attend = target.attention_layers
    if len(attend) < layers:
        raise ValueError(
            f"gemma4_assistant: {layers} layers read as many of the target's layers that have plain attention (not latent) "
            f"and no other mixer, and it has {len(attend)} of them"
        )
    last = [
        dataclasses.replace(target.layers[i], mixer=dataclasses.replace(target.attention(i), source=None), **bare)
        for i in attend[-layers:]
    ]
    embedding = dataclasses.replace(target.embedding, layer_inputs=None, streams=0)
    return dataclasses.replace(target, layers=tuple(last), embedding=embedding)


def _keeps_keys(config: "ModelConfig", layer: int) -> bool:
    """Whether a layer has a cache of its own with keys and values."""
    return layer in config.attention_layers and config.source(layer) == layer


def sources(own: "ModelConfig", target: "ModelConfig") -> tuple[int, ...]:
    """Which of the target's caches each layer of an assistant reads: that of the last layer of its kind that has one.

    Raises:
      ValueError: if the target has no layer of that kind.
    """
    kind = lambda config, layer: config.window(layer) is None
    last = {kind(target, i): i for i in range(target.num_hidden_layers) if _keeps_keys(target, i)}
    kinds = [kind(own, i) for i in range(own.num_hidden_layers)]
    if missing := [full for full in kinds if full not in last]:
        raise ValueError(
            f"gemma4_assistant has layers with{'out' if missing[0] else ''} a sliding window, and the target has none "
            "whose only mixer is plain attention"
        )
    return tuple(last[full] for full in kinds)


def _check_heads(own: "ModelConfig", target: "LlamaLM") -> None:
    """Raises ValueError unless every layer's queries fit the target's keys."""
    for layer, source in enumerate(sources(own, target.config)):
        mine, theirs = own.attention(layer), target.laid_out.attention(source)
        if mine.head_dim != theirs.head_dim or mine.num_attention_heads % theirs.num_key_value_heads:
            raise ValueError(
                f"gemma4_assistant: layer {layer} has {mine.num_attention_heads} query heads of width {mine.head_dim}, which "
                f"do not go with the {theirs.num_key_value_heads} of width {theirs.head_dim} of the target's layer {source}"
            )
