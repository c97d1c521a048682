"""The formats of packed weights that are read, by `quant_method` of a `config.json`, and a folder's tensors made plain."""

from typing import Any

from specjax.models.errors import ModelError
from specjax.models.fields import an_object, shown
from specjax.models.packed import awq, compressed_tensors, dfloat11, fp8, gptq, mxfp4
from specjax.models.packed.base import Format, Parts, Unpack
from specjax.models.tensors import FLOATS, Tensor

FORMATS: dict[str, Format] = {
    "compressed-tensors": compressed_tensors.COMPRESSED_TENSORS,
    "fp8": fp8.FP8,
    "awq": awq.AWQ,
    "gptq": gptq.GPTQ,
    "mxfp4": mxfp4.MXFP4,
}
"""By `quant_method`."""
FIELDS: dict[str, Format] = {"dfloat11_config": dfloat11.DFLOAT11}
"""By the field of a `config.json` that describes it, where that is another than `quantization_config`."""


def unpacker(config: dict[str, Any]) -> Unpack | None:
    """What unpacks the modules of a folder with this parsed `config.json`; None where nothing is packed.

    Raises:
      ModelError: where it names a format that is not read.
    """
    for field, form in FIELDS.items():
        if config.get(field) is not None:
            return form.read(an_object(field, config[field]))
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
    return FORMATS[method].read(said[0])


def unpacked(config: dict[str, Any], tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a folder, packed ones as plain ones under the names that those have. No weights are read.

    Args:
      config: the parsed `config.json`.
      tensors: of the folder, by name.

    Raises:
      ModelError: where they are not what the config says.
    """
    unpack = unpacker(config)
    if unpack is None:
        return tensors
    modules: dict[str, Parts] = {}
    for name, tensor in tensors.items():
        module, _, part = name.rpartition(".")
        modules.setdefault(module, {})[part] = tensor
    found = {module: unpack(module, parts) for module, parts in modules.items()}
    return {f"{module}.{part}".lstrip("."): one for module, parts in found.items() for part, one in parts.items()}
