"""The tensors of a DiffusionGemma folder: their names, those stored twice, and those that the text model does not
read."""

from typing import Any

from specjax.models.byte_ranges import equal
from specjax.models.errors import ModelError
from specjax.models.tensors import Tensor

_ENCODER = "model.encoder.language_model."
_VISION = ("model.encoder.vision_tower.", "model.encoder.embed_vision.")


def hf_name(path: tuple[Any, ...]) -> tuple[str, bool]:
    """The Hugging Face name of a parameter, and whether its matrices are stored transposed (`[..., out, in]`)."""
    keys = [getattr(key, "key", key) for key in path]
    last = ".weight" if keys[-1] in ("kernel", "scale", "embedding") else ""
    match keys:
        case ["layers", layer, "encoder_scale"]:
            return f"model.encoder.language_model.layers.{layer}.layer_scalar", False
        case ["layers", layer, "decoder_scale"]:
            module, last = f"layers.{layer}.layer_scalar", ""
        case ["layers", layer, "router", "scale" | "per_expert_scale" as name]:
            module, last = f"layers.{layer}.router.{name}", ""
        case ["layers", layer, "router", "proj", _]:
            module = f"layers.{layer}.router.proj"
        case ["layers", layer, "experts", name, _]:
            return f"model.decoder.layers.{layer}.experts.{name}_proj", True
        case ["layers", layer, "attention", "q_norm" | "k_norm" as name, _]:
            module = f"layers.{layer}.self_attn.{name}"
        case ["layers", layer, "attention", name, _]:
            module = f"layers.{layer}.self_attn.{name}_proj"
        case ["layers", layer, "mlp", name, _]:
            module = f"layers.{layer}.mlp.{name}_proj"
        case ["layers", layer, norm, _]:
            module = f"layers.{layer}.{norm}"
        case ["self_conditioning", "pre_norm", _]:
            module = "self_conditioning.pre_norm"
        case ["self_conditioning", name, _]:
            module = f"self_conditioning.{name}_proj"
        case ["embed", _]:
            module = "embed_tokens"
        case _:
            module = ".".join(map(str, keys[:-1]))
    return f"model.decoder.{module}{last}", keys[-1] == "kernel"


def text_tensors(tensors: dict[str, Tensor], share: tuple[int, int] = (0, 1)) -> dict[str, Tensor]:
    """The tensors of the text model, each once, under the decoder's names; the vision part's tensors are left out.

    The encoder shares all tensors except its layers' scalars with the decoder, and the head shares the embedding. A
    file may hold a shared tensor under either name, or under both.

    Args:
      tensors: the folder's tensors by name.
      share: the part of the tensors stored twice that is compared here; see `specjax.models.byte_ranges.equal`.

    Raises:
      ModelError: if the two copies of a shared tensor differ.
    """
    found = {name: tensor for name, tensor in tensors.items() if not name.startswith(_VISION)}
    for name in list(found):
        if name == "lm_head.weight":
            shared = "model.decoder.embed_tokens.weight"
        elif name.startswith(_ENCODER) and not name.endswith(".layer_scalar"):
            shared = "model.decoder." + name.removeprefix(_ENCODER)
        else:
            continue
        tensor = found.pop(name)
        kept = found.setdefault(shared, tensor)
        if kept is not tensor and not equal(kept, tensor, share):
            raise ModelError(f"{name} differs from {shared}, but tie_word_embeddings is true")
    return found
