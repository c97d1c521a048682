"""Which precision each expert of a token is computed in, and the leaf that holds experts in both.

Shapes: `M` tokens, `k` experts per token, `X` experts, `E` inputs, `F` outputs.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from specjax.kernels.grouped_dot import loop
from specjax.models.matrix import Matrix

Array = jax.Array

HIGH, LOW, SKIPPED = range(3)
"""The tiers of an expert."""


@dataclasses.dataclass(frozen=True)
class Tiers:
    """Which of a token's experts are computed in many bits, in few, or not at all.

    An expert's unimportance is the share of the token's gates that experts with larger gates hold, 0 for the best. Up to
    `high` it is computed in many bits, up to `low` in few, and above in none. The paper's own thresholds are not known to us;
    the defaults are ours (`experiments/hobbit` has what they do to a small model).

    The paper asks only where a copy is missing on the device. Here gates alone decide, so that a text depends on no cache, no
    other row and no drafter.

    Attributes:
      high: the first threshold. 1: every expert is in many bits.
      low: the second, at least the first. 1: no expert is skipped. Equal ones: none is in few bits.
      renormalised: whether the weights of the others grow by what a token's skipped experts had. Ours; the paper's rule is
        not known.
    """

    high: float = 0.6
    low: float = 0.95
    renormalised: bool = False

    def of(self, weights: Array) -> Array:
        """The tiers of a token's experts, `[M, k]` int32, from their weights `[M, k]`."""
        u = unimportance(weights)
        return jnp.where(u <= self.high, HIGH, jnp.where(u <= self.low, LOW, SKIPPED)).astype(jnp.int32)

    def grouped(self, weights: Array, experts: Array, count: int) -> tuple[Array, Array]:
        """Weights and groups, `[M, k]` each, of a product with `2 X` groups: experts in many bits, then those in few.

        A skipped expert has the group `2 X`, which is no group, and the weight 0.

        Args:
          weights: `[M, k]` float32.
          experts: `[M, k]` int32.
          count: X.
        """
        tiers = self.of(weights)
        kept = jnp.where(tiers == SKIPPED, 0, weights)
        if self.renormalised:
            left = kept.sum(axis=-1, keepdims=True)  # never 0, unless all weights are: the best expert is kept
            kept = kept * jnp.where(left > 0, weights.sum(axis=-1, keepdims=True) / jnp.where(left > 0, left, 1), 1)
        return kept, jnp.where(tiers == SKIPPED, 2 * count, experts + tiers * count)


def unimportance(weights: Array) -> Array:
    """The share of a token's gates that its experts with larger ones hold, `[M, k]` float32.

    Of equal gates, the earlier in the order of choice counts as the larger. If all are 0, every share is 0.

    Args:
      weights: `[M, k]`, at least 0.
    """
    w = weights.astype(jnp.float32)
    at = jnp.arange(w.shape[1])
    earlier = (at[None, :] < at[:, None])[None]
    larger = (w[:, None, :] > w[:, :, None]) | ((w[:, None, :] == w[:, :, None]) & earlier)
    before = jnp.sum(jnp.where(larger, w[:, None, :], 0), axis=-1)
    total = w.sum(axis=-1, keepdims=True)
    # the sum before may round to more than the total
    return jnp.minimum(before / jnp.where(total > 0, total, 1), 1)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Tiered(Matrix):
    """A matrix for every expert, in many bits and in few.

    Attributes:
      many: `[X, E, F]`, plain.
      few: the same matrices in few bits, a `specjax.models.few_bits.Quantised`.
      tiers: which of them a token's expert takes.
      on_host: whether both lie in the host's memory. A product then copies the matrices of the experts that have tokens to the
        device, one at a time, and keeps none.
    """

    many: Any
    few: Any
    tiers: Tiers = dataclasses.field(metadata={"static": True})
    on_host: bool = dataclasses.field(default=False, metadata={"static": True})

    @property
    def stored(self) -> Any:
        return self.many

    def astype(self, dtype: Any) -> "Tiered":
        return dataclasses.replace(self, many=self.many.astype(dtype), few=self.few.astype(dtype))

    def numbers(self) -> Array:
        return self.many


def grouped_dot(x: Array, kernels: Tiered, sizes: Array, dot_of: Callable[[Array, Any, Array], Array]) -> Array:
    """The product of each row with the matrix of its group, by a loop over the groups that have rows.

    Args:
      x: `[R, E]`, sorted by group.
      kernels: of `2 X` groups; see `Tiers.grouped`.
      sizes: `[2 X]` int32.
      dot_of: rows times one of several matrices, in whatever form (`specjax.models.few_bits.dot_of`).

    Returns:
      `[R, F]`; rows after those of all groups are undefined.
    """
    count = kernels.shape[0]

    def one(of: Any, group: Array) -> Any:
        """The group's matrix alone, on the device."""
        if not kernels.on_host:
            return of, group
        taken = jax.tree.map(lambda leaf: jax.lax.dynamic_slice_in_dim(leaf, group, 1), of)
        return jax.device_put(taken, jax.memory.Space.Device), jnp.zeros_like(group)

    def product(x: Array, kernels: Tiered, group: Array) -> Array:
        many = lambda group: dot_of(x, *one(kernels.many, group))
        few = lambda group: dot_of(x, *one(kernels.few, group - count))
        return jax.lax.cond(group < count, many, few, group)

    return loop.dot(x, kernels, sizes, product)
