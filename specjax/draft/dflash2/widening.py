"""DFlash 2 for a wider target: its convolutions have more groups, and its selector keeps its rank."""

from typing import Any

import jax
import jax.numpy as jnp

from specjax.models.widening import tiled, tiled_rows

Array = jax.Array
PyTree = Any
_PARTS = ("attention", "mlp")


def with_groups(params: PyTree, k: int, width: int) -> PyTree:
    """DFlash 2's parameters k times as wide. A copy of the channels has copies of their groups."""
    selector, layers = params["selector"], params["layers"]
    bare = {i: {name: _without(part, name) for name, part in layer.items()} for i, layer in layers.items()}
    wide = tiled({**{name: part for name, part in params.items() if name != "selector"}, "layers": bare}, k, width)
    for i, layer in layers.items():
        for name in _PARTS:
            wide["layers"][i][name]["convolution"] = _wider(layer[name]["convolution"], k, width)
    return {**wide, "selector": {**selector, "projection": tiled_rows(selector["projection"], 0, k, width)}}


def _without(part: PyTree, name: str) -> PyTree:
    return {inner: x for inner, x in part.items() if inner != "convolution"} if name in _PARTS else part


def _wider(convolution: PyTree, k: int, width: int) -> PyTree:
    base, own = convolution["base"], tiled_rows(convolution["projection"], 0, k, width)["kernel"]
    kernel = jnp.tile(own.reshape(len(own), *base.shape[:2], -1), (1, 1, 1, k)).reshape(len(own), -1)
    return {"base": jnp.tile(base, (1, 1, k)), "projection": {"kernel": kernel}}
