"""State spaces in files: how sizes of Mamba and Mamba-2 are read and written, and the names of their tensors.

Families name these fields as Bamba does (`mamba_d_state`), or map their own names to those (`Family.fields`).
"""

import math
from collections.abc import Mapping
from typing import Any

from specjax.models.errors import ModelError
from specjax.models.families.base import Fields
from specjax.models.fields import flag, is_size, shown
from specjax.models.model_config import ModelConfig
from specjax.models.norms import NormConfig
from specjax.models.states.mamba import MambaConfig
from specjax.models.states.mamba2 import Mamba2Config
from specjax.models.weights import hf_name

USUAL = {
    "mamba_n_heads": 128, "mamba_n_groups": 1, "mamba_d_state": 256, "mamba_d_head": "auto", "mamba_d_conv": 4,
    "mamba_expand": 2, "mamba_conv_bias": True, "mamba_proj_bias": False,
}  # fmt: skip
"""What transformers takes for absent fields of Mamba-2, in Bamba and families that follow it."""
USUAL_1 = {
    "mamba_d_state": 16, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_dt_rank": "auto", "mamba_conv_bias": True,
    "mamba_proj_bias": False,
}  # fmt: skip
"""The same for Mamba."""
NO_ATTENTION: dict[str, tuple[str, ...]] = dict.fromkeys(
    ("intermediate_size", "num_attention_heads", "num_key_value_heads", "max_position_embeddings", "head_dim"), ()
)
"""Fields that families without attention and MLPs do not have."""
NO_SIZES = {"intermediate_size": 1, "num_attention_heads": 1, "max_position_embeddings": 1 << 20}
"""Values for them: of positions, more than any text has, since states know none."""
BACKBONE = {
    "model.layers": "backbone.layers", "model.embed_tokens": "backbone.embeddings", "model.norm": "backbone.norm_f",
}  # fmt: skip
"""For `base.renamed`, what lies outside layers in files of Mamba and Nemotron-H."""
NAMES: Mapping[str, str] = {
    "z": "in_proj#0", "x": "in_proj#1", "bc": "in_proj#2", "dt": "in_proj#3", "conv_x": "conv1d#0", "conv_bc": "conv1d#1",
    "gated_norm": "norm", "out_proj": "out_proj",
}  # fmt: skip
"""Modules of Mamba-2 in files, by ours; `#` is as in `specjax.models.weights.Names`."""
NAMES_1: Mapping[str, str] = {
    "x": "in_proj#0", "z": "in_proj#1", "conv_x": "conv1d", "x_proj": "x_proj", "dt": "dt_proj", "out_proj": "out_proj",
    "dt_norm": "dt_layernorm", "b_norm": "b_layernorm", "c_norm": "c_layernorm",
}  # fmt: skip
"""Modules of Mamba."""


def layout(path: tuple[Any, ...]) -> tuple[str, bool]:
    """`hf_name`, with the parameters of state spaces in `mamba`, and of mixers side by side in a layer."""
    match [getattr(key, "key", key) for key in path]:
        case ["layers", layer, "both", *inner]:
            return layout(("layers", layer, *inner))
        case ["layers", layer, "mamba" | "mamba2", *inner, kind]:
            named = {"kernel": "weight", "scale": "weight", "taps": "weight~"}.get(kind, kind)
            return ".".join((f"model.layers.{layer}.mamba", *inner, named)), kind in ("kernel", "taps")
    return hf_name(path)


def modules(names: Mapping[str, str], home: str = "mamba") -> dict[str, str]:
    """For `base.renamed`, the modules of a layer's state space, which lies in `home`."""
    return {"mamba": home} | {f"mamba.{ours}": f"{home}.{theirs}" for ours, theirs in names.items()}


def mamba2(get: Fields, inner: int | None, norm: NormConfig | None, **fields: Any) -> Mamba2Config:
    """The Mamba-2 of a file.

    Args:
      get: returns a field of the file.
      inner: the width of all heads that the file says elsewhere; None: nowhere.
      norm: of the outputs.
      fields: further fields of the result.

    Raises:
      ModelError: on wrong or inconsistent sizes.
    """
    heads, width, groups = get("mamba_n_heads"), get("mamba_d_head"), get("mamba_n_groups")
    if width in (None, "auto") and inner is not None and is_size(heads):
        width = inner // heads
    sizes = {"mamba_n_heads": heads, "mamba_d_head": width, "mamba_n_groups": groups}
    sizes |= {name: get(name) for name in ("mamba_d_state", "mamba_d_conv")}
    _check(sizes)
    if inner is not None and heads * width != inner:
        raise ModelError(f"config.json: {heads} heads of state spaces of width {width} do not make up {inner} channels")
    if heads % groups:
        raise ModelError(f"config.json: {heads} heads of state spaces do not split into {groups} groups")
    limit = get("time_step_limit")
    return Mamba2Config(
        heads, width, sizes["mamba_d_state"], groups, sizes["mamba_d_conv"], norm=norm, time_step_limit=_limit(limit),
        conv_bias=flag("mamba_conv_bias", get("mamba_conv_bias")), **fields,
    )  # fmt: skip


