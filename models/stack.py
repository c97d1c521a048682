"""Stacks of layers as shapes only, built in time linear in their depth."""

from collections.abc import Callable, Hashable, Sequence
from typing import Any

from flax import nnx


def abstract_stack(shell: Callable[[], Any], layer: Callable[[Any], nnx.Module], kinds: Sequence[Hashable]) -> Any:
    """A module whose parameters are `ShapeDtypeStruct`s.

    Every kind of layer is traced once and copied. Flax asks each new parameter for its sharding, and during a trace JAX
    answers by walking over everything traced before. So tracing a whole stack takes time quadratic in its depth.

    Args:
      shell: makes the module, with an empty list `layers`.
      layer: makes a layer of a kind.
      kinds: the kind of every layer.
    """
    made = {kind: nnx.eval_shape(lambda kind=kind: layer(kind)) for kind in dict.fromkeys(kinds)}
    whole = nnx.eval_shape(shell)
    whole.layers = nnx.List([nnx.clone(made[kind]) for kind in kinds])
    return whole
