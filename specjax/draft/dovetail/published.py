"""The published layout of Dovetail (ddInference/Dovetail): its module's state, with copies of the target's table and head."""

from typing import Any

from specjax.draft.eagle.published import layers_of
from specjax.draft.heads.layout import Layout, Reader, check_flags, check_width, is_head, layer_config
from specjax.models.errors import ModelError


def read(reader: Reader, config: dict[str, Any], target: Any) -> tuple[dict[str, Any], Any]:
    """Fields and parameters of a Dovetail head of `num_hidden_layers` layers. `W_1`, `W_2` and `W_z` are `[in, out]`.

    Raises:
      ModelError: for another width, vocabulary, table or head than the target's, for a number of layers below 1, and for
        unknown flags.
    """
    check_flags(reader, config, "bias")
    layers = config.get("num_hidden_layers", 1)
    if layers < 1:
        raise ModelError(f"{reader.file}: num_hidden_layers is {layers}, and a head has at least 1")
    own = layer_config(reader, config, target, layers)
    size = own.hidden_size
    check_width(reader, size, target)
    reader.check_copy("embed_tokens.weight", target)
    head = reader.tensors.pop("lm_head.weight", None)
    if head is not None and not is_head(head.T, target):
        raise ModelError(
            f"{reader.folder}: lm_head.weight is not the head of {target.name!r}: the head belongs to another target"
        )
    kernel = lambda name, inputs: {"kernel": reader.take(name, (inputs, size))}
    params = {
        "token_norm": reader.scale("input_layernorm", size),
        "feature": kernel("W_1", size),
        "token": kernel("W_2", size),
        "share": kernel("W_z", 2 * size),
    }
    return {"config": own, "layers": layers}, params | layers_of(reader, own)


LAYOUT = Layout(read, held=lambda names: "W_z" in names)
