"""Experts in a Hugging Face `config.json`: how many, and how a token chooses among them."""

from collections.abc import Callable
from typing import Any

from specjax.models.errors import ModelError
from specjax.models.experts import ExpertsConfig, Scoring
from specjax.models.fields import MOST_EXPERTS, flag, is_size, positive, shown
from specjax.models.mlp import MLPConfig
from specjax.models.model_config import ModelConfig

_LOCAL = {"num_experts": "num_local_experts", "moe_intermediate_size": "intermediate_size"}
"""The names that files of Mixtral, and of families that follow it, give to fields of experts."""


def local(get: Callable[[str], Any]) -> Callable[[str], Any]:
    """`get` for a file with Mixtral's names of fields; see `local_to_hf`."""
    return lambda name: get(_LOCAL.get(name, name))


def local_to_hf(experts: ExpertsConfig) -> dict[str, Any]:
    """The sizes of experts under Mixtral's names of fields."""
    named = ("num_experts", "num_experts_per_tok", "moe_intermediate_size")
    return {_LOCAL.get(name, name): getattr(experts, name) for name in named}


_ROUTED = {"num_experts": "n_routed_experts"}
"""The name that files of DeepSeek-V3, and of families that follow it, give to the number of experts."""
_GROUPS = ("n_group", "topk_group")


def routed(get: Callable[[str], Any]) -> Callable[[str], Any]:
    """`get` for a file with DeepSeek-V3's names of fields; see `routed_to_hf`."""
    return lambda name: get(_ROUTED.get(name, name))


def routed_to_hf(experts: ExpertsConfig) -> dict[str, Any]:
    """How many experts there are and how they are chosen, under DeepSeek-V3's names of fields."""
    named = ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "routed_scaling_factor", "norm_topk_prob")
    return {_ROUTED.get(name, name): getattr(experts, name) for name in (*named, *_GROUPS)}


def by_groups(get: Callable[[str], Any], scoring: Scoring = "sigmoid", **fields: Any) -> ExpertsConfig:
    """Experts that DeepSeek's routers choose, out of groups, DeepSeek-V3's by sigmoids; see `from_hf`."""
    groups, scale = {name: get(name) for name in _GROUPS}, get("routed_scaling_factor")
    if wrong := [name for name, value in groups.items() if not is_size(value)]:
        raise ModelError(f"config.json needs positive integers for: {', '.join(wrong)}")
    scale = 1.0 if scale is None else positive("routed_scaling_factor", scale)
    return from_hf(get, scoring=scoring, routed_scaling_factor=scale, **groups, **fields)


def from_hf(
    get: Callable[[str], Any], chosen: str = "num_experts_per_tok", num_shared_experts: int = 0, **fields: Any
) -> ExpertsConfig:  # fmt: skip
    """How many experts a config has, and how a token chooses them.

    Args:
      get: returns a field of `config.json` by name.
      chosen: the file's name for the number of a token's experts.
      num_shared_experts: how many further experts every token uses.
      fields: the other fields of the result.

    Raises:
      ModelError: on invalid or inconsistent sizes.
    """
    sizes = ("num_experts", chosen, "moe_intermediate_size")
    missing = [name for name in sizes if not is_size(get(name))]
    if missing:
        raise ModelError(f"config.json needs positive integers for: {', '.join(missing)}")
    shared = MLPConfig(num_shared_experts * get("moe_intermediate_size")) if num_shared_experts else None
    made = ExpertsConfig(*(get(name) for name in sizes), shared=shared, **fields)
    if made.num_experts > MOST_EXPERTS:
        raise ModelError(f"config.json: num_experts is {made.num_experts}; up to {MOST_EXPERTS} are read")
    groups, each = made.n_group, made.num_experts // made.n_group
    if made.num_experts % groups or (groups > 1 and each < 2) or made.topk_group > groups:
        raise ModelError(
            f"config.json: {made.num_experts} experts do not form {groups} groups of two or more, of which topk_group "
            f"{made.topk_group} count"
        )
    if made.num_experts_per_tok > made.choices:
        raise ModelError(
            f"config.json: {chosen} {made.num_experts_per_tok} is above {made.choices}, the experts to choose from"
        )
    return made


def compressed(get: Callable[[str], Any], config: ModelConfig) -> ModelConfig:
    """The config with compressed experts if the file has some (`use_ce`): `n_ce` of a token's experts are auxiliary.

    Raises:
      ModelError: if it has no experts, not as many, or such as vectors cannot stand for.
    """
    if not flag("use_ce", get("use_ce")):
        return config
    count, found = get("n_ce"), config.experts
    if found is None:
        raise ModelError("config.json: use_ce is true, and the model has no experts")
    if isinstance(count, bool) or not isinstance(count, int) or not 0 <= count < found.num_experts_per_tok:
        raise ModelError(
            f"config.json: n_ce must be a number below the {found.num_experts_per_tok} experts of a token, not {shown(count)}"
        )
    if why := uncompressed(config):
        raise ModelError(f"config.json: use_ce is true, and vectors cannot stand for {why}")
    return config.every(ExpertsConfig, auxiliary=count, vectors=True)


def compressed_to_hf(config: ModelConfig) -> dict[str, Any]:
    """The keys of compressed experts; none of a model without them."""
    experts = config.experts
    return {} if experts is None or not experts.vectors else {"use_ce": True, "n_ce": experts.auxiliary}


def uncompressed(config: ModelConfig) -> str:
    """Why vectors cannot stand for a model's experts; empty if they can."""
    if any(layer.beside is not None for layer in config.layers):
        return "experts beside an MLP"
    reasons = (layer.experts.uncompressed(config.hidden_size) for layer in config.layers if layer.experts is not None)
    return next(filter(None, reasons), "")
