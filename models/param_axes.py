"""Logical axes of parameters, by the name of the module that holds them: one rule for every transformer here."""

from typing import Any

import jax

_OUT_AXES = {
    "q": "heads", "k": "kv_heads", "v": "kv_heads", "gate": "mlp", "up": "mlp", "gate_up": "mlp", "head": "vocab",
}  # fmt: skip
_IN_AXES = {"o": "heads", "down": "mlp"}


def param_axes(params: Any) -> Any:
    """Logical axis names of every leaf. A kernel's last two axes are its inputs and outputs; experts stand before them."""
    return jax.tree_util.tree_map_with_path(lambda path, x: _axes([k.key for k in path], x.ndim), params)


def _axes(path: list, ndim: int) -> tuple[str | None, ...]:
    module, kind = path[-2], path[-1]
    if kind == "embedding":
        return ("vocab", "embed")
    if kind == "kernel":
        return (None,) * (ndim - 2) + (_IN_AXES.get(module, "embed"), _OUT_AXES.get(module, "embed"))
    if kind == "bias":
        return (_OUT_AXES.get(module, "embed"),)
    return (None,) * ndim
