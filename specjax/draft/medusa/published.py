"""The published layout of Medusa (FasterDecoding/Medusa)."""

from typing import Any

from specjax.draft.heads.layout import Layout, Reader, Sure, check_flags
from specjax.models.errors import ModelError

_MERGED = "medusa_head."


def read(reader: Reader, config: dict[str, Any], target: Any) -> tuple[dict[str, Any], Any]:
    """Fields and parameters of a Medusa head: tensors `{head}.{block}.linear` and, after the blocks, `{head}.{blocks}`."""
    check_flags(reader, config, "medusa_num_heads", "medusa_num_layers", "medusa_choices")
    _take_apart(reader, target)
    size, vocab = target.lm.config.hidden_size, target.lm.vocab_size
    heads = 1 + max((int(n.partition(".")[0]) for n in reader.tensors if n.partition(".")[0].isdigit()), default=-1)
    layers = int(config.get("medusa_num_layers", 1))
    if not heads:
        raise ModelError(f"{reader.folder}: there is no tensor of a Medusa head (0.0.linear.weight, ...)")
    made = [
        {
            "blocks": [reader.linear(f"{i}.{j}.linear", size, size, bias=True) for j in range(layers)],
            **reader.linear(f"{i}.{layers}", size, vocab),
        }
        for i in range(heads)
    ]
    return {"heads": heads, "layers": layers, "own_head": True}, {"heads": made}


def _take_apart(reader: Reader, target: Any) -> None:
    """Keeps only the heads of a Medusa-2 model, which was trained and saved together with them."""
    heads = {name.removeprefix(_MERGED): x for name, x in reader.tensors.items() if name.startswith(_MERGED)}
    if not heads:
        return
    reader.check_copy("model.embed_tokens.weight", target)
    reader.tensors, reader.format = heads, "medusa-2"
    if target.path is None or target.path.resolve() != reader.folder.resolve():
        reader.notes.append("was trained together with a target, which lies in the same folder and should be --model")


LAYOUT = Layout(
    read,
    said=lambda config: Sure.OWN if "medusa_num_heads" in config else Sure.NO,
    held=lambda names: "0.0.linear.weight" in names or f"{_MERGED}0.0.linear.weight" in names,
    stems=("medusa_lm_head",),
)
