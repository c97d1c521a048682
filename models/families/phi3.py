"""Phi-3 (arXiv:2404.14219), Phi-3.5 and Phi-4 (arXiv:2412.08905, and mini, arXiv:2503.01743): Llama's layers. In the
file, q, k and v are one matrix, and so are gate and up.
"""

import functools
from typing import Any

from specjax.models import hf_rope
from specjax.models.families import base
from specjax.models.families.base import Family, Fields
from specjax.models.families.llama import all_windowed
from specjax.models.fields import an_object
from specjax.models.model_config import ModelConfig
from specjax.models.ropes import RopeConfig

_OLD = {"su": "longrope", "yarn": "longrope"}
"""Names of rope types in files of early versions."""


def _rope(get: Fields) -> RopeConfig:
    """The rope: unscaled or `longrope`."""
    name = "rope_scaling" if get("rope_scaling") else "rope_parameters"
    rope = an_object(name, get(name))
    kind = rope.get("rope_type") or rope.get("type")
    width = get("head_dim") or get("hidden_size") // get("num_attention_heads")
    named = {"rope_scaling": rope | {"rope_type": _OLD.get(str(kind), kind)}, "rope_parameters": None}
    return base.rope(lambda field: named.get(field, get(field)), partial=True, long=width)


def _write(config: ModelConfig) -> dict[str, Any]:
    """Writes the positions of the first training outside the rope; in old versions, `longrope` has three fields
    there."""
    c, scaling = config, config.rope.scaling
    out = {
        "sliding_window": c.near.window, "partial_rotary_factor": c.rope.share,
        "original_max_position_embeddings": c.max_position_embeddings, "pad_token_id": None,
    }  # fmt: skip
    if scaling is None or scaling.kind != "longrope":
        return out
    original = scaling.original_max_position_embeddings
    usual = hf_rope.long_magnitude(c.max_position_embeddings, original)
    own = {} if scaling.magnitude == usual else {"attention_factor": scaling.magnitude}
    factors = {"short_factor": list(scaling.short_factor), "long_factor": list(scaling.long_factor)}
    rope = {"type": "longrope", **factors, **own}
    return out | {"original_max_position_embeddings": original, "rope_scaling": rope}


_JOINED = {
    "self_attn.q_proj": "self_attn.qkv_proj.weight#0", "self_attn.k_proj": "self_attn.qkv_proj.weight#1",
    "self_attn.v_proj": "self_attn.qkv_proj.weight#2", "mlp.gate_proj": "mlp.gate_up_proj.weight#0",
    "mlp.up_proj": "mlp.gate_up_proj.weight#1",
}  # fmt: skip


PHI3 = Family(
    "phi3", "Phi3ForCausalLM",
    {"max_position_embeddings": 4096, "original_max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
    all_windowed, _write, rope=_rope, names=functools.partial(base.joined, parts=_JOINED),
    note="a window, the share of a head that is rotated (`partial_rotary_factor`), the rope `longrope`",
)  # fmt: skip
