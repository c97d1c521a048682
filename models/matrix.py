"""Leaves of a params pytree that stand for a matrix without holding its numbers one by one."""

import abc
from typing import Any, Self

import jax

Array = jax.Array


class Matrix(abc.ABC):
    """A leaf made of several arrays that have the matrix's axes, so code that goes by axes treats them like plain
    arrays.

    The first array has the type in which the matrix is used, like the first leaf of parameters everywhere.
    """

    @property
    @abc.abstractmethod
    def stored(self) -> Any:
        """The array with an entry for every number of the matrix."""

    @abc.abstractmethod
    def numbers(self) -> Array:
        """The matrix as one array, before it is rounded to the type in which it is used."""

    @abc.abstractmethod
    def astype(self, dtype: Any) -> Self:
        """The same matrix, to be used in another type."""

    @property
    def shape(self) -> tuple[int, ...]:
        return self.stored.shape

    @property
    def ndim(self) -> int:
        return self.stored.ndim

    @property
    def size(self) -> int:
        return self.stored.size

    @property
    def dtype(self) -> Any:
        """The type in which it is used."""
        return jax.tree.leaves(self)[0].dtype

    @property
    def T(self) -> Self:  # noqa: N802
        return jax.tree.map(lambda x: x.swapaxes(-1, -2), self)

    def take(self, ids: Array) -> Self:
        """The rows `ids` `[n]` of a table. Every id must be in range."""
        return jax.tree.map(lambda x: x.at[ids].get(mode="promise_in_bounds"), self)
