"""Stacks of layers without numbers, made in a time that grows with their depth and no faster."""

from collections.abc import Callable, Hashable, Sequence
from typing import Any

from flax import nnx


def abstract_stack(shell: Callable[[], Any], layer: Callable[[Any], nnx.Module], kinds: Sequence[Hashable]) -> Any:
    """A module whose parameters are `ShapeDtypeStruct`s.

    Every kind of layer is traced once, and copied: flax asks each new parameter for its sharding, which JAX answers, while it
    traces, with a walk over all that was traced before, so that tracing a whole stack takes the square of its depth.

    Args:
      shell: makes the module, with an empty list `layers`.
      layer: makes a layer of a kind.
      kinds: of every layer.
    """
    made = {kind: nnx.eval_shape(lambda kind=kind: layer(kind)) for kind in dict.fromkeys(kinds)}
    whole = nnx.eval_shape(shell)
    whole.layers = nnx.List([nnx.clone(made[kind]) for kind in kinds])
    return whole
