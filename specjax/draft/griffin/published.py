"""The published layout of GRIFFIN (hsj576/GRIFFIN)."""

from typing import Any

from specjax.draft.eagle.published import layer_of
from specjax.draft.heads.layout import Layout, Reader


def read(reader: Reader, config: dict[str, Any], target: Any) -> tuple[dict[str, Any], Any]:
    """Fields and parameters of a GRIFFIN head. Its `fc` always has a bias, whatever `bias` says."""
    own = layer_of(reader, config, target)
    size, inner = own.hidden_size, own.dense.intermediate_size
    linear = lambda name, *shape: reader.linear(f"fc.mlp.{name}_proj", *shape, bias=own.dense.bias)
    params = {
        "fc": reader.linear("fc.fc", 2 * size, size, bias=True),
        "fc_norm": reader.scale("fc.post_attention_layernorm", size),
        "both_norm": reader.scale("fc.mlp.input_layernorm", size),
        "both": {"up": linear("up", 2 * size, inner), "down": linear("down", inner, size)},
        "layer": reader.layer("layers.0", own, size, outputs=2),
    }
    return {"config": own}, params


LAYOUT = Layout(read, held=lambda names: "fc.mlp.input_layernorm.weight" in names)
