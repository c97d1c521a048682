"""The published layout of Gumiho (AMD-AIG-AIMA/Gumiho): EAGLE-1's names, more layers, and MLPs."""

from collections.abc import Collection
from typing import Any

from specjax.draft.eagle.published import layers_of
from specjax.draft.gumiho import SERIAL
from specjax.draft.gumiho.network import BLOCKS
from specjax.draft.heads.layout import Layout, Reader, check_flags, check_width, layer_config
from specjax.models.errors import ModelError


def read(reader: Reader, config: dict[str, Any], target: Any) -> tuple[dict[str, Any], Any]:
    """Fields and parameters of a Gumiho head. Files name MLP i `mlp.i`, or `mlp.mlp.i` as the authors' drafter does."""
    check_flags(reader, config, "bias")
    reader.tensors = {_renamed(name): x for name, x in reader.tensors.items()}
    layers, mlps = (_count(reader.tensors, part) for part in ("layers.", "mlp."))
    if not layers or not mlps:
        raise ModelError(f"{reader.folder}: there is no tensor of a layer (layers.0.*), or none of an MLP (mlp.0.*)")
    own = layer_config(reader, config, target, layers)
    size = own.hidden_size
    check_width(reader, size, target)
    reader.check_copy("embed_tokens.weight", target)
    params: dict[str, Any] = {
        "fc": reader.linear("fc", 2 * size, size, bias=True),
        "mlps": [_mlp(reader, f"mlp.{i}", size) for i in range(mlps)],
    }
    params |= layers_of(reader, own)
    return {"config": own, "layers": layers, "mlps": mlps}, params


def _mlp(reader: Reader, at: str, size: int) -> dict[str, Any]:
    first, *blocks = (
        reader.linear(f"{at}.{j}.linear", size if j else SERIAL * size, size, bias=True) for j in range(1 + BLOCKS)
    )
    return {"input": first, "blocks": blocks}


def _renamed(name: str) -> str:
    return name.removeprefix("mlp.") if name.startswith("mlp.mlp.") else name


def _count(names: Collection[str], part: str) -> int:
    """How many numbers follow a prefix in the names, from 0 on."""
    found = (name.removeprefix(part).partition(".")[0] for name in names if name.startswith(part))
    return 1 + max((int(number) for number in found if number.isdigit()), default=-1)


LAYOUT = Layout(read, held=lambda names: any(name.startswith(("mlp.0.0.", "mlp.mlp.0.0.")) for name in names))
