"""The state that a masked-diffusion decoder carries from step to step, and the record of a step.

In the shape descriptions `B` denotes rows, `L` the canvas, `W` the block length.
"""

import dataclasses

import jax

from specjax.arrays import Array, Bool, Int, PyTree
from specjax.diffusion.unmask.base import Choice
from specjax.pretty import Pretty
from specjax.state import Rows


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DiffusionState(Rows):
    """The rows of a diffusion decoder.

    `tokens` is the canvas, with the mask id at open positions below `limit`; `length` is how many tokens are known
    before the first open one. Blocks begin at `prompt_length`; the active block is the one at `reached`.

    Attributes:
      reached: `[B]` int32, how many tokens are known before the first open one; if commits may be taken back, only as
        far as blocks are finished. The active block is there. Equal to `length`, unless tokens of finished blocks may
        still change.
      step: `[B]` int32, passes over the active block so far.
      entry: `[B]` int32, how many open positions it had when it began.
      memory: the unmask policy's, for the active block; if the policy is `lasting`, for the row.
      opened: `[B, L]` bool, the positions outside the prompt's tokens, which were open at first.
      fresh: `[B, L]` bool, the positions that the last step committed.
      cache: keys and values of every position, as they were last computed; None without a cache.
    """

    reached: Int[Array, " B"]
    step: Int[Array, " B"]
    entry: Int[Array, " B"]
    memory: PyTree
    opened: Bool[Array, "B L"]
    fresh: Bool[Array, "B L"]
    cache: PyTree


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DiffusionInfo(Pretty):
    """The record of one step; the next step does not need it.

    Attributes:
      start: `[B]` int32, the active block's first position.
      committed: `[B, W]` bool, which of its positions were committed.
      choice: the policy's.
    """

    start: Int[Array, " B"]
    committed: Bool[Array, "B W"]
    choice: Choice
