"""Types of arrays with their shapes, in jaxtyping's notation: `Float[Array, "B N V"]` is an array of floating-point
numbers.

As in jaxtyping, a type checker sees an `Array`. The shape is for readers, and for the test that compares it with the
arrays of a step. Nothing is checked at run time, and no other package is needed. Axis names are those of the
docstrings; `D+1` is one more than D. A single axis has a space before it, `" B"`, because linters would read it as the
name of a type.
"""

from typing import TYPE_CHECKING, Annotated, Any

from jax import Array

PyTree = Any
"""Nested containers of arrays with a structure that only their maker knows: parameters, caches, a drafter's state."""

if TYPE_CHECKING:
    from typing import Annotated as Bool
    from typing import Annotated as Float
    from typing import Annotated as Int
    from typing import Annotated as Key
else:

    class _Kind:
        """`kind[Array, shape]` is `Annotated[Array, kind, shape]`."""

        def __init__(self, name: str):
            self.name = name

        def __getitem__(self, item: tuple[Any, str]) -> Any:
            return Annotated[item[0], self.name, item[1].strip()]

    Bool, Float, Int, Key = map(_Kind, ("bool", "float", "int", "key"))

__all__ = ["Array", "Bool", "Float", "Int", "Key", "PyTree"]
