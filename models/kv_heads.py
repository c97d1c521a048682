"""Copies of kv-heads, for meshes that are wider than a model has kv-heads.

Heads are split over a mesh axis. With more chips than kv-heads, every chip would have to hold all kv-heads. With copies
side by side, a chip holds only the kv-head that its query heads share, and the numbers are the same. The one vector of latent
attention is copied as it is computed; its parameters are the same on every chip.
"""

from typing import Any

import jax
import jax.numpy as jnp

from specjax.sharding import rules

_OF_EACH = "k_head_norm"  # the module whose parameters have an axis of kv-heads
_COPIED = ("k", "v", "k_wide_norm", _OF_EACH)  # the modules whose outputs are kv-heads


def copies_for(config: Any, mesh: jax.sharding.Mesh | None) -> int:
    """The number of copies of every kv-head with which the mesh can split them; 1 if that does not help or layers
    differ in kv-heads."""
    parts = rules.parts(mesh, "heads")
    kinds = {(one.num_key_value_heads, one.num_attention_heads) for one in config.slot_mixers}
    if len(kinds) != 1 or len(config.slot_mixers) < config.num_hidden_layers:
        return 1
    kv, heads = kinds.pop()
    return parts // kv if parts > kv and parts % kv == 0 and heads % parts == 0 else 1


def copied(params: Any, config: Any, copies: int) -> Any:
    """Parameters with copies of every kv-head, from those without.

    Args:
      params: of a `LlamaLM`.
      config: its config, without copies.
      copies: how many; 1 changes nothing.
    """
    repeat = lambda heads: jnp.repeat(heads, copies, axis=-2)
    return params if copies == 1 else _change(params, config.slot_mixers[0].num_key_value_heads, repeat)


def merged(params: Any, config: Any, copies: int) -> Any:
    """Parameters without the copies; the inverse of `copied`."""
    first = lambda heads: heads[..., ::copies, :]
    return params if copies == 1 else _change(params, config.slot_mixers[0].num_key_value_heads * copies, first)


def is_copied(path: tuple[Any, ...]) -> bool:
    """Whether the parameter at this path of a params pytree has an output for every kv-head."""
    keys = [key.key for key in path if hasattr(key, "key")]  # the parts of a quantised kernel are attributes
    return len(keys) > 1 and keys[-2] in _COPIED


def _change(params, heads, function):
    def change(path, x):
        if not is_copied(path) or x.shape[-1] == 1:  # shared by all outputs of a matrix
            return x
        if path[-2].key == _OF_EACH:
            return function(x)
        split = x.reshape(*x.shape[:-1], heads, -1)
        return function(split).reshape(*x.shape[:-1], -1)

    return jax.tree_util.tree_map_with_path(change, params)
