"""Logical axes of parameters, by the name of the module that holds them: one rule for every transformer here."""

from typing import Any

import jax
from jax.sharding import Mesh

from specjax.sharding.rules import shardings

_OUT_AXES = {
    "q": "heads", "q_b": "heads", "k_b": "heads", "v_b": "heads", "k": "kv_heads", "v": "kv_heads", "gate": "mlp", "up": "mlp",
    "gate_up": "mlp", "head": "vocab", "pair": "vocab", "q_wide_norm": "heads", "k_wide_norm": "kv_heads", "o_gate": "heads",
    **dict.fromkeys(("inner", "outer", "read", "conv"), "mlp"),
    **dict.fromkeys(("z", "x", "dt", "conv_x", "gated_norm"), "state_heads"),
    **dict.fromkeys(("query", "key", "value", "strength", "decay", "output_gate"), "state_heads"),
}  # fmt: skip
_IN_AXES = {
    "o": "heads", "down": "mlp", "mixed": "mlp", "x_proj": "state_heads", "out_proj": "state_heads",
    "output": "state_heads", "attended": "state_heads",
}  # fmt: skip
_FIRST = ("A_log", "D", "dt_bias")  # parameters whose first axis is one of heads of states
_OF_STATES = ("rate", "shift")  # parameters whose last axis is one of heads
_OF_EACH = {"q_head_norm": "heads", "k_head_norm": "kv_heads"}  # the modules whose parameters have an axis of heads
_LISTED = {"heads": "head"}  # a list of modules and the name of each of them: Medusa's and Hydra's heads


def param_axes(params: Any) -> Any:
    """Logical axis names of every leaf. A kernel's last two axes are its inputs and outputs; an axis of experts
    precedes them."""
    return jax.tree_util.tree_map_with_path(_leaf_axes, params)


def _leaf_axes(path: tuple[Any, ...], x: Any) -> tuple[str | None, ...]:
    if not any(getattr(key, "key", None) == "experts" for key in path):
        return _axes(path, x.ndim)
    return ("expert", *("expert_mlp" if name == "mlp" else name for name in _axes(path, x.ndim)[1:]))


def _axes(path: tuple[Any, ...], ndim: int) -> tuple[str | None, ...]:
    *_, module, kind = ["", *(_LISTED.get(key.key, key.key) for key in path if hasattr(key, "key"))]
    if kind == "embedding" and module == "positions":
        return (None, "embed")
    if kind == "embedding":
        return (None,) * (ndim - 2) + ("vocab", "embed")
    if kind == "kernel":
        return (None,) * (ndim - 2) + (_IN_AXES.get(module, "embed"), _OUT_AXES.get(module, "embed"))
    if module in _OF_EACH:
        return (_OF_EACH[module], None)
    if kind == "bias" or (kind == "scale" and module in _OUT_AXES):
        return (None,) * (ndim - 1) + (_OUT_AXES.get(module, "embed"),)
    if kind in _FIRST:
        return ("state_heads",) + (None,) * (ndim - 1)
    if kind == "taps" or kind.endswith("_taps"):  # of a module, or of one of several products of a mixer
        return (None, _OUT_AXES.get(module if kind == "taps" else kind.removesuffix("_taps")))
    if kind == "sinks":
        return ("heads",)
    if kind == "head_rate":
        return (None, None, "state_heads", None)
    if kind in _OF_STATES:
        return (None,) * (ndim - 1) + ("state_heads",)
    return (None,) * ndim


def head_shardings(mesh: Mesh, params: Any, config: Any = None) -> Any:
    """The shardings of a trained drafter's parameters on a mesh.

    Args:
      mesh: the mesh.
      params: nested dicts and lists, with modules named as in a transformer.
      config: of its decoder layers, whose heads stay whole; None if it has none.
    """
    counts = {}
    if config is not None:
        own = config.slot_mixers[0]
        counts = {"heads": own.num_attention_heads, "kv_heads": own.num_key_value_heads}
        counts |= config.experts.axis_counts if config.experts else {}
    return shardings(mesh, param_axes(params), params, counts)
