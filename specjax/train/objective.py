"""What is trained: batches of text, and the objective that a drafter's parameters are fitted to.

In the shape descriptions `B` denotes rows, `T` tokens a row, `V` the vocabulary.
"""

import abc
import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from specjax.lm import LM, Block, Output, Wants

Array = jax.Array
PyTree = Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Batch:
    """Rows of text, padded on the right.

    Attributes:
      tokens: `[B, T]` int32; 0 where a row is padded.
      mask: `[B, T]` bool, which tokens are real and to be predicted: not padding, not the prompt.
    """

    tokens: Array
    mask: Array


class Objective(abc.ABC):
    """Parameters and the loss they are fitted to. Implementations are frozen dataclasses: static and hashable."""

    saved: ClassVar[tuple[str, ...]] = ()
    """Fields of `method` that parameters depend on, written beside them and read back with them."""

    @property
    def method(self) -> Any:
        """The drafter or unmask policy that is trained."""
        return getattr(self, "drafter", None)

    @property
    def fields(self) -> dict[str, Any]:
        """Those of `saved`, as JSON has them."""
        found = {name: getattr(self.method, name) for name in self.saved}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in found.items()}

    def export(self, params: PyTree) -> PyTree:
        """Trained parameters as the drafter reads them."""
        return params

    @abc.abstractmethod
    def init(self, key: Array, target_params: PyTree) -> PyTree:
        """Parameters before training."""

    @abc.abstractmethod
    def loss(self, params: PyTree, target_params: PyTree, batch: Batch, key: Array) -> tuple[Array, dict[str, Array]]:
        """The mean loss of a batch, differentiated in `params` alone.

        Returns:
          A scalar, and scalar metrics by name: `acceptance` is what progress shows, and `weight` is over how much the
          scalar is a mean (left out: over `mask[:, 1:]`). Losses and metrics of several batches are averaged by it.
        """


def read(lm: LM, params: PyTree, tokens: Array, wants: Wants) -> Output:
    """One causal pass over whole rows, without a cache.

    Args:
      lm: the model.
      params: its parameters.
      tokens: `[B, T]` int32. The logits of slot t score token t + 1.
      wants: what to return.
    """
    return lm(params, whole(tokens), None, wants=wants)


def whole(tokens: Array, visible: Array | None = None) -> Block:
    """Rows from position 0 on, without a prefix.

    Args:
      tokens: `[B, T]` int32.
      visible: see `Block`; None is causal.
    """
    batch, length = tokens.shape
    positions = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32)[None], (batch, length))
    return Block(tokens, positions, jnp.zeros((batch,), jnp.int32), visible)
