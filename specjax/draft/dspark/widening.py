"""DSpark for a wider target: its bias keeps its rank."""

from typing import Any

from specjax.draft.dspark import DSpark
from specjax.models.widening import tiled, tiled_rows

PyTree = Any


def beside_ranks(drafter: DSpark, params: PyTree, k: int, width: int) -> PyTree:
    """DSpark's parameters k times as wide; kernels that read a slot's output beside the bias's rank have only the
    output's rows tiled.
    """
    ranked = {"markov": dict(params["markov"])}
    if "mix" in ranked["markov"]:
        ranked["markov"]["mix"] = tiled_rows(
            ranked["markov"]["mix"], 0 if drafter.markov == "gated" else 2 * drafter.rank, k, width
        )
    if "confidence" in params:
        ranked["confidence"] = tiled_rows(params["confidence"], 0, k, width)
    return {**tiled({name: part for name, part in params.items() if name not in ranked}, k, width), **ranked}
