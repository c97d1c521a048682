"""Numbers that attention adds to scores by the distance between query and key (T5, Raffel et al. 2020, arXiv:1910.10683,
section 2.1).

Shapes: `N` heads, `R` the longest distance that is told from longer ones.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class DistancesConfig:
    """A table that all attention layers of a stack share. Names follow Hugging Face's `config.json`.

    Attributes:
      heads: N.
      num_buckets: how many numbers a head has. Half of the buckets of a direction hold one distance each; the others hold
        ranges that grow with the distance.
      max_distance: R; all longer distances share the last bucket.
      both_ways: whether later keys have half of the buckets, as in an encoder.
    """

    heads: int
    num_buckets: int = 32
    max_distance: int = 128
    both_ways: bool = False

    def build(self, dtype: Any) -> "Distances":
        """The module."""
        return Distances(self, dtype)

    def buckets(self, away: np.ndarray) -> np.ndarray:
        """The bucket of each distance, the key's position less the query's.

        >>> DistancesConfig(1).buckets(np.array([3, 0, -1, -15, -17, -20, -64, -500])).tolist()
        [0, 0, 1, 15, 16, 17, 26, 31]
        """
        count = self.num_buckets // 2 if self.both_ways else self.num_buckets
        first = count * (away > 0) if self.both_ways else 0
        far = np.abs(away) if self.both_ways else np.maximum(-away, 0)
        exact = count // 2
        growth = np.log(np.maximum(far, 1).astype(np.float32) / np.float32(exact)) / np.float32(
            math.log(self.max_distance / exact)
        )
        ranged = exact + (growth * np.float32(count - exact)).astype(np.int64)
        return first + np.where(far < exact, far, np.minimum(ranged, count - 1))


class Distances(nnx.Module):
    """See `DistancesConfig`."""

    def __init__(self, config: DistancesConfig, dtype: Any):
        self.table = nnx.Param(jnp.zeros((config.num_buckets, config.heads), dtype))
        self.config = config

    def __call__(self) -> Array:
        """`[N, 2 R + 1]` float32, what `tree_attention` takes."""
        reach = self.config.max_distance
        buckets = self.config.buckets(np.arange(-reach, reach + 1))
        return self.table[...].astype(jnp.float32)[jnp.asarray(buckets, jnp.int32)].T
