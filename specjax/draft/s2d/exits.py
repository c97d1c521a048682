"""Passes through a model's segments, the layers between its exits, over slots of which some wait at an exit.

In the shape descriptions `S` denotes the slots so far, `F` the new ones, `R` the width of the residual stream.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from specjax.lm import LM, Block

Array = jax.Array
PyTree = Any


def usual_exits(layers: int) -> tuple[int, ...]:
    """Half of the layers, three quarters and all: 6, 9 and 12 of 12, as published."""
    return tuple(sorted({max(layers // 2, 1), max(layers * 3 // 4, 1), layers}))


def check_exits(exits: Sequence[int], layers: int) -> None:
    """Raises ValueError unless the exits of a model of so many layers ascend and end with all of them."""
    if list(exits) != sorted({*exits}) or not exits or exits[0] < 1 or exits[-1] != layers:
        raise ValueError(
            f"s2d: exits must ascend from 1 on and end with all {layers} layers of the draft model, got {tuple(exits)}"
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Slots:
    """Tokens that are not in the cache, and how deep they are.

    Attributes:
      tokens: `[B, S]` int32.
      positions: `[B, S]` int32.
      length: `[B]` int32, tokens in the cache, which all slots see.
      visible: `[B, S, S]` bool, which slots each sees.
      h: for every inner exit that was reached the residual stream there, `[B, S, R]`; zeros for slots that wait above.
      deltas: for every segment what it computed for the cache, `[B, S, ...]`.
      passed: for every segment but the first, whether all slots have passed it, a scalar bool.
    """

    tokens: Array
    positions: Array
    length: Array
    visible: Array
    h: tuple[Array, ...]
    deltas: tuple[PyTree, ...]
    passed: tuple[Array, ...] = ()

    @property
    def count(self) -> int:
        """S."""
        return self.tokens.shape[1]

    def block(self, first: int = 0) -> Block:
        """The input of a pass over the slots from `first` on, all of which see only slots of `past` and of the block."""
        cut = lambda x: x[:, first:]
        return Block(cut(self.tokens), cut(self.positions), self.length, cut(self.visible))


@dataclasses.dataclass(frozen=True)
class Exits:
    """A model with exits, in one step.

    Attributes:
      lm: the model.
      params: its parameters.
      cache: what all layers have read.
      exits: layer counts.
      thresholds: of all exits but the last.
      live: `[B]` bool, rows for which deeper layers are worth running.
    """

    lm: LM
    params: PyTree
    cache: PyTree
    exits: tuple[int, ...]
    thresholds: tuple[float, ...]
    live: Any

    def entered(self, block: Block, past: PyTree) -> tuple[Array, PyTree]:
        """The residual stream `[B, T, R]` of a block after the first segment, and its delta there."""
        h = self.lm.embed(self.params, block.tokens)
        return self.lm.layers(self.params, h, 0, self.exits[0], block, self.cache, past)

    def streams(self, block: Block) -> list[Array]:
        """The residual streams `[B, T, R]` at every exit, of a block that passes all layers."""
        h, below = self.entered(block, None)
        found = [h]
        for lo, hi in itertools.pairwise(self.exits):
            h, delta = self.lm.layers(self.params, h, lo, hi, block, self.cache, below=below)
            found, below = [*found, h], self.lm.join(below, delta)
        return found

    def joined(self, deltas: Sequence[PyTree]) -> PyTree:
        """The delta of several segments, from the first on."""
        return functools.reduce(self.lm.join, deltas)

    def more(self, slots: Slots, block: Block) -> Slots:
        """The slots with those of a block `[B, F]` after the first segment; the block sees `visible` `[B, F, S + F]`."""
        h, delta = self.entered(block, slots.deltas[0])
        new = block.tokens.shape[1]
        return dataclasses.replace(
            slots,
            tokens=_stacked(slots.tokens, block.tokens),
            positions=_stacked(slots.positions, block.positions),
            visible=_stacked(jnp.pad(slots.visible, ((0, 0), (0, 0), (0, new))), block.visible),
            h=(_stacked(slots.h[0], h), *slots.h[1:]),
            deltas=(_stacked(slots.deltas[0], delta), *slots.deltas[1:]),
        )

    def deepened(
        self,
        slots: Slots,
        pick: Callable[[Array], Array],
        new: int | None = None,
        *,
        shown: Array | None = None,
        must: Array | bool = False,
    ) -> tuple[Slots, Array]:
        """New slots through as many segments as they need, and the logits `[B, F, V]` of those that are picked.

        Args:
          slots: of which the last `new` have passed only the first segment.
          pick: from features of all slots, or of the new ones alone, to those of the F that are to be read.
          new: how many are new; None: all of them.
          shown: `[B, F]` bool, the slots whose probabilities count; None: all of them.
          must: scalar bool, whether all segments are to run.
        """
        logits = self.head(pick(slots.h[0]))
        sure = ~self.live
        for segment, threshold in enumerate(self.thresholds, 1):
            sure |= self._is_sure(logits, shown, threshold)
            needed = jnp.any(~sure) | must
            slots, logits = self._through(segment, slots, logits, sure, needed, pick, new)
        return slots, logits

    def head(self, h: Array) -> Array:
        """The logits `[B, F, V]` of residual streams `[B, F, R]`."""
        return self.lm.unembed(self.params, self.lm.norm(self.params, h))

    def _is_sure(self, logits: Array, shown: Array | None, threshold: float) -> Array:
        """Rows `[B]` whose largest probability is above the threshold."""
        largest = jnp.exp(logits.max(axis=2) - jax.nn.logsumexp(logits, axis=2))
        return jnp.any((largest > threshold) & (True if shown is None else shown), axis=1)

    def _through(
        self, segment: int, slots: Slots, logits: Array, sure: Array, needed: Array, pick: Any, new: int | None
    ) -> tuple[Slots, Array]:
        """The slots through one segment if that is `needed`, and the logits after it in rows that are not `sure`.

        The new slots pass it alone if all others have, and all of them together otherwise.
        """
        old = 0 if new is None else slots.count - new
        lo, hi = self.exits[segment - 1 : segment + 1]

        def run(first: int) -> tuple[Array, PyTree]:
            cut = lambda part: jax.tree.map(lambda x: x[:, first:], part)
            past = None
            if first:
                past = self.joined([jax.tree.map(lambda x: x[:, :first], x) for x in slots.deltas[: segment + 1]])
            return self.lm.layers(
                self.params, cut(slots.h[segment - 1]), lo, hi, slots.block(first), self.cache, past,
                below=cut(self.joined(slots.deltas[:segment])),
            )  # fmt: skip

        def passed(first: int):
            h, delta = run(first)
            more = jnp.where(sure[:, None, None], logits, self.head(pick(h)))
            whole = (h, delta) if not first else kept(h, delta)
            return *whole, more

        def kept(h: Array, delta: PyTree) -> tuple[Array, PyTree]:
            """With what slots before had; the last segment's streams are not kept."""
            before = slots.h[segment] if segment < len(slots.h) else jnp.zeros((len(h), old, h.shape[2]), h.dtype)
            return _stacked(before, h), _stacked(slots.deltas[segment], delta)

        def waiting():
            h, delta = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(lambda: run(old)))
            return *(kept(h, delta) if old else (h, delta)), logits

        ways = [waiting, lambda: passed(old)]
        way = needed.astype(jnp.int32)
        if old:
            ways.append(lambda: passed(0))
            way = jnp.where(needed & ~slots.passed[segment - 1], 2, way)
        h, delta, logits = jax.lax.switch(way, ways)
        put = lambda parts, at, x: (*parts[:at], x, *parts[at + 1 :])
        return dataclasses.replace(
            slots,
            h=slots.h if segment == len(self.exits) - 1 else put(slots.h, segment, h),
            deltas=put(slots.deltas, segment, delta),
            passed=put(slots.passed, segment - 1, needed),
        ), logits


def _stacked(before: PyTree, after: PyTree) -> PyTree:
    """Slots after others."""
    return jax.tree.map(lambda a, b: jnp.concatenate([a, b.astype(a.dtype)], axis=1), before, after)
