"""The experts of a target that a step reads.

Shapes: `X` experts in a layer, `k` experts per token, `M` tokens of a pass.
"""

import dataclasses
import math
import re
from collections.abc import Sequence
from typing import Any

import jax

from specjax.kernels.grouped_dot.loop import SCOPE
from specjax.models.experts import ExpertsConfig
from specjax.models.own_experts import SCOPE as TURNS
from specjax.plan.held import chip_bytes
from specjax.plan.hlo import Buffer, Kernel, Op, Rounds


@dataclasses.dataclass(frozen=True)
class Chosen:
    """The experts of a chip, and the part of them that a pass reads.

    Attributes:
      count: X.
      each: k.
      layers: the number of layers with experts.
      bytes: the bytes of all experts on one chip.
      rows: the rows of one chip.
      nodes: the nodes that the target reads per step and row.
      capacity: how many experts a block of tokens chooses together; 0: tokens choose by themselves.
      block_size: the tokens of such a block.
    """

    count: int
    each: int
    layers: int
    bytes: int
    rows: int
    nodes: int
    capacity: int = 0
    block_size: int = 0

    def touched(self, nodes: int) -> float:
        """The number of a layer's experts that a pass over `nodes` of each row reads; see `touched`."""
        if not self.capacity:
            return touched(self.count, self.each, self.rows * nodes)
        within = touched(self.capacity, self.each, min(nodes, self.block_size))
        return touched(self.count, within, self.rows * math.ceil(nodes / self.block_size))

    def read(self, nodes: int) -> int:
        """The bytes of these experts, on one chip and in all layers."""
        return round(self.bytes * self.touched(nodes) / self.count)


def touched(count: int, each: float, tokens: int) -> float:
    """The mean number of X experts that M tokens touch if they choose uniformly and independently.

    One token misses an expert with probability `1 - k / X`, and M tokens with the M-th power of that. This is a high
    estimate: among independent choices, uniform ones touch the most experts, and the tokens of a text agree more often
    than by chance.

    >>> round(touched(128, 8, 1), 1), round(touched(128, 8, 16), 1)
    (8.0, 82.4)
    """
    return count * (1 - (1 - each / count) ** tokens)


def chosen(config: ExpertsConfig | None, params: Any, rows: int, nodes: int) -> Chosen | None:
    """The experts of a target, or None if it has none.

    Args:
      config: the target's config, as in its model.
      params: the target's, `ShapeDtypeStruct`s with shardings.
      rows: the rows of one chip.
      nodes: the nodes that the target reads per step and row.
    """
    if config is None:
        return None
    keys = lambda path: [getattr(part, "key", getattr(part, "idx", None)) for part in path]
    leaves = [(keys(path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(params)]
    own = [(path[: path.index("experts")], leaf) for path, leaf in leaves if "experts" in path]
    layers = len({tuple(path) for path, _ in own})
    size = chip_bytes([leaf for _, leaf in own])
    return Chosen(config.num_experts, config.main, layers, size, rows, nodes, config.capacity, config.block_size)


_DRAFT = re.compile(r"\bdraft\b")
"""The scope of a step's drafts, in the source of an operation."""


def drafting(drafter: Any, own: Chosen | None) -> Chosen | None:
    """The experts of a drafter that is the target with fewer of them, in one of its passes; None for any other.

    A pass of a chain reads one node of a row. Of a tree, no pass reads more than its nodes, which are counted for each.

    Args:
      drafter: bound to the target.
      own: the target's.
    """
    few = getattr(getattr(getattr(drafter, "target", None), "config", None), "experts", None)
    if own is None or few is None or few.main >= own.each:
        return None
    chain = drafter.depth == drafter.nodes - 1
    return dataclasses.replace(own, each=few.main, nodes=1 if chain else drafter.nodes)


def _share(own: Chosen, drafts: Chosen | None, op: Op) -> float:
    """The share of a chip's experts that an operation reads."""
    one = drafts if drafts is not None and _DRAFT.search(op.source) else own
    return one.touched(one.nodes) / one.count


def grouped(own: Chosen, kernel: Kernel, drafts: Chosen | None = None) -> Kernel:
    """A traffic function in which grouped products read only the matrices of touched experts; `kernel` handles other
    calls. `drafts` is that of `drafting`.

    The grouped product of the TPU's compiler, and `specjax.kernels.grouped_dot` on a GPU, go through tiles of tokens
    sorted by expert. They visit no expert without tokens.
    """

    def read(op: Op, operands: Sequence[tuple[Buffer, ...]]) -> tuple[int, int, int] | None:
        ours = op.source.endswith("grouped_dot/pallas_call")
        if not ours and not op.name.startswith("ragged-dot-"):
            return kernel(op, operands)
        given = [buffer for value in operands for buffer in value]
        most = max(given, key=lambda buffer: math.prod(buffer.dims))
        rest = sum(buffer.hbm for buffer in given if buffer is not most)
        share = _share(own, drafts, op)
        whole = len(most.dims) < 3  # the call that finds where groups begin has no matrices
        # of all tokens, those of this chip's experts; the compiler counts its own products itself
        flops = 2 * given[0].dims[0] * math.prod(most.dims) // own.count if ours else 0
        return rest + (most.hbm if whole else round(share * most.hbm)), sum(buffer.hbm for buffer in op.value), flops

    return read


def rounds(own: Chosen, drafts: Chosen | None = None) -> Rounds:
    """A function of how often a loop over rows runs; `drafts` is that of `drafting`.

    The loop of `specjax.kernels.grouped_dot.loop` runs once per touched expert of the chip. That of
    `specjax.models.own_experts` has room for twice a chip's even share of the rows, and runs once."""

    def count(op: Op) -> int | None:
        if op.source.endswith(f"{TURNS}/while"):
            return 1
        held = [buffer.dims[0] for buffer in op.value if len(buffer.dims) == 3]
        return math.ceil(_share(own, drafts, op) * max(held)) if f"{SCOPE}/while" in op.source and held else None

    return count
