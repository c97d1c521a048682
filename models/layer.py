"""A layer: a token mixer and a feed-forward, or one of them, each a branch of the residual stream, with norms and optional
parts."""

import dataclasses
from typing import Any, Literal, Protocol

import jax
import jax.numpy as jnp
from flax import nnx

from specjax.models.cross import CrossConfig
from specjax.models.experts import ExpertsConfig
from specjax.models.gemma_experts import Beside, with_experts
from specjax.models.kept import Kept
from specjax.models.laurel import Laurel
from specjax.models.layer_inputs import LayerInput
from specjax.models.mixers import MixerConfig
from specjax.models.mlp import MLPConfig
from specjax.models.norms import NormConfig
from specjax.models.streams import AltUp

Parallel = Literal["two_norms", "one_norm"]


class FeedConfig(Protocol):
    """The description of a feed-forward, a frozen dataclass: `MLPConfig` or `ExpertsConfig`."""

    @property
    def dense(self) -> MLPConfig | None:
        """The MLP that it is, or that it replaces."""
        ...

    def build(self, width: int, dtype: Any, rngs: nnx.Rngs) -> Any:
        """The module, with `split_products` (`specjax.models.mixers.Mixer`).

        It is called with the stream `[B, T, E]` and the pass (`specjax.lm.Block`), or without the latter, and gives
        `[B, T, E]`. Tokens choose experts together in some models; everything else treats each token by itself.
        """
        ...


@dataclasses.dataclass(frozen=True)
class LayerConfig:
    """The parts of a layer.

    Attributes:
      mixer: the part in which tokens read each other; None: there is none (Nemotron-H).
      feed: the feed-forward, in which tokens do not read each other; None: there is none (Mamba).
      norm: the norm before and after both.
      pre_norms: whether the inputs of mixer and feed-forward are normed.
      post_norms: whether their outputs are normed before they are added.
      sum_norms: whether the stream is normed after each output was added to it (Vaswani et al. 2017, arXiv:1706.03762).
      parallel: None: the feed-forward reads the stream with the mixer's output. `two_norms`: it reads the same stream as
        the mixer, and both outputs are added (GPT-NeoX). `one_norm`: the same, and the mixer's norm is its norm too
        (Phi).
      mixer_norm: whether `pre_norms` also holds for the mixer.
      residual_multiplier: the factor of their outputs before they are added.
      beside: experts beside the feed-forward, which read the stream themselves (`specjax.models.gemma_experts`).
      input_size: the width of the layer's further input per token (`specjax.models.layer_inputs`); 0: none.
      scalar: whether a learned number multiplies the stream at the layer's end.
      laurel: the rank of a branch beside the mixer (`specjax.models.laurel`), whose sum with the stream is divided by the
        root of 2; 0: there is none.
      streams: of how many residual streams the layer computes the first (`specjax.models.streams`); 0: there is only one.
      normed_stream: None: branches are added to the stream. Otherwise they are added to their own normed inputs (MiniMax-01),
        with these factors: of the mixer's input and of its output, and of the feed-forward's input and of its output.
      cross: the attention over a source between mixer and feed-forward; None: the layer reads none.
    """

    mixer: MixerConfig | None
    feed: FeedConfig | None
    norm: NormConfig = NormConfig()
    pre_norms: bool = True
    post_norms: bool = False
    sum_norms: bool = False
    parallel: Parallel | None = None
    mixer_norm: bool = True
    residual_multiplier: float = 1.0
    beside: ExpertsConfig | None = None
    input_size: int = 0
    scalar: bool = False
    laurel: int = 0
    streams: int = 0
    normed_stream: tuple[float, ...] | None = None
    cross: CrossConfig | None = None

    def build(self, width: int, dtype: Any, rngs: nnx.Rngs, kernel: Any = None) -> "Layer":
        """The module, for a model of `width`; `kernel` is as for `MixerConfig.build`."""
        return Layer(self, width, dtype, rngs, kernel)

    @property
    def mixers(self) -> tuple[MixerConfig, ...]:
        """Its mixers: none, one, or several side by side."""
        return () if self.mixer is None else self.mixer.parts

    def given(self, kept: Kept) -> Any:
        """What its module reads as `cache`, `past` or `shared`, of what the layer keeps."""
        return None if self.mixer is None else self.mixer.given(kept)

    def kept(self, delta: Any) -> Kept:
        """What the layer keeps of its module's delta."""
        return Kept() if self.mixer is None else self.mixer.kept(delta)

    @property
    def norms_mixer(self) -> bool:
        """Whether it has a norm before its mixer."""
        return self.mixer is not None and self.pre_norms and self.mixer_norm

    @property
    def norms_feed(self) -> bool:
        """Whether it has another norm before its feed-forward."""
        return self.feed is not None and self.pre_norms and self.parallel != "one_norm"

    @property
    def experts(self) -> ExpertsConfig | None:
        """Its experts, in place of an MLP or beside it; None: it has none."""
        return self.feed if isinstance(self.feed, ExpertsConfig) else self.beside


