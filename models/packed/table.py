"""The supported formats of packed weights, by `quant_method` of a `config.json`, and the unpacking of a folder's
tensors."""

from typing import Any

from specjax.models.errors import ModelError
from specjax.models.fields import an_object, shown
from specjax.models.packed import awq, bitsandbytes, compressed_tensors, dfloat11, fp8, gptq, mxfp4
from specjax.models.packed.base import Format, Parts, Unpack
from specjax.models.tensors import FLOATS, Tensor

FORMATS: dict[str, Format] = {
    "compressed-tensors": compressed_tensors.COMPRESSED_TENSORS,
    "fp8": fp8.FP8,
    "awq": awq.AWQ,
    "gptq": gptq.GPTQ,
    "mxfp4": mxfp4.MXFP4,
    "bitsandbytes": bitsandbytes.BITSANDBYTES,
}
"""The formats by `quant_method`."""
FIELDS: dict[str, Format] = {"dfloat11_config": dfloat11.DFLOAT11}
"""Formats by the field of `config.json` that describes them, if it is not `quantization_config`."""


def found(config: dict[str, Any]) -> tuple[Format, Unpack] | None:
    """The format of a folder with this parsed `config.json`, and a function that unpacks its modules; None if nothing
    is packed.

    Raises:
      ModelError: if the format is not supported.
    """
    for field, form in FIELDS.items():
        if config.get(field) is not None:
            return form, form.read(an_object(field, config[field]))
    own = [said.get("quantization_config") for said in (config, an_object("text_config", config.get("text_config")))]
    said = [an_object("quantization_config", one) for one in own if one is not None]
    if not said:
        return None
    method = said[0].get("quant_method")
    if not isinstance(method, str) or method not in FORMATS:
        read = ", ".join(FORMATS)
        raise ModelError(
            f"config.json has a quantization_config of quant_method {shown(method)}; weights are read in "
            f"{', '.join(kind.name for kind in FLOATS.values())}, and packed in {read}"
        )
    return FORMATS[method], FORMATS[method].read(said[0])


def outline(config: dict[str, Any]) -> Any:
    """A function from a parameter's path and shape to its leaf if a folder with this config is kept packed.

    None if only the weights determine the leaf."""
    said = an_object("quantization_config", config.get("quantization_config"))
    return mxfp4.outline if said.get("quant_method") == "mxfp4" else None


def unpacked(config: dict[str, Any], tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a folder, with packed tensors in plain form under plain names. No weights are read.

    Args:
      config: the parsed `config.json`.
      tensors: of the folder, by name.

    Raises:
      ModelError: if they are not as the config says.
    """
    packed = found(config)
    if packed is None:
        return tensors
    (form, unpack), modules = packed, dict[str, Parts]()
    for name, tensor in tensors.items():
        module, part = form.split(name)
        modules.setdefault(module, {})[part] = tensor
    made = {module: unpack(module, parts) for module, parts in modules.items()}
    return {f"{module}.{part}".lstrip("."): one for module, parts in made.items() for part, one in parts.items()}