def proj_bias(get: Fields) -> dict[str, bool]:
    """The biases of the first and the last product, which share one switch."""
    return dict.fromkeys(("in_bias", "out_bias"), flag("mamba_proj_bias", get("mamba_proj_bias")))


def mamba(get: Fields, channels: int, norm: NormConfig | None) -> MambaConfig:
    """The Mamba of a file, with so many channels and the norm of its steps, B and C.

    Raises:
      ModelError: on wrong sizes.
    """
    rank = get("mamba_dt_rank")
    rank = math.ceil(get("hidden_size") / 16) if rank in (None, "auto") else rank
    sizes = {"mamba_dt_rank": rank} | {name: get(name) for name in ("mamba_d_state", "mamba_d_conv")}
    _check(sizes)
    return MambaConfig(
        channels, sizes["mamba_d_state"], rank, sizes["mamba_d_conv"],
        flag("mamba_conv_bias", get("mamba_conv_bias")), flag("mamba_proj_bias", get("mamba_proj_bias")), norm,
    )  # fmt: skip


def expanded(get: Fields) -> int:
    """The number of channels, `mamba_expand` times the model's width.

    Raises:
      ModelError: if it is no number.
    """
    times = get("mamba_expand")
    usable = isinstance(times, int | float) and not isinstance(times, bool) and math.isfinite(times)
    if not usable or times * get("hidden_size") < 1:
        raise ModelError(f"config.json: mamba_expand must be a positive number, not {shown(times)}")
    return int(times * get("hidden_size"))


def _check(sizes: Mapping[str, Any]) -> None:
    wrong = [name for name, value in sizes.items() if not is_size(value)]
    if wrong:
        raise ModelError(f"config.json needs positive integers for: {', '.join(wrong)}")


def _limit(limit: Any) -> tuple[float, float]:
    """`time_step_limit`; transformers writes an infinite end as a number or as an object."""
    if limit is None:
        return 0.0, math.inf
    ends = limit if isinstance(limit, list | tuple) else []
    ends = [math.inf if end == {"__float__": "Infinity"} else end for end in ends]
    numbers = all(isinstance(end, int | float) and not isinstance(end, bool) for end in ends)
    if len(ends) != 2 or not numbers or not 0 <= ends[0] <= ends[1]:
        raise ModelError(f"config.json: time_step_limit must be two numbers in order, not {shown(limit)}")
    return float(ends[0]), float(ends[1])


def first(config: ModelConfig, kind: type[Any]) -> Any:
    """The first state space of a kind in a model; None: it has none."""
    return next((one for one in config.state_mixers if isinstance(one, kind)), None)


def mamba2_to_hf(config: ModelConfig) -> dict[str, Any]:
    """The fields of a model's Mamba-2; of those that it does not have, nothing."""
    own = first(config, Mamba2Config)
    if own is None:
        return {}
    limit = {} if own.time_step_limit == (0.0, math.inf) else {"time_step_limit": list(own.time_step_limit)}
    return limit | {
        "mamba_n_heads": own.num_heads, "mamba_d_head": own.head_dim, "mamba_n_groups": own.groups,
        "mamba_d_state": own.state_size, "mamba_d_conv": own.kernel_size, "mamba_conv_bias": own.conv_bias,
        "mamba_expand": _times(own.inner, config), "mamba_proj_bias": own.in_bias,
    }  # fmt: skip


def mamba_to_hf(config: ModelConfig) -> dict[str, Any]:
    """The fields of a model's Mamba."""
    own = first(config, MambaConfig)
    if own is None:
        return {}
    return {
        "mamba_d_state": own.state_size, "mamba_d_conv": own.kernel_size, "mamba_dt_rank": own.rank,
        "mamba_expand": _times(own.channels, config), "mamba_conv_bias": own.conv_bias,
        "mamba_proj_bias": own.bias,
    }  # fmt: skip


def _times(channels: int, config: ModelConfig) -> int:
    """`mamba_expand`, which transformers reads as a whole number; of other widths, one that reads back as another model."""
    return max(1, channels // config.hidden_size)


def kinds(types: Any, layers: int, known: Mapping[str, Any], name: str = "layer_types") -> list[Any]:
    """What a list of kinds of layers says, by `known`.

    Raises:
      ModelError: on an unknown kind, or another number of layers.
    """
    if not isinstance(types, list) or len(types) != layers or not {str(one) for one in types} <= {*known}:
        raise ModelError(
            f"config.json: {name} must name one of {', '.join(known)} for each of {layers} layers, not {shown(types)}"
        )
    return [known[str(one)] for one in types]
