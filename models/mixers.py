"""The contract of a token mixer: the part of a layer in which tokens read each other.

Attention is one (`specjax.models.attention`): what it keeps of a text are slots, one for each token, which `specjax.models.kv`
reads and writes for all layers at once. A mixer with a running state keeps as much of a long text as of a short one.
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

Array = jax.Array


class Mixer(nnx.Module):
    """The module of a mixer; `MixerConfig.build` makes it."""

    @abc.abstractmethod
    def __call__(
        self, x: Array, tables: Any, block: Block, cache: Any, past: Any, positions: Array, shared: Any = None
    ) -> tuple[Array, Any]:
        """A block's outputs, and what it adds to the cache. The cache is read and never written.

        A token reads what is committed and its own ancestors in `past` and in the block, and nothing else: no token that is
        rejected leaves anything.

        Args:
          x: `[B, T, E]`, the normed residual stream.
          tables: what `MixerConfig.tables` made.
          block: `visible` `[B, T, P + T]` says which tokens a token reads; None: those before it, and itself.
          cache: what this layer keeps of the committed text; None: nothing is committed.
          past: this layer's deltas of the P tokens before the block that are not committed, or None.
          positions: `[B, P + T]` int32, of `past` and block.
          shared: the block's delta of the layer whose keys and values this one reads, if it has none of its own.

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
    """What a layer calls the module, and so its parameters."""

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
    def reads(self) -> Hashable:
        """What its tables depend on: layers of one kind of mixer that say the same have one."""
        return ()

    def tables(self, positions: Array, longest: int) -> Any:
        """What its layers compute of positions `[B, T]` once per pass, in a model for texts of up to `longest`
        tokens."""
        return None


@dataclasses.dataclass(frozen=True)
class StateMixerConfig(MixerConfig):
    """A mixer that keeps a running state of a text: it is updated, and what it was before is gone.

    So a commit is told how many of its tokens are real, and only decoding that never goes back can use it: a caller that
    writes slots again is refused (`committed`).
    """

    @abc.abstractmethod
    def init(self, width: int, batch: int, dtype: Any) -> Any:
        """The states of empty texts: a pytree whose leaves lead with `[B]`. `dtype` is that of the cache, which a mixer may
        pass over: sums of many tokens are of float32."""

    @abc.abstractmethod
    def commit(self, state: Any, delta: Any, count: Array) -> Any:
        """The states after a path.

        Args:
          state: from `init`.
          delta: of the path's tokens in order, leaves `[B, M, ...]`.
          count: `[B]` int32, how many of a row's are real; a row of none keeps its state, bit for bit.
        """

    def axes(self, state: Any) -> Any:
        """Logical axis names of every leaf of a state: rows are split, and nothing else."""
        return jax.tree.map(lambda leaf: ("batch",) + (None,) * (leaf.ndim - 1), state)


def committed(
    mixer: StateMixerConfig, state: Any, delta: Any, src: Array | None, dst: Array, counts: Array | None
) -> Any:
    """A layer's states after a commit, see `specjax.lm.LM.commit`.

    Raises:
      ValueError: where slots are named, or nobody says how many tokens are real.
    """
    if counts is None or dst.ndim != 1:
        raise ValueError(
            f"layers of {type(mixer).__name__} keep a running state, and this way of decoding goes back in a text, or does not "
            "say which of its tokens are real: take plain or speculative decoding"
        )
    if src is not None:
        at = lambda x: src.reshape(*src.shape, *[1] * (x.ndim - 2))
        delta = jax.tree.map(lambda x: jnp.take_along_axis(x, at(x), axis=1), delta)
    return mixer.commit(state, delta, counts)
