"""Means over a batch that comes in parts: each divides by the whole batch's weight, so parts add up to the whole."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

Array = jax.Array


class Mean:
    """Weighted means of values `[B, T]`, for a batch in one piece; weights have the same shape and are bool or non-negative.

    An objective takes all its means with the given object, in the same order in every call, and outside `jax.lax` loops
    and branches. Its loss is linear in the results of `__call__`.
    """

    def __call__(self, values: Array, weights: Array) -> Array:
        """This part's share of the mean over the whole batch; 0 if the batch's weights are all 0."""
        return _over(*_sums(values, weights))

    def whole(self, values: Array, weights: Array) -> Array:
        """The mean over the whole batch, as a constant, for losses that are not linear in it."""
        return jax.lax.stop_gradient(self(values, weights))

    def every(self, values: Array) -> Array:
        """The values of all parts, as a constant, flat and in any order, for a choice among the whole batch's values.

        No such values may depend on an earlier choice.
        """
        return jax.lax.stop_gradient(values).reshape(-1)

    def done(self) -> None:
        """Declares that no more means are taken.

        Raises:
          ValueError: if a part took fewer means than were counted.
        """


MEAN = Mean()


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Counts:
    """The sums of what the parts count.

    Attributes:
      means: for every mean its weight; for a `whole` one its sum as well.
      choices: for every `every` all parts' values, `[parts, ...]`.
    """

    means: list[Array | tuple[Array, Array]] = dataclasses.field(default_factory=list)
    choices: list[Array] = dataclasses.field(default_factory=list)


def counts(count: Callable[[list[Array] | None], Counts]) -> Counts:
    """The sum over all parts.

    Args:
      count: sums what `Counted` keeps for each part, given `choices`. Means over chosen values can only be counted once
        all parts' values are known, so it is called again then.
    """
    found = count(None)
    return count(found.choices) if found.choices else found


class Counted(Mean):
    """Keeps what `Parts` will need from this part.

    Args:
      number: the index of this part.
      parts: how many there are.
      choices: from `Counts`; None: not known yet, so a part uses its own values for all of them.

    Attributes:
      kept: `Counts`, with zeros in all other parts' places.
    """

    def __init__(self, number: Array | int = 0, parts: int = 1, choices: Sequence[Array] | None = None) -> None:
        self.kept = Counts()
        self._number, self._parts = number, parts
        self._choices: Iterator[Array] | None = None if choices is None else iter(choices)

    def __call__(self, values, weights):
        total, weight = _sums(values, weights)
        self.kept.means.append(weight)
        return _over(total, weight)

    def whole(self, values, weights):
        sums = jax.lax.stop_gradient(_sums(values, weights))
        self.kept.means.append(sums)
        return _over(*sums)

    def every(self, values):
        values = super().every(values)
        self.kept.choices.append(jnp.zeros((self._parts, *values.shape), values.dtype).at[self._number].set(values))
        return values if self._choices is None else next(self._choices).reshape(-1)


class Parts(Mean):
    """Means for one part of a batch.

    Args:
      counts: over all of its parts.
    """

    def __init__(self, counts: Counts):
        self._means: Iterator[Any] = iter(counts.means)
        self._choices = iter(counts.choices)

    def __call__(self, values, weights):
        return _over(_sums(values, weights)[0], next(self._means))

    def whole(self, values, weights):
        return _over(*next(self._means))

    def every(self, values):
        return next(self._choices).reshape(-1)

    def done(self):
        if any(True for left in (self._means, self._choices) for _ in left):
            raise ValueError("an objective took fewer means of a part than were counted")


def _sums(values: Array, weights: Array) -> tuple[Array, Array]:
    weights = weights.astype(jnp.float32)
    return jnp.where(weights > 0, values * weights, 0.0).sum(), weights.sum()


def _over(total: Array, weight: Array) -> Array:
    return total / jnp.where(weight > 0, weight, 1.0)
