"""The division of every row's cache among a GPU's programs, and the merging of their results.

With few queries, rows and kv-heads are too few to fill a GPU, so the used part of every row's cache is split as well
(Flash-Decoding, Dao et al. 2023, https://crfm.stanford.edu/2023/10/12/flashdecoding.html). The block's own keys are one
more part. Each part yields its peak, its total and its weighted sum, which are merged by their log-sum-exps.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from specjax.kernels.tree_attention.parts import Found, Operands

PROGRAMS = 264
"""The desired number of programs: two for each of an H100's multiprocessors."""
SPLIT = 2, 16
"""The fewest slots of capacity that justify a part, per query of a program, since every query writes a sum for each
part. The first number is for parts that fill the GPU, the second for parts that only even out rows of different
lengths."""
FEWEST = 16
"""The fewest queries of a program."""


@dataclasses.dataclass(frozen=True)
class Shares:
    """The division among programs: each reads one tile of a kv-head's queries and one part of a row.

    Attributes:
      tile: queries of a program.
      tiles: the number of tiles of a kv-head.
      parts: the number of parts of a row's cache; the block's own keys are one more.
      block: cache slots read at a time.
    """

    tile: int
    tiles: int
    parts: int
    block: int

    @property
    def programs(self) -> int:
        """The number of programs of a row and kv-head; a program's number is `part * tiles + tile`."""
        return (self.parts + 1) * self.tiles


def shares(operands: Operands, block: int, largest: int) -> Shares:
    """The division for blocks of `block` slots and at most `largest` queries per program."""
    batch, heads, rows, _ = operands.queries.shape
    tile = min(max(pl.next_power_of_2(rows), FEWEST), largest)
    tiles = pl.cdiv(rows, tile)
    return Shares(tile, tiles, splits(batch, heads, tiles, tile, operands.cache_key.shape[2], block), block)


def splits(batch: int, heads: int, tiles: int, tile: int, capacity: int, block: int) -> int:
    """The number of parts in which a row's cache is read, by shapes only.

    There are as many as fill the GPU with the whole batch. There may be more, if parts stay large enough, up to as many
    as fill it with a single row, since the others may be short.
    """
    filling, evening = (max(block, fewest * tile) for fewest in SPLIT)
    full = min(PROGRAMS // (batch * heads * tiles), pl.cdiv(capacity, filling))
    even = min(PROGRAMS // (heads * tiles), capacity // evening)
    return max(1, full, even)


def ranges(operands: Operands, shares: Shares, window: int | None) -> jax.Array:
    """`[B, 3]` int32: the slot where a row's first part starts, the slots of a part, and the slot where the row ends."""
    used = jnp.minimum(operands.length, operands.cache_key.shape[2])
    first = jnp.zeros_like(used)
    if window is not None and operands.cache_positions is None:
        first = jnp.maximum(jnp.min(operands.query_positions, axis=1) - window + 1, 0) // shares.block * shares.block
    blocks = pl.cdiv(jnp.maximum(used - first, 0), shares.block)
    return jnp.stack([first, pl.cdiv(blocks, shares.parts) * shares.block, used], axis=1)


def together(peak: jax.Array, total: jax.Array, sums: jax.Array) -> Found:
    """The merged result of parts, from their peaks and totals `[B, K, parts, M, 1]` and their sums
    `[B, K, parts, M, H]`."""
    top = jnp.max(peak, axis=2)
    worth = jnp.exp(peak - top[:, :, None])
    return Found(top, jnp.sum(total * worth, axis=2), jnp.sum(sums * worth, axis=2))
