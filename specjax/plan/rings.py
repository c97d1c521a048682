"""What a prompt that a mesh splits sends from chip to chip, when keys move and when queries move."""

import functools
from typing import Any

import jax.numpy as jnp

from specjax.kernels.ring_attention.traffic import has_switch, traffic
from specjax.models.attention import AttentionConfig
from specjax.sharding.rules import RULES, parts


def rings(lm: Any, mesh: Any, tokens: int, dtype: Any) -> dict[str, dict[str, int]]:
    """`{"ring": {"keys": ..., "queries": ...}}`: bytes over the busiest link, for a causal prompt, of the layer with
    the most heads that sees all of it; empty where no sequence is split or no layer does.
    """
    devices = parts(mesh, "tokens")
    mixers = [layer.mixer for layer in getattr(getattr(lm, "config", None), "layers", ())]
    whole = [mixer for mixer in mixers if isinstance(mixer, AttentionConfig) and mixer.window is None]
    if devices < 2 or not whole:
        return {}
    own, split = max(whole, key=lambda mixer: mixer.num_attention_heads), mesh.shape[RULES["kv_heads"]]
    heads, kv_heads = (max(1, count // split) for count in (own.num_attention_heads, own.num_key_value_heads))
    size = 2 if dtype == "layercast" else jnp.dtype(dtype).itemsize
    sizes = {"heads": heads, "kv_heads": kv_heads, "width": own.head_dim, "devices": devices, "size": size}
    asked = functools.partial(traffic, tokens=tokens, is_causal=True, switched=has_switch(mesh), **sizes)
    sent = {moves: asked(moves).longest for moves in ("keys", "queries")}
    return {"ring": sent}
