"""The published layouts of EAGLE-1/2 and EAGLE-3 (SafeAILab/EAGLE, SpecForge, NVIDIA's ModelOpt)."""

from typing import Any

import numpy as np

from specjax.draft.head import check_ids
from specjax.draft.heads.layout import Reader, check_flags, check_width, layer_config
from specjax.draft.heads.taps import IDS, Taps, read_taps
from specjax.models.errors import ModelError

_EAGLE3_FLAGS = ("draft_vocab_size", "norm_before_residual", "norm_before_fc", "eagle_config", IDS)


def eagle1(reader: Reader, config: dict[str, Any], target: Any) -> tuple[dict[str, Any], Any]:
    """Fields and parameters of an EAGLE-1 or EAGLE-2 head."""
    check_flags(reader, config, "bias")
    own = layer_config(reader, config, target)
    check_width(reader, own.hidden_size, target)
    if config.get("num_hidden_layers", 1) != 1:
        raise ModelError(
            f"{reader.file}: num_hidden_layers is {config['num_hidden_layers']}; heads of one layer are read"
        )
    size = own.hidden_size
    fc = reader.linear("fc", 2 * size, size, bias=config.get("bias", True))
    fc.setdefault("bias", np.zeros((size,), np.float32))
    reader.check_copy("embed_tokens.weight", target)
    return {"config": own}, {"fc": fc, "layer": reader.layer("layers.0", own, size)}


def eagle3(reader: Reader, config: dict[str, Any], target: Any) -> tuple[dict[str, Any], Any]:
    """Fields and parameters of an EAGLE-3 head."""
    check_flags(reader, config, *_EAGLE3_FLAGS)
    own = layer_config(reader, config, target)
    check_width(reader, own.hidden_size, target)
    if config.get("num_hidden_layers", 1) != 1:
        raise ModelError(
            f"{reader.file}: num_hidden_layers is {config['num_hidden_layers']}; heads of one layer are read"
        )
    size, vocab = own.hidden_size, target.lm.vocab_size
    taps = _taps(reader, config, target)
    count = int(config.get("draft_vocab_size") or vocab)
    at = "midlayer" if any(name.startswith("midlayer.") for name in reader.tensors) else "layers.0"
    layer = reader.layer(at, own, 2 * size)
    params = {
        "fc": reader.linear("fc", len(taps) * size, size),
        "input_norm": reader.scale(f"{at}.input_layernorm", size),
        "hidden_norm": reader.scale(f"{at}.hidden_norm", size),
        "mlp_norm": layer["mlp_norm"],
        "attention": layer["attention"],
        "mlp": layer["mlp"],
        "norm": reader.scale("norm", size),
        "head": reader.linear("lm_head", size, count),
    }
    flags = {flag: bool(config.get(flag, False)) for flag in ("norm_before_residual", "norm_before_fc")}
    if flags["norm_before_fc"]:
        params["fc_norm"] = reader.scale("fc_norm", len(taps) * size)
    reader.check_copy("embed_tokens.weight", target)
    if count < vocab or "d2t" in reader.tensors:
        params["ids"] = _ids(reader, count, vocab)
    return {"config": own, "taps": taps, **flags}, params


def _ids(reader: Reader, count: int, vocab: int) -> np.ndarray:
    """Target ids of the draft's: `d2t` holds offsets, `t2d` says which target ids there are."""
    offsets = reader.take("d2t", (count,)).astype(np.int64)
    known = reader.take("t2d", (vocab,)).astype(bool) if "t2d" in reader.tensors else None
    if reader.problems:
        return np.arange(count)
    try:
        ids = check_ids(np.arange(count) + offsets, vocab)
    except ValueError as error:
        raise ModelError(f"{reader.folder}: d2t holds offsets from draft to target ids: {error}") from error
    if known is not None and (known.sum() != count or not known[ids].all()):
        raise ModelError(f"{reader.folder}: t2d and d2t name different target ids")
    return ids


def _taps(reader: Reader, config: dict[str, Any], target: Any) -> tuple[int, ...]:
    """The layers whose outputs are fused: those that the user chose, or what the file says."""
    nested = config.get("eagle_config") or {}
    unknown = sorted(set(nested) - {IDS, "use_aux_hidden_state"})
    if unknown:
        raise ModelError(f"{reader.folder}: config.json has the unknown flag eagle_config.{unknown[0]}")
    if reader.chosen.get("taps"):
        found = Taps(tuple(reader.chosen["taps"]), "as asked for")
    else:
        try:
            found = read_taps(config, target.lm.num_layers)
        except ValueError as error:
            raise ModelError(f"{reader.file}: {error}") from error
    layers = ", ".join(map(str, found.layers))
    reader.notes.append(f"taps the outputs of layers {layers} of {target.lm.num_layers}: {found.why}")
    return found.layers
