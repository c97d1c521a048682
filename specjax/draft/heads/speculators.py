"""The `config.json` of vllm-project/speculators: the draft's layer is nested in it, with the head's flags around that."""

from typing import Any

from specjax.draft.heads.layout import FAMILIES, NEUTRAL, Reader
from specjax.models.errors import ModelError
from specjax.models.fields import an_object

_BOOKKEEPING = frozenset(
    "speculators_model_type speculators_config speculators_version transformer_layer_config auto_map architectures "
    "model_type torch_dtype dtype transformers_version has_no_defaults_at_init enable_sp_ulysses inference_type "
    "tie_word_embeddings".split()
)
_DECIDING = ("partial_rotary_factor", "quantization_config")  # the fields of a layer that must not be overlooked


def is_one(config: dict[str, Any]) -> bool:
    """Whether speculators wrote it."""
    return "speculators_model_type" in config or "transformer_layer_config" in config


def flattened(reader: Reader, config: dict[str, Any], wanted: str) -> dict[str, Any]:
    """The fields of the layer and the flags of the head at one level, as in other layouts.

    Raises:
      ModelError: for a method other than the `wanted` one, and for a layer of another family than Llama's.
    """
    kind = config.get("speculators_model_type", wanted)
    if kind != wanted:
        raise ModelError(f"{reader.file}: speculators_model_type is {kind!r}, a head for another drafter than {wanted}")
    layer = an_object("transformer_layer_config", config.get("transformer_layer_config"))
    family = layer.get("model_type", "llama")
    if family not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise ModelError(
            f"{reader.file}: transformer_layer_config.model_type is {family!r}; layers of {known} are read"
        )
    made_for = an_object("speculators_config", config.get("speculators_config")).get("verifier")
    if isinstance(made_for, dict) and made_for.get("name_or_path"):
        reader.notes.append(f"was made for {made_for['name_or_path']}")
    reader.format = "speculators"
    kept = {key: value for key, value in layer.items() if key in NEUTRAL or key in _DECIDING}
    return {**kept, "model_type": family, **{key: config[key] for key in config.keys() - _BOOKKEEPING}}
