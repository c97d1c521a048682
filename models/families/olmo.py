"""OLMo 2 (arXiv:2501.00656) and OLMo 3: attention and MLP read the stream as it is, and what they give is normalised."""

from typing import Any

from specjax.models import gemma_text, hf_rope
from specjax.models.families import base
from specjax.models.families.base import Family, Fields
from specjax.models.fields import FULL, SLIDING, an_object
from specjax.models.llama_config import FullAttention, LlamaConfig

_THETA = 500000.0
_USUAL = {"max_position_embeddings": 2048, "rms_norm_eps": 1e-5}


def _read(get: Fields) -> dict[str, Any]:
    parts = {"norm": "wide", "pre_norms": False, "post_norms": True, "qk_wide_norm": True}
    return base.attention_bias(get) | parts


def _write(config: LlamaConfig) -> dict[str, Any]:
    return {"attention_bias": config.qkv_bias}


def _read_3(get: Fields) -> dict[str, Any]:
    """`rope_theta` and `rope_scaling` are of layers without a window; in `rope_parameters` each kind has its own."""
    layers, types = get("num_hidden_layers"), get("layer_types")
    types = [SLIDING if (i + 1) % 4 else FULL for i in range(layers)] if types is None else types
    given = an_object("rope_parameters", get("rope_parameters"))
    theta = _THETA if get("rope_theta") is None else get("rope_theta")
    near, far = (an_object(f"rope_parameters: {kind}", given.get(kind)) for kind in (SLIDING, FULL))
    near, far = (
        {"rope_theta": _THETA} | near,
        {"rope_theta": theta} | far | an_object("rope_scaling", get("rope_scaling")),
    )
    read = lambda rope: hf_rope.from_hf({"rope_parameters": rope}, get("max_position_embeddings"))
    (base_near, scaling_near), (base_far, scaling_far) = read(near), read(far)
    return _read(get) | base.windows(types, get("sliding_window"), layers) | {
        "rope_theta": base_near, "rope_scaling": scaling_near,
        "full": FullAttention(rope_theta=base_far, rope_scaling=scaling_far),
    }  # fmt: skip


def _write_3(config: LlamaConfig) -> dict[str, Any]:
    c, full = config, config.full or FullAttention()
    ropes = {SLIDING: (c.rope_theta, c.rope_scaling), FULL: (full.rope_theta, full.rope_scaling)}
    plain = {"rope_type": "default"}
    return _write(c) | {
        "layer_types": base.layer_types(c), "sliding_window": c.sliding_window,
        "rope_parameters": {k: {"rope_theta": theta} | (hf_rope.to_hf(s) or plain) for k, (theta, s) in ropes.items()},
        "rope_theta": full.rope_theta, "rope_scaling": hf_rope.to_hf(full.rope_scaling),
    }  # fmt: skip


OLMO2 = Family("Olmo2ForCausalLM", _USUAL, _read, _write, layout=gemma_text.hf_name, note="biases of attention")
OLMO3 = Family(
    "Olmo3ForCausalLM", _USUAL | {"sliding_window": 4096}, _read_3, _write_3, layout=gemma_text.hf_name,
    note="scaled ropes in layers without a window, biases of attention",
)  # fmt: skip
