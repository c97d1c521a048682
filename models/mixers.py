"""The contract of a token mixer: the part of a layer in which tokens read each other.

Attention (`specjax.models.attention`) is a mixer that keeps one slot per token; `specjax.models.kv` reads and writes
the slots of all layers at once. A mixer with a running state keeps a state whose size does not grow with the text.

Shapes: `B` rows, `T` block tokens, `P` uncommitted tokens before a block, `M` tokens of a path, `E` width.
"""

import abc
import dataclasses
from collections.abc import Hashable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from specjax.lm import Block
from specjax.models.kept import Kept

Array = jax.Array


class Mixer(nnx.Module):
    """The module of a mixer; `MixerConfig.build` makes it."""

    @abc.abstractmethod
    def __call__(
        self, x: Array, tables: Any, block: Block, cache: Any, past: Any, positions: Array, shared: Any = None
    ) -> tuple[Array, Any]:
        """A block's outputs and its delta. The cache is read and never written.

        A token reads only the committed text and its own ancestors in `past` and the block. So rejected tokens leave no
        trace.

        Args:
          x: `[B, T, E]`, the normed residual stream.
          tables: from `MixerConfig.tables`.
          block: `visible` `[B, T, P + T]` says which tokens a token reads; None: those before it, and itself.
          cache: this layer's cache of the committed text; None: nothing is committed.
          past: this layer's deltas of the P uncommitted tokens before the block, or None.
          positions: `[B, P + T]` int32, of `past` and block.
          shared: the block's delta from the layer whose keys and values this one reads, if it has none itself.

        Returns:
          `[B, T, E]`, and the delta: a pytree whose leaves lead with `[B, T]`, from which a path can be replayed.
        """

    def split_products(self) -> tuple[Any, ...]:
        """The products whose inputs a mesh splits over `model`, so that their parts are summed over it."""
        return ()


@dataclasses.dataclass(frozen=True)
class MixerConfig(abc.ABC):
    """The description of a mixer, a frozen dataclass."""

    name: ClassVar[str]
    """The name of the module within a layer, and so of its parameters."""

    @abc.abstractmethod
    def build(self, width: int, dtype: Any, rngs: nnx.Rngs, kernel: Any = None) -> Mixer:
        """The module.

        Args:
          width: E.
          dtype: of its parameters.
          rngs: keys.
          kernel: the way to compute attention, see `specjax.kernels.tree_attention`.
        """

    @property
    def parts(self) -> tuple["MixerConfig", ...]:
        """The mixers that it is made of: itself or, side by side, others (`specjax.models.both`)."""
        return (self,)

    def given(self, kept: Kept) -> Any:
        """What its module reads as `cache`, `past` or `shared`, of what its layer keeps."""
        return kept.slots

    def kept(self, delta: Any) -> Kept:
        """What its layer keeps of its module's delta; the inverse of `given`."""
        return Kept(slots=delta)

    @property
    def reads(self) -> Hashable:
        """The values on which its tables depend. Layers with one kind of mixer and equal values share tables."""
        return ()

    def tables(self, positions: Array, longest: int) -> Any:
        """The tables that its layers compute from positions `[B, T]` once per pass, in a model for texts of up to
        `longest` tokens."""
        return None


@dataclasses.dataclass(frozen=True)
class SlotSizes:
    """What a mixer keeps of a token: one slot of a cache.

    Attributes:
      heads: K, the number of keys.
      key: H, their width.
      value: the width of values; 0: values are made of the keys, and there are none beside them.
      parts: in how many equal parts a key's channels have scales of their own in a cache of eight bits.
    """

    heads: int
    key: int
    value: int
    parts: int = 1


@dataclasses.dataclass(frozen=True)
class SlotMixerConfig(MixerConfig):
    """A mixer that keeps one slot per token, in the cache of all layers (`specjax.models.kv`).

    Its fields `num_attention_heads` and `num_key_value_heads` say how a mesh splits its queries and its slots.
    """

    num_attention_heads: int
    num_key_value_heads: int

    @property
    @abc.abstractmethod
    def slots(self) -> SlotSizes:
        """What it keeps."""

    def turned(self, module: str) -> tuple[int, int, int] | None:
        """The rows of a module's matrix that its rope turns: how many come before them in every head, how many they are, and
        all rows of a head. None: it turns none.

        `module` is the name in a file of Llama's layout, without its layer: `q_proj`."""
        return None


@dataclasses.dataclass(frozen=True)
class StateMixerConfig(MixerConfig):
    """A mixer that keeps a running state of a text; an update overwrites the earlier state.

    So a commit must say how many of its tokens are real, and a row that goes back needs a state that was kept
    (`specjax.lm.LM.states`). A caller that writes slots again is refused (`committed`).
    """

    called: ClassVar[str] = "a running state"
    """What such layers are, for readers."""

    def given(self, kept: Kept) -> Any:
        return kept.state

    def kept(self, delta: Any) -> Kept:
        return Kept(state=delta)

    @abc.abstractmethod
    def init(self, width: int, batch: int, dtype: Any) -> Any:
        """The states of empty texts: a pytree whose leaves lead with `[B]`.

        `dtype` is the cache's type. A mixer may ignore it: sums over many tokens are float32."""

    @abc.abstractmethod
    def commit(self, state: Any, delta: Any, count: Array) -> Any:
        """The states after a path.

        Args:
          state: from `init`.
          delta: the delta of the path's tokens in order, leaves `[B, M, ...]`.
          count: `[B]` int32, how many of a row's tokens are real; a row without any keeps its state bit for bit.
        """

    def path(self, delta: Any, src: Array) -> Any:
        """The delta of a path's tokens in order, leaves `[B, M, ...]`, from a block's and their indices `src` `[B, M]`."""
        at = lambda x: src.reshape(*src.shape, *[1] * (x.ndim - 2))
        return jax.tree.map(lambda x: jnp.take_along_axis(x, at(x), axis=1), delta)

    @property
    def heads(self) -> int:
        """The number of parts into which its axes `state_heads` can be split; 0 if it has none."""
        return 0

    def axes(self, state: Any) -> Any:
        """Logical axis names of every leaf of a state; only rows are split."""
        return jax.tree.map(lambda leaf: ("batch",) + (None,) * (leaf.ndim - 1), state)


def committed(
    mixer: StateMixerConfig, state: Any, delta: Any, src: Array | None, dst: Array, counts: Array | None
) -> Any:
    """A layer's states after a commit; see `specjax.lm.LM.commit`.

    Raises:
      ValueError: if slots are given, or if the number of real tokens is not.
    """
    if counts is None or dst.ndim != 1:
        raise ValueError(
            f"a text cannot be written again in layers with {mixer.called}: this commit names slots, or does not say how many "
            "of its tokens are real (`counts`)"
        )
    return mixer.commit(state, delta if src is None else mixer.path(delta, src), counts)
