"""The contract of a cache policy: which positions of the canvas a forward pass recomputes.

The keys and values of the other positions come from the last pass that computed them, when other tokens may have been
known. Every cache of a model that sees all of the canvas is this approximation (Fast-dLLM, arXiv:2505.22618, section 3.2).
"""

import abc
import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from specjax.about import Named
from specjax.arrays import Array, Bool, Int


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Canvas:
    """The part of a canvas's state that a cache policy may read. `L` denotes the canvas.

    Attributes:
      masked: `[B, L]` bool, the open positions below each row's limit.
      fresh: `[B, L]` bool, the positions that the last step committed.
      inside: `[B, L]` bool, the active block.
      prompt_length: `[B]` int32, where the first block begins.
      start: `[B]` int32, where the active block begins.
      width: of a block; the last one of a row may be shorter.
      step: `[B]` int32, forward passes over the active block before this one.
      passes: `[B]` int32, forward passes before this one.
      reach: `[B]` int32, the end of the positions that this pass may commit.
      plan: `[B, L]` int32, the order of this pass's commits: 0 for the first, L for positions that it will not commit;
        None if predictions decide.
    """

    masked: Bool[Array, "B L"]
    fresh: Bool[Array, "B L"]
    inside: Bool[Array, "B L"]
    prompt_length: Int[Array, " B"]
    start: Int[Array, " B"]
    step: Int[Array, " B"]
    passes: Int[Array, " B"]
    reach: Int[Array, " B"]
    width: int = dataclasses.field(metadata={"static": True})
    plan: Int[Array, "B L"] | None = None

    @property
    def at(self) -> Array:
        """`[1, L]` int32, the positions."""
        return jnp.arange(self.masked.shape[1], dtype=jnp.int32)[None]


class Cache(abc.ABC):
    """Chooses what to recompute. Implementations are frozen dataclasses.

    Whatever the choice, a row's first pass computes everything, and every pass computes the positions whose logits are
    read.
    """

    about: ClassVar[Named] = None
    """Its names in the registry."""

    @property
    def keeps(self) -> bool:
        """Whether anything is ever reused; if not, no keys and values are stored."""
        return True

    @property
    def seeds(self) -> bool:
        """Whether, for a model with shifted logits, the pass that enters a block commits only its first token."""
        return False

    @property
    def steady(self) -> bool:
        """Whether the pass that enters a block computes everything, and later ones always the same positions."""
        return False

    @property
    def chooses(self) -> float:
        """The share of the new text that each layer recomputes in addition: the positions whose values moved most."""
        return 0.0

    def groups(self, canvas: Canvas) -> Array | None:
        """The group of each position, `[B, L]` int32: a position sees those of its own group and of lower ones. None:
        all see all.

        A pass then recomputes whole groups, and with a group all later ones that it recomputes.
        """
        return None

    def most(self, width: int, size: int) -> int:
        """How many positions a partial pass computes at most, for a block and its neighbour of `width`, and a canvas of
        `size`.
        """
        return size

    @abc.abstractmethod
    def active(self, canvas: Canvas) -> Array:
        """The positions to recompute, `[B, L]` bool."""


def every(canvas: Canvas, when: Array) -> Array:
    """All positions of the rows `when` `[B]` and none of the others, `[B, L]` bool."""
    return jnp.broadcast_to(when[:, None], canvas.masked.shape)


def widths(block: int, capacity: int, growth: int = 2) -> tuple[int, ...]:
    """Static sizes of a pass: the block and its neighbour, and repeatedly `growth` times that, up to the canvas; with
    growth 0 none.
    """
    sizes, size = [], block + 1
    while growth and size < capacity:
        sizes.append(size)
        size = growth * size
    return tuple(sizes)


def positions_of(active: Array, width: int) -> Array:
    """The first `width` active positions `[B, width]` int32; L where there are no more."""
    size = active.shape[1]
    at = jnp.where(active, jnp.arange(size, dtype=jnp.int32)[None], size)
    return jnp.sort(at, axis=1)[:, :width]