class Layer(nnx.Module):
    """See `LayerConfig`. `MixerConfig.name` names the mixer's module."""

    def __init__(self, config: LayerConfig, width: int, dtype: Any, rngs: nnx.Rngs, kernel: Any = None):
        c = config
        norm = lambda: c.norm.build(width, dtype)
        if c.mixer is not None:
            setattr(self, c.mixer.name, c.mixer.build(width, dtype, rngs, kernel))
        if c.norms_mixer or c.sum_norms:
            self.attention_norm = norm()
        if c.cross is not None:
            self.cross, self.cross_norm = c.cross.build(width, dtype, rngs, kernel), norm()
        if c.norms_feed or c.sum_norms:
            self.mlp_norm = norm()
        if c.feed is not None:
            self.mlp = c.feed.build(width, dtype, rngs)
        if c.beside is not None:
            self.beside = Beside(c.beside, width, c.norm.eps, dtype, rngs)
        if c.post_norms:
            self.attention_post_norm, self.mlp_post_norm = norm(), norm()
        if c.scalar:
            self.scalar = nnx.Param(jnp.ones((1,), dtype))
        if c.input_size:
            self.layer_input = LayerInput(c.input_size, width, c.norm, dtype, rngs)
        if c.laurel:
            self.laurel = Laurel(c.laurel, width, c.norm, dtype, rngs)
        if c.streams:
            self.altup = AltUp(c.streams, width, c.norm, dtype, rngs)
        self.config = c

    def __call__(
        self, x, tables, block, cache, past, positions, skip=None, shared=None, inputs=None, source=None, stale=None
    ):
        """The stream after the layer, and the mixer's delta; None without a mixer.

        Args:
          x: `[B, T, E]`, the residual stream; `[B, T, P E]` if the layer has P streams.
          tables: see `Mixer`.
          block: see `Mixer`.
          cache: see `Mixer`.
          past: see `Mixer`.
          positions: see `Mixer`.
          skip: `[2]` bool, traced: whether to leave out the attention (mixer and source), and the feed-forward, where the
            layer has them.
          shared: see `Mixer`.
          inputs: `[B, T, P]`, see `LayerInput`.
          source: what the layer reads of a source (`specjax.models.cross.Seen`), if it reads one.
          stale: `[B, T, E]`, the stream that the mixer reads instead of `x` (`specjax.models.LlamaLM.layers`).
        """

        def mix(x) -> tuple[Any, Any]:
            if self.config.mixer is None:
                return x, None
            entered = self.entered(x if stale is None else stale)
            mixed, delta = self.mixer(entered, tables, block, cache, past, positions, shared)
            x = self._added(x, self.attention_post_norm(mixed) if self.config.post_norms else mixed, entered, 0)
            x = (x + self.laurel(entered)) * 2**-0.5 if self.config.laurel else x
            x = self.attention_norm(x) if self.config.sum_norms else x
            return (x if self.config.cross is None else self._crossed(x, source)), delta

        def feed(x):
            if self.config.feed is None:
                return x
            read = x if self.config.parallel is None else stream
            normed = self.mlp_norm(read) if self.config.norms_feed else read
            fed = self.mlp(self.entered(read) if self.config.parallel == "one_norm" else normed, block=block)
            fed = fed if self.config.beside is None else with_experts(self.beside, read, fed)
            x = self._added(x, self.mlp_post_norm(fed) if self.config.post_norms else fed, normed, 2)
            return self.mlp_norm(x) if self.config.sum_norms else x

        streams = self.altup.predicted(x) if self.config.streams else None
        x = x if streams is None else streams[:, :, 0]
        stream = x
        if skip is None:
            x, delta = mix(x)
            return self._end(feed(x), streams, inputs), delta
        hole = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(mix, x)[1])
        x, delta = jax.lax.cond(skip[0], lambda x: (x, hole), mix, x)
        return self._end(jax.lax.cond(skip[1], lambda x: x, feed, x), streams, inputs), delta

    @property
    def mixer(self) -> Any:
        """Its token mixer; None: it has none."""
        return None if self.config.mixer is None else getattr(self, self.config.mixer.name)

    def split_products(self) -> tuple[Any, ...]:
        """The products whose inputs a mesh splits over `model`, so that their parts are summed over it."""
        parts = (self.mixer, *(getattr(self, name) for name in ("cross", "mlp") if hasattr(self, name)))
        return tuple(product for part in parts if part is not None for product in part.split_products())

    def entered(self, x):
        """The mixer's input, from the residual stream."""
        return self.attention_norm(x) if self.config.norms_mixer else x

    def _crossed(self, x, source):
        if source is None:
            raise ValueError("a layer reads a source, and there is no cache that holds one: encode() fills it")
        read = self.cross(self.cross_norm(x) if self.config.pre_norms else x, source)
        return self.cross_norm(x + read) if self.config.sum_norms else x + read

    def _added(self, x, branch, normed, first):
        """The stream with a branch, whose input was `normed`; `first` is the place of its factors."""
        if self.config.normed_stream is not None:
            kept, added = self.config.normed_stream[first : first + 2]
            return normed * kept + branch * added
        scale = self.config.residual_multiplier
        return x + (branch if scale == 1 else branch * jnp.asarray(scale, branch.dtype))

    def _end(self, x, streams, inputs):
        further = None if inputs is None else lambda x: self.layer_input(x, inputs)
        if streams is not None:
            x = self.altup.corrected(streams, x, further)
        elif further is not None:
            x = x + further(x)
        return x * self.scalar[...].astype(x.dtype)[None, None] if self.config.scalar else x
