"""Falcon-H1 (arXiv:2507.22448): attention and Mamba-2 side by side in every layer, with multipliers (maximal update
parametrisation)."""

import dataclasses
import functools
import math
from typing import Any

from specjax.models.both import BothConfig
from specjax.models.errors import ModelError
from specjax.models.families import base, jamba, state_spaces
from specjax.models.families.base import SILU, Family, Fields
from specjax.models.families.llama import biases
from specjax.models.fields import flag, is_positive, is_size, positive, shown
from specjax.models.mlp import MLPConfig
from specjax.models.model_config import EmbeddingConfig, HeadConfig, ModelConfig

_ONES = {
    name: 1.0 for name in (
        "lm_head_multiplier", "embedding_multiplier", "key_multiplier", "attention_in_multiplier", "attention_out_multiplier",
        "ssm_in_multiplier", "ssm_out_multiplier",
    )
}  # fmt: skip


def _inverse(x: float) -> float:
    """The number whose reciprocal is x where there is one, so that a file reads back as the same model."""
    near = (1 / x, math.nextafter(1 / x, 0), math.nextafter(1 / x, math.inf))
    return next((one for one in near if 1 / one == x), near[0])


def _several(get: Fields, name: str, count: int) -> tuple[float, ...]:
    """A list of multipliers.

    Raises:
      ModelError: if it is none of that length.
    """
    found = [1.0] * count if get(name) is None else get(name)
    if not isinstance(found, list) or len(found) != count or not all(map(is_positive, found)):
        raise ModelError(f"config.json: {name} must be {count} positive numbers, not {shown(found)}")
    return tuple(map(float, found))


def _read(get: Fields, plain: ModelConfig) -> ModelConfig:
    by = {name: positive(name, get(name)) for name in _ONES}
    inner = state_spaces.expanded(get) if get("mamba_d_ssm") is None else get("mamba_d_ssm")
    if not is_size(inner):
        raise ModelError("config.json needs positive integers for: mamba_d_ssm")
    norm = plain.norm if flag("mamba_rms_norm", get("mamba_rms_norm")) else None
    own = state_spaces.mamba2(
        get, inner, norm, norm_first=norm is not None and flag("mamba_norm_before_gate", get("mamba_norm_before_gate")),
        in_bias=flag("mamba_proj_bias", get("mamba_proj_bias")), out_bias=flag("projectors_bias", get("projectors_bias")),
        scales=_several(get, "ssm_multipliers", 5),
    )  # fmt: skip
    config = biases(get, plain)
    config = config.every(MLPConfig, factors=_several(get, "mlp_multipliers", 2))
    attention = dataclasses.replace(config.near, key_scale=by["key_multiplier"])
    both = BothConfig(
        attention, own, (by["attention_in_multiplier"], by["attention_out_multiplier"]),
        (by["ssm_in_multiplier"], by["ssm_out_multiplier"]),
    )  # fmt: skip
    config = config.each(lambda i, layer: dataclasses.replace(layer, mixer=both))
    config = config.every(EmbeddingConfig, scale=by["embedding_multiplier"], exact=True)
    return config.every(HeadConfig, logits_scaling=1 / by["lm_head_multiplier"])


def _write(config: ModelConfig) -> dict[str, Any]:
    both, attention = config.layers[0].mixer, config.attention_sizes
    own = {"attention_bias": attention.qkv_bias, "mlp_bias": config.dense.bias}
    if not isinstance(both, BothConfig):
        return own
    state: Any = both.state
    return state_spaces.mamba2_to_hf(config) | own | {
        "mamba_d_ssm": state.inner, "mamba_rms_norm": state.norm is not None, "mamba_norm_before_gate": state.norm_first,
        "projectors_bias": state.out_bias, "ssm_multipliers": list(state.scales),
        "mlp_multipliers": list(config.dense.factors), "lm_head_multiplier": _inverse(config.head.logits_scaling),
        "embedding_multiplier": config.embedding.scale,
        "key_multiplier": attention.key_scale,
        "attention_in_multiplier": both.slots_factors[0], "attention_out_multiplier": both.slots_factors[1],
        "ssm_in_multiplier": both.state_factors[0], "ssm_out_multiplier": both.state_factors[1],
    }  # fmt: skip


FALCON_H1 = Family(
    "falcon_h1", "FalconH1ForCausalLM",
    state_spaces.USUAL | _ONES | {
        "vocab_size": 128000, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5,
        "mamba_d_ssm": 1024, "mamba_norm_before_gate": True,
    },
    _read, _write, SILU | {"mamba_use_mlp": (True, None)}, layout=state_spaces.layout,
    names=functools.partial(
        base.renamed, modules=jamba.SHELL | state_spaces.modules(state_spaces.NAMES), outer=jamba.OUTER
    ),
    note="multipliers, a norm of the state space's outputs (`mamba_rms_norm`) before or after its gate, biases, limits of "
    "steps (`time_step_limit`)",
)  # fmt: skip
