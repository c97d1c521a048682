"""The parts of a `specjax.models.llama` model: an embedding, layers made of parts, a norm and a head."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, TypeVar

from specjax.models.attention import AttentionConfig
from specjax.models.cross import CrossConfig
from specjax.models.distances import DistancesConfig
from specjax.models.embedding import EmbeddingConfig
from specjax.models.embedding import PositionsConfig as PositionsConfig
from specjax.models.encoder import EncoderConfig
from specjax.models.errors import ModelError
from specjax.models.experts import ExpertsConfig
from specjax.models.kept import Place
from specjax.models.latent import LatentAttentionConfig
from specjax.models.layer import LayerConfig
from specjax.models.mixers import SlotMixerConfig, StateMixerConfig
from specjax.models.mlp import MLPConfig
from specjax.models.norms import NormConfig
from specjax.models.ropes import RopeConfig, RopeScaling
from specjax.models.transform import TransformConfig

Part = TypeVar("Part")


@dataclasses.dataclass(frozen=True)
class HeadConfig:
    """The language-model head.

    Attributes:
      tied: whether the head is the table of embeddings.
      logits_scaling: the divisor of logits (Granite's name).
      soft_cap: keeps logits within this distance of zero, by a tanh.
      bias: whether logits have a bias, which is added after the division.
      normed: whether the final norm precedes it.
      transform: a dense layer, an activation and a norm between the final norm and the head (BERT's); None: there are
        none.
    """

    tied: bool = False
    logits_scaling: float = 1.0
    soft_cap: float | None = None
    bias: bool = False
    normed: bool = True
    transform: TransformConfig | None = None


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A model's configuration. Two with the same parts are equal, whatever their families.

    Attributes:
      hidden_size: the width of the residual stream, or of each of them.
      embedding: how tokens are embedded.
      layers: from the first to the last.
      norm: the norm before the head.
      head: how logits are computed.
      max_position_embeddings: how many positions it was made for.
      encoder: what reads a source for it; None: there is no source.
      distances: numbers that its layers add to scores by distance; None: there are none.
      family: the `model_type` of the family by which it was read (`specjax.models.families`); `save` writes it. Empty
        for a model that came from no folder; then `save` writes the first family that can express it.
    """

    hidden_size: int
    embedding: EmbeddingConfig
    layers: tuple[LayerConfig, ...]
    norm: NormConfig = NormConfig()
    head: HeadConfig = HeadConfig()
    max_position_embeddings: int = 2048
    encoder: EncoderConfig | None = None
    distances: DistancesConfig | None = None
    family: str = dataclasses.field(default="", compare=False)

    def __hash__(self) -> int:
        """A cached hash: an LM is a static argument, hashed in every call, and may have a hundred layers."""
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:
        return hash(tuple(getattr(self, field.name) for field in dataclasses.fields(self) if field.compare))

    def __getstate__(self) -> dict[str, Any]:
        """Its fields without the hash, since hashes of strings differ between processes."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    @property
    def vocab_size(self) -> int:
        return self.embedding.vocab_size

    @property
    def stream_size(self) -> int:
        """The width of what goes from layer to layer: of all residual streams."""
        return self.hidden_size * max(self.embedding.streams, 1)

    @property
    def num_hidden_layers(self) -> int:
        return len(self.layers)

    @property
    def experts(self) -> ExpertsConfig | None:
        """The experts of the layers that have some; None if no layer has."""
        return next((layer.experts for layer in self.layers if layer.experts is not None), None)

    @property
    def attentions(self) -> tuple[AttentionConfig, ...]:
        """The mixers of the layers that have attention."""
        return tuple(one for layer in self.layers for one in layer.mixers if isinstance(one, AttentionConfig))

    @property
    def slot_mixers(self) -> tuple[SlotMixerConfig, ...]:
        """The mixers of the layers that keep one slot per token."""
        return tuple(one for layer in self.layers for one in layer.mixers if isinstance(one, SlotMixerConfig))

    @property
    def head_counts(self) -> tuple[tuple[int, int], ...]:
        """How many heads queries have, and keys, in each kind of attention: over the text, the source, and in the encoder."""
        own = [(one.num_attention_heads, one.num_key_value_heads) for one in self.slot_mixers]
        crossed = [(one.num_attention_heads, one.num_attention_heads) for one in self.crosses]
        layers = () if self.encoder is None else self.encoder.layers
        inside = [one for layer in layers for one in layer.mixers if isinstance(one, SlotMixerConfig)]
        return (*own, *crossed, *((one.num_attention_heads, one.num_key_value_heads) for one in inside))

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """The layers whose only mixer is plain attention: it is not latent, and no running state is beside it."""
        alone = [layer.mixers[0] if len(layer.mixers) == 1 else None for layer in self.layers]
        return tuple(i for i, one in enumerate(alone) if isinstance(one, AttentionConfig))

    @property
    def near(self) -> AttentionConfig:
        """The attention of the layers with a window or, without any, of the first layer that has attention; of latent
        attention, that over the keys and values that it would make.

        Raises:
          ModelError: if no layer has attention.
        """
        latent = [one.made for one in self.slot_mixers if isinstance(one, LatentAttentionConfig)]
        found = sorted((*self.attentions, *latent[:1]), key=lambda one: one.window is None)
        if not found:
            raise ModelError("no layer of this model has attention, so it has no attention sizes for a file or a head")
        return found[0]

    @property
    def attention_sizes(self) -> AttentionConfig:
        """`near` or, if no layer has attention, one head of the model's width: what a file says that must say something."""
        return self.near if self.slot_mixers else AttentionConfig(1, 1, self.hidden_size)

    @property
    def rope(self) -> RopeConfig:
        """The rope of the layers of `near`, or of others if those have none."""
        return self.near.rope or next(iter(self.ropes), RopeConfig())

    @property
    def ropes(self) -> tuple[RopeConfig, ...]:
        """The ropes of all layers that have one."""
        found = (getattr(one, "rope", None) for one in self.slot_mixers)
        return tuple(rope for rope in found if isinstance(rope, RopeConfig))

    @property
    def dense(self) -> MLPConfig:
        """The MLP of the first layer with a feed-forward, or the MLP that its experts replace."""
        feed = next((layer.feed for layer in self.layers if layer.feed is not None), None)
        if feed is None:
            return MLPConfig(4 * self.hidden_size)
        return feed.dense or MLPConfig(getattr(feed, "moe_intermediate_size", 4 * self.hidden_size))

    def attention(self, layer: int = 0) -> AttentionConfig:
        """The attention of a layer.

        Raises:
          ValueError: if it has another mixer.
        """
        mixers = self.layers[layer].mixers
        found = next((one for one in mixers if isinstance(one, AttentionConfig)), None)
        if found is None:
            raise ValueError(f"layer {layer} has no attention")
        return found

    def window(self, layer: int) -> int | None:
        """The window of a layer; None: it attends to everything."""
        return getattr(self.slot_mixer(layer), "window", None)

    def source(self, layer: int) -> int:
        """The layer whose keys and values a layer reads: itself or an earlier one."""
        source = getattr(self.slot_mixer(layer), "source", None)
        return layer if source is None else source

    def slot_mixer(self, layer: int) -> SlotMixerConfig | None:
        """The layer's mixer with a slot per token; None: it has none."""
        return next((one for one in self.layers[layer].mixers if isinstance(one, SlotMixerConfig)), None)

    def state_mixer(self, layer: int) -> StateMixerConfig | None:
        """The layer's mixer with a running state; None: it has none."""
        return next((one for one in self.layers[layer].mixers if isinstance(one, StateMixerConfig)), None)

    @functools.cached_property
    def owners(self) -> tuple[int, ...]:
        """The layers with slots of their own."""
        layers = range(self.num_hidden_layers)
        return tuple(i for i in layers if self.slot_mixer(i) is not None and self.source(i) == i)

    @functools.cached_property
    def state_mixers(self) -> tuple[StateMixerConfig, ...]:
        """The mixers with a running state, one for each layer that has one."""
        found = map(self.state_mixer, range(self.num_hidden_layers))
        return tuple(one for one in found if one is not None)

    @functools.cached_property
    def crosses(self) -> tuple[CrossConfig, ...]:
        """The attention over the source, of each layer that has it."""
        return tuple(layer.cross for layer in self.layers if layer.cross is not None)

    @functools.cached_property
    def places(self) -> tuple[Place, ...]:
        """Where each layer's part of a cache is."""
        layers = range(self.num_hidden_layers)
        slots = {layer: at for at, layer in enumerate(self.owners)}
        states = {layer: at for at, layer in enumerate(i for i in layers if self.state_mixer(i) is not None)}
        crossed = {layer: at for at, layer in enumerate(i for i in layers if self.layers[i].cross is not None)}
        return tuple(Place(slots.get(self.source(i)), states.get(i), crossed.get(i)) for i in layers)

    def tables(self, positions: Any, layer: int = 0) -> Any:
        """The tables of a layer's mixer for positions `[B, T]`; see `specjax.models.mixers.MixerConfig`."""
        mixer = self.layers[layer].mixer
        return None if mixer is None else mixer.tables(positions, self.max_position_embeddings)

    def mapped(self, kind: type[Part], change: Callable[[Part], Any]) -> "ModelConfig":
        """The model with every part of a kind replaced by `change(part)`."""
        return _mapped(self, kind, change, {})

    def every(self, kind: type[Any], /, **fields: Any) -> "ModelConfig":
        """The model with these fields set in every part of a kind: `config.every(AttentionConfig, window=512)`."""
        return self.mapped(kind, lambda part: dataclasses.replace(part, **fields))

    def each(self, change: Callable[[int, LayerConfig], LayerConfig]) -> "ModelConfig":
        """The model with every layer replaced by `change(number, layer)`."""
        return dataclasses.replace(self, layers=tuple(change(i, layer) for i, layer in enumerate(self.layers)))

    def first(self, layers: int) -> "ModelConfig":
        """The model of the first `layers` layers."""
        return dataclasses.replace(self, layers=self.layers[:layers])

    def only(self, layer: int) -> "ModelConfig":
        """The model of one layer, with its own keys."""
        own = self.layers[layer]
        if isinstance(own.mixer, AttentionConfig):
            own = dataclasses.replace(own, mixer=dataclasses.replace(own.mixer, source=None))
        return dataclasses.replace(self, layers=(own,))

    def plain(self, layers: int = 1) -> "ModelConfig":
        """A model of Llama's layers with the same sizes, rope, biases and head norms, but no windows, experts or other
        families' parts."""
        own, norm = self.near, NormConfig(self.norm.eps)
        mixer = AttentionConfig(
            own.num_attention_heads, own.num_key_value_heads, own.head_dim, self.rope, qkv_bias=own.qkv_bias,
            o_bias=own.o_bias, qk_norm=None if own.qk_norm is None else norm,
        )  # fmt: skip
        layer = LayerConfig(mixer, MLPConfig(self.dense.intermediate_size, bias=self.dense.bias), norm)
        head = HeadConfig(self.head.tied, self.head.logits_scaling)
        return ModelConfig(
            self.hidden_size, EmbeddingConfig(self.vocab_size), (layer,) * layers, norm, head, self.max_position_embeddings
        )  # fmt: skip


def llama_config(
    vocab_size: int, hidden_size: int, intermediate_size: int, num_hidden_layers: int, num_attention_heads: int,
    num_key_value_heads: int, head_dim: int, max_position_embeddings: int = 2048, rms_norm_eps: float = 1e-6,
    rope_theta: float = 10000.0, rope_scaling: RopeScaling | None = None, tie_word_embeddings: bool = False,
) -> ModelConfig:  # fmt: skip
    """The config of a Llama of these sizes; names follow Hugging Face's `config.json`.

    `ModelConfig.every` makes other models from it."""
    norm, rope = NormConfig(rms_norm_eps), RopeConfig(rope_theta, rope_scaling)
    mixer = AttentionConfig(num_attention_heads, num_key_value_heads, head_dim, rope)
    layer = LayerConfig(mixer, MLPConfig(intermediate_size), norm)
    return ModelConfig(
        hidden_size, EmbeddingConfig(vocab_size), (layer,) * num_hidden_layers, norm, HeadConfig(tie_word_embeddings),
        max_position_embeddings,
    )  # fmt: skip


def _mapped(part: Any, kind: type[Any], change: Callable[[Any], Any], done: dict[int, Any]) -> Any:
    """A description with every part of a kind replaced, inner parts first; a part used twice stays shared."""
    if isinstance(part, tuple):
        new = tuple(_mapped(one, kind, change, done) for one in part)
        return part if all(a is b for a, b in zip(part, new, strict=True)) else new
    if not dataclasses.is_dataclass(part) or isinstance(part, type):
        return part
    if id(part) not in done:
        inner = {field.name: getattr(part, field.name) for field in dataclasses.fields(part)}
        new = {name: _mapped(value, kind, change, done) for name, value in inner.items()}
        made = dataclasses.replace(part, **new) if any(new[name] is not old for name, old in inner.items()) else part
        done[id(part)] = change(made) if isinstance(made, kind) else made
    return done[id(part)]
