"""What stands for a matrix in a params pytree whose numbers do not lie there one by one."""

import abc
from typing import Any, Self

import jax

Array = jax.Array


class Matrix(abc.ABC):
    """A leaf of several arrays, which have the axes of the matrix: whatever goes by axes takes them like plain arrays.

    The first of them has the type that the matrix is used in, as the first leaf of parameters has everywhere.
    """

    @property
    @abc.abstractmethod
    def stored(self) -> Any:
        """The array that has an entry for every number of the matrix."""

    @abc.abstractmethod
    def numbers(self) -> Array:
        """The matrix as one array, before it is rounded to the type that it is used in."""

    @abc.abstractmethod
    def astype(self, dtype: Any) -> Self:
        """To be used in another type."""

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
        """The type that it is used in."""
        return jax.tree.leaves(self)[0].dtype

    @property
    def T(self) -> Self:  # noqa: N802
        return jax.tree.map(lambda x: x.swapaxes(-1, -2), self)

    def take(self, ids: Array) -> Self:
        """The rows `ids` `[n]` of a table. No id may be outside."""
        return jax.tree.map(lambda x: x.at[ids].get(mode="promise_in_bounds"), self)
