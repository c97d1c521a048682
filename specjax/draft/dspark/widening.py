"""DSpark for a wider target: its bias keeps its rank."""

from typing import Any

import jax.numpy as jnp

from specjax.draft.dspark import DSpark
from specjax.models.widening import tiled

PyTree = Any


def beside_ranks(drafter: DSpark, params: PyTree, k: int, width: int) -> PyTree:
    """DSpark's parameters k times as wide; kernels that read a slot's output beside the bias's rank have only the
    output's rows tiled.
    """

    def reads(module: PyTree, at: int) -> PyTree:
        before, own, after = jnp.split(module["kernel"], (at, at + width))
        return {**module, "kernel": jnp.concatenate([before, jnp.tile(own, (k, 1)) / k, after])}

    ranked = {"markov": dict(params["markov"])}
    if "mix" in ranked["markov"]:
        ranked["markov"]["mix"] = reads(ranked["markov"]["mix"], 0 if drafter.markov == "gated" else 2 * drafter.rank)
    if "confidence" in params:
        ranked["confidence"] = reads(params["confidence"], 0)
    return {**tiled({name: part for name, part in params.items() if name not in ranked}, k, width), **ranked}
