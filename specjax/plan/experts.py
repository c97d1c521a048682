"""Which of a target's experts a step reads.

Shapes: `X` experts in a layer, `k` that a token chooses, `M` tokens of a pass.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax

from specjax.kernels.grouped_dot.loop import SCOPE
from specjax.models.experts import ExpertsConfig
from specjax.plan.held import chip_bytes
from specjax.plan.hlo import Buffer, Kernel, Op, Rounds


@dataclasses.dataclass(frozen=True)
class Chosen:
    """The experts of a chip, and what a pass of so many nodes reads of them.

    Attributes:
      count: X.
      each: k.
      layers: how many layers have them.
      bytes: of all of them, of one chip.
      rows: of one chip.
      nodes: that the target reads in a step and row.
    """

    count: int
    each: int
    layers: int
    bytes: int
    rows: int
    nodes: int

    def touched(self, nodes: int) -> float:
        """How many of a layer's experts a pass over `nodes` of each row reads; see `touched`."""
        return touched(self.count, self.each, self.rows * nodes)

    def read(self, nodes: int) -> int:
        """Their bytes, of one chip and all layers."""
        return round(self.bytes * self.touched(nodes) / self.count)


def touched(count: int, each: int, tokens: int) -> float:
    """How many of X experts M tokens touch in the mean, if they choose evenly and without regard to each other.

    One token leaves an expert out with probability `1 - k / X`, and all of them with that to the power of M. It is a high
    estimate: among tokens that choose without regard to each other those that choose evenly touch most, and the tokens of a
    text agree more often than by chance.

    >>> round(touched(128, 8, 1), 1), round(touched(128, 8, 16), 1)
    (8.0, 82.4)
    """
    return count * (1 - (1 - each / count) ** tokens)


def chosen(config: ExpertsConfig | None, params: Any, rows: int, nodes: int) -> Chosen | None:
    """The experts of a target, or None where it has none.

    Args:
      config: of the target, as its model has it.
      params: the target's, `ShapeDtypeStruct`s with shardings.
      rows: of one chip.
      nodes: that the target reads in a step and row.
    """
    if config is None:
        return None
    keys = lambda path: [getattr(part, "key", getattr(part, "idx", None)) for part in path]
    leaves = [(keys(path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(params)]
    own = [(path[: path.index("experts")], leaf) for path, leaf in leaves if "experts" in path]
    layers = len({tuple(path) for path, _ in own})
    size = chip_bytes([leaf for _, leaf in own])
    return Chosen(config.num_experts, config.num_experts_per_tok, layers, size, rows, nodes)


def grouped(own: Chosen, kernel: Kernel) -> Kernel:
    """Says of grouped products that they read the matrices of touched experts, and asks `kernel` of other calls.

    That of the TPU's compiler, and `specjax.kernels.grouped_dot` on a GPU, go from tile to tile of tokens sorted by expert,
    and visit no expert that has none.
    """
    share = own.touched(own.nodes) / own.count

    def read(op: Op, operands: Sequence[tuple[Buffer, ...]]) -> tuple[int, int, int] | None:
        ours = op.source.endswith("grouped_dot/pallas_call")
        if not ours and not op.name.startswith("ragged-dot-"):
            return kernel(op, operands)
        given = [buffer for value in operands for buffer in value]
        most = max(given, key=lambda buffer: math.prod(buffer.dims))
        rest = sum(buffer.hbm for buffer in given if buffer is not most)
        whole = len(most.dims) < 3  # the call that looks where groups begin has no matrices
        # of all tokens, those of the experts that lie here; the compiler counts its own products itself
        flops = 2 * given[0].dims[0] * math.prod(most.dims) // own.count if ours else 0
        return rest + (most.hbm if whole else round(share * most.hbm)), sum(buffer.hbm for buffer in op.value), flops

    return read


def rounds(own: Chosen) -> Rounds:
    """Says that the loop of `specjax.kernels.grouped_dot.loop` runs once for each touched expert of the chip."""
    share = own.touched(own.nodes) / own.count

    def count(op: Op) -> int | None:
        held = [buffer.dims[0] for buffer in op.value if len(buffer.dims) == 3]
        return math.ceil(share * max(held)) if f"{SCOPE}/while" in op.source and held else None

    return count
