"""Mamba (Gu and Dao 2023, arXiv:2312.00752), Falcon-Mamba (arXiv:2410.05355) and Mamba-2 (Dao and Gu 2024, arXiv:2405.21060):
layers of one mixer with a running state, without attention and feed-forwards.
"""

import dataclasses
import functools
from typing import Any

from specjax.models.families import base, state_spaces
from specjax.models.families.base import SILU, Family, Fields
from specjax.models.fields import positive
from specjax.models.layer import LayerConfig
from specjax.models.mixers import StateMixerConfig
from specjax.models.model_config import ModelConfig
from specjax.models.norms import NormConfig
from specjax.models.states.mamba import MambaConfig


def _only(plain: ModelConfig, mixer: StateMixerConfig) -> ModelConfig:
    """The model with this mixer in all layers, and no feed-forward."""
    return dataclasses.replace(plain, layers=(LayerConfig(mixer, None, plain.norm),) * plain.num_hidden_layers)


def _read(get: Fields, plain: ModelConfig) -> ModelConfig:
    return _only(plain, state_spaces.mamba(get, get("intermediate_size"), None))


def _read_falcon(get: Fields, plain: ModelConfig) -> ModelConfig:
    norm = NormConfig(positive("mixer_rms_eps", get("mixer_rms_eps")), "bare")
    return _only(plain, state_spaces.mamba(get, get("intermediate_size"), norm))


def _write(config: ModelConfig) -> dict[str, Any]:
    own = state_spaces.first(config, MambaConfig)
    return state_spaces.mamba_to_hf(config) | ({} if own is None else {"intermediate_size": own.channels})


def _write_falcon(config: ModelConfig) -> dict[str, Any]:
    own = state_spaces.first(config, MambaConfig)
    eps = {} if own is None or own.norm is None else {"mixer_rms_eps": own.norm.eps}
    return _write(config) | eps


def _read_2(get: Fields, plain: ModelConfig) -> ModelConfig:
    own = state_spaces.mamba2(get, state_spaces.expanded(get), plain.norm, **state_spaces.proj_bias(get))
    return _only(plain, own)


_SHELL = {"input_layernorm": "norm"}
_FIELDS = state_spaces.NO_ATTENTION | {
    "rms_norm_eps": ("layer_norm_epsilon",), "mamba_expand": ("expand",), "mamba_d_conv": ("conv_kernel",),
    "mamba_d_state": ("state_size",), "mamba_conv_bias": ("use_conv_bias",), "mamba_proj_bias": ("use_bias",),
    "num_hidden_layers": ("num_hidden_layers", "n_layer"),
}  # fmt: skip
_FIELDS_1 = {name: own for name, own in _FIELDS.items() if name != "intermediate_size"} | {
    "mamba_dt_rank": ("time_step_rank",)
}
_FIELDS_2 = _FIELDS | {
    "mamba_n_heads": ("num_heads",), "mamba_d_head": ("head_dim",), "mamba_n_groups": ("n_groups",),
}  # fmt: skip
_USUAL = state_spaces.NO_SIZES | state_spaces.USUAL_1 | {
    "vocab_size": 50280, "hidden_size": 768, "num_hidden_layers": 32, "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
    "intermediate_size": state_spaces.expanded,
}  # fmt: skip

names = functools.partial(
    base.renamed, modules=_SHELL | state_spaces.modules(state_spaces.NAMES_1, "mixer"), outer=state_spaces.BACKBONE
)
_NOTE = "biases (`use_bias`, `use_conv_bias`)"
MAMBA = Family(
    "mamba", "MambaForCausalLM", _USUAL, _read, _write, SILU, rope=None, names=names,
    layout=state_spaces.layout, fields=_FIELDS_1,
    note=_NOTE,
)  # fmt: skip
FALCON_MAMBA = Family(
    "falcon_mamba", "FalconMambaForCausalLM", _USUAL | {"mixer_rms_eps": 1e-6}, _read_falcon, _write_falcon, SILU, rope=None,
    names=names, layout=state_spaces.layout, fields=_FIELDS_1, note=_NOTE,
)  # fmt: skip
MAMBA_2 = Family(
    "mamba2", "Mamba2ForCausalLM",
    state_spaces.NO_SIZES | state_spaces.USUAL | {
        "vocab_size": 32768, "hidden_size": 4096, "num_hidden_layers": 64, "rms_norm_eps": 1e-5, "mamba_d_head": 64,
        "mamba_d_state": 128, "mamba_n_groups": 8,
    },
    _read_2, state_spaces.mamba2_to_hf, SILU | {"rms_norm": (True, None)}, rope=None, layout=state_spaces.layout,
    names=functools.partial(
        base.renamed, modules=_SHELL | state_spaces.modules(state_spaces.NAMES, "mixer"), outer=state_spaces.BACKBONE
    ),
    fields=_FIELDS_2, note=f"{_NOTE}, groups (`n_groups`), limits of steps (`time_step_limit`)",
)  # fmt: skip
