"""The layout of Clover-2's heads (XiaoBin1992/clover): its module's state, with the target's head and a copy of it."""

from typing import Any

from specjax.draft.heads.layout import Layout, Reader, check_flags, check_width, is_embedding, is_head, layer_config
from specjax.models.attention import AttentionConfig
from specjax.models.errors import ModelError
from specjax.models.ropes import RopeConfig

_MODULE = "clover_head_mlp"


def read(reader: Reader, config: dict[str, Any], target: Any) -> tuple[dict[str, Any], Any]:
    """Fields and parameters of a Clover-2 head.

    Its layers rotate whole heads with base 10,000, whatever the file says, because its code does so.
    """
    check_flags(reader, config, "bias", "medusa_num_heads", "medusa_num_layers", "num_heads", "num_layers")
    found = [name.split(".")[1] for name in reader.tensors if name.startswith("layers.")]
    layers = 1 + max((int(at) for at in found if at.isdigit()), default=-1)
    if not layers:
        raise ModelError(f"{reader.folder}: there is no tensor of a Clover-2 layer (layers.0.*)")
    own = layer_config(reader, config, target, layers)
    size, vocab = own.hidden_size, target.lm.vocab_size
    check_width(reader, size, target)
    own = own.every(RopeConfig, theta=10000.0).every(AttentionConfig, head_dim=size // own.near.num_attention_heads)
    params: dict[str, Any] = {
        "first": _regressive(reader, f"{_MODULE}_rnn", size),
        "next": _regressive(reader, f"{_MODULE}_rnn2", size),
        "layers": {i: _layer(reader, f"layers.{i}", own) for i in range(layers)},
        "norm": reader.scale("clover_norm", size),
        "augment": reader.linear(_MODULE, size, size, bias=True),
        "augment_next": reader.linear(f"{_MODULE}2", 2 * size, size, bias=True),
        "head_norm": reader.scale("clover_head_norm", size),
    }
    table = reader.take("clover_embed_tokens.weight", (vocab, size))
    if not is_embedding(table, target):
        params["embed"] = {"embedding": table}
    head = reader.tensors.pop("lm_head.weight", None)
    if head is not None and not is_head(head.T, target):
        raise ModelError(
            f"{reader.folder}: lm_head.weight is not the head of {target.name!r}: it belongs to another target"
        )
    return {"layers": layers, "config": own, "published": True}, params


def _regressive(reader: Reader, at: str, size: int) -> dict[str, Any]:
    made = {name: reader.linear(f"{at}.{name}", size, size, bias=True) for name in ("q", "k", "v")}
    return {**made, "norm": reader.scale(f"{at}.input_layernorm", size)}


def _layer(reader: Reader, at: str, own: Any) -> dict[str, Any]:
    layer = reader.layer(at, own, own.hidden_size)
    return {**layer, "attention_norm": reader.scale(f"{at}.input_layernorm", own.hidden_size)}


LAYOUT = Layout(read, held=lambda names: "clover_norm.weight" in names)
