"""Low-rank changes of a model's matrices, for training (LoRA, Hu et al. 2021, arXiv:2106.09685).

Changes are nested like the parameters, with {`a` `[r, in]`, `b` `[out, r]`} in place of a module's {`kernel` `[in, out]`}.
`specjax.models.adapter_writing` writes them as PEFT's adapter.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

Array = jax.Array
PyTree = Any

MODULES = ("q", "k", "v", "o", "gate", "up", "down")
"""The modules of layers whose matrices change. Those of experts do not."""


def fresh(key: Array, params: PyTree, rank: int) -> PyTree:
    """Changes that change nothing yet, in float32: `b` is 0, and `a` is drawn as PEFT draws it, evenly within 1/sqrt(in).

    Args:
      key: for the draws.
      params: of a `LlamaLM`, or their shapes, without copies of kv-heads. An output head of its own changes too.
      rank: r.
    """
    changes: dict[Any, Any] = {}
    leaves = jax.tree_util.tree_flatten_with_path(params)[0]
    chosen = [(path, leaf) for path, leaf in leaves if leaf.ndim == 2 and _changes([key.key for key in path])]
    for number, (path, leaf) in enumerate(chosen):
        node = changes
        for step in path[:-1]:
            node = node.setdefault(step.key, {})
        inputs, outputs = leaf.shape
        bound = inputs**-0.5
        node["a"] = jax.random.uniform(jax.random.fold_in(key, number), (rank, inputs), minval=-bound, maxval=bound)
        node["b"] = jnp.zeros((outputs, rank))
    return changes


def added(params: PyTree, changes: PyTree, scale: float, spread: Callable[[PyTree], PyTree] = lambda x: x) -> PyTree:
    """The parameters with `kernel + scale (b a)^T` for every kernel that changes; summed in float32, as a merged adapter.

    Args:
      params: of the model.
      changes: see above.
      scale: alpha / r.
      spread: from products `[in, out]`, nested like the parameters, to those of parameters with copies of kv-heads.
    """

    def product(pair):
        return {"kernel": scale * jnp.einsum("ri,or->io", pair["a"], pair["b"], precision="highest")}

    return _sum(params, spread(jax.tree.map(product, changes, is_leaf=is_pair)))


def is_pair(node: Any) -> bool:
    """Whether a node of changes holds the two matrices of a module."""
    return isinstance(node, dict) and node.keys() == {"a", "b"}


def _changes(keys: list[Any]) -> bool:
    """Whether the parameter at this path changes, if it is a matrix."""
    return keys[-1] == "kernel" and (keys[0] == "head" or (keys[0] == "layers" and keys[-2] in MODULES))


def _sum(params: PyTree, products: PyTree) -> PyTree:
    if not isinstance(products, dict):
        return (params.astype(jnp.float32) + products).astype(params.dtype)
    return {**params, **{name: _sum(params[name], own) for name, own in products.items()}}
