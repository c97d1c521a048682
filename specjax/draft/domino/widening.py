"""Domino for a wider target: its state and its correction's rank stay."""

from typing import Any

from specjax.models.widening import tiled, tiled_rows

PyTree = Any


def beside_states(params: PyTree, k: int, width: int) -> PyTree:
    """Domino's parameters k times as wide; of kernels that read a token or a slot's output, only those rows are tiled."""
    correction = dict(params["correction"])
    for name in ("token", "inner"):
        correction[name] = tiled_rows(correction[name], 0, k, width)
    return {
        **tiled({name: part for name, part in params.items() if name != "correction"}, k, width),
        "correction": correction,
    }
