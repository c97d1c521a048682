"""The published layout of Chimera (kafkayu/Chimera): `trimlp.pt`, `fast_layer1.pt` and `chimera_head.pt` beside `config.json`.

The names of their tensors are numbers within each file, and differ from file to file.
"""

from typing import Any

from specjax.draft.feature import layers_config
from specjax.draft.heads.layout import Layout, Reader, Sure, check_flags
from specjax.models.errors import ModelError


def read(reader: Reader, config: dict[str, Any], target: Any) -> tuple[dict[str, Any], Any]:
    """Fields and parameters of a Chimera head. The layer has the target's own sizes, and each head one matrix."""
    check_flags(reader, config, "chimera_num_heads", "chimera_num_layers")
    size, vocab = target.lm.config.hidden_size, target.lm.vocab_size
    heads, own = int(config["chimera_num_heads"]), layers_config(target.lm, "chimera")
    if heads < 1:
        raise ModelError(f"{reader.file}: chimera_num_heads is {heads}: a head drafts at least one token")
    if (layers := config.get("chimera_num_layers", 1)) != 1:
        reader.notes.append(f"has chimera_num_layers={layers}, which its code does not use")
    params = {
        "trigram": reader.linear("0.linear", 3 * size, 3 * size, bias=True),
        "narrow": reader.linear("1", 3 * size, size),
        "layer": reader.layer("0", own, size) | {"attention_norm": reader.scale("0.input_layernorm", size)},
        "heads": [{"pair": reader.linear(f"{i}.0", 2 * size, vocab)} for i in range(heads)],
    }
    return {"heads": heads}, params


LAYOUT = Layout(
    read,
    said=lambda config: Sure.OWN if "chimera_num_heads" in config else Sure.NO,
    together=("trimlp", "fast_layer1", "chimera_head"),
)
