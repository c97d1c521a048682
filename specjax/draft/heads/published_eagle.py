"""The published layouts of EAGLE-1/2 and EAGLE-3 (SafeAILab/EAGLE, SpecForge, NVIDIA's ModelOpt, speculators)."""

from typing import Any

import numpy as np

from specjax.draft.head import check_ids
from specjax.draft.heads import speculators
from specjax.draft.heads.layout import Reader, check_flags, check_width, is_embedding, layer_config
from specjax.draft.heads.taps import IDS, Taps, read_taps
from specjax.models.attention import AttentionConfig
from specjax.models.errors import ModelError
from specjax.models.families import base
from specjax.models.fields import is_size

_NORMS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
_EAGLE3_FLAGS = (
    *_NORMS, IDS, "aux_hidden_state_layer_ids", "target_layer_ids", "num_target_layers", "draft_vocab_size", "eagle_config",
    "target_hidden_size", "embed_requires_grad",
)  # fmt: skip
_NESTED = {
    IDS: None, "use_aux_hidden_state": (None, True), "use_input_layernorm_in_first_layer": (None, True),
    "use_last_layernorm": (None, True), "use_mtp_layernorm": (None, False), "next_layer_regular": (None, True),
    "parallel_draft_step": (None, 1), "parallel_draft_heads_num_layers": None, "norm_before_fc": None,
}  # fmt: skip
"""Flags inside an `eagle_config`, and the values that EAGLE-3 has; None: any."""


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


def eagle3(reader: Reader, config: dict[str, Any], target: Any, kind: str = "eagle3") -> tuple[dict[str, Any], Any]:
    """Fields and parameters of an EAGLE-3 or EAGLE-3.1 head, which may be narrower than its target; `kind` is what
    speculators calls it."""
    if speculators.is_one(config):
        config = speculators.flattened(reader, config, kind)
    check_flags(reader, config, *_EAGLE3_FLAGS)
    nested = _checked_nested(reader, config)
    at = "midlayer" if any(name.startswith("midlayer.") for name in reader.tensors) else "layers.0"
    own = _layer_config(reader, config, target, at)
    size, wide = own.hidden_size, target.lm.config.hidden_size
    key = "target_hidden_size" if config.get("target_hidden_size") else "hidden_size"
    check_width(reader, config.get(key, size), target, key)
    taps = read_ids(reader, config, target)
    layer = reader.layer(at, own, 2 * size)
    params: dict[str, Any] = {
        "fc": reader.linear("fc", len(taps) * wide, size),
        "input_norm": reader.scale(f"{at}.input_layernorm", size),
        "hidden_norm": reader.scale(f"{at}.hidden_norm", size),
        "mlp_norm": layer["mlp_norm"],
        "attention": layer["attention"],
        "mlp": layer["mlp"],
        "norm": reader.scale("norm", size),
        **embedding(reader, config, target, size),
        **vocabulary_head(reader, config, target, size),
    }
    flags = _norms(reader, {**config, **nested})
    if flags["norm_before_fc"]:
        params["fc_norm"] = reader.scale("input_norm", len(taps) * wide)
    if flags["fc_norm"]:
        params["tap_norms"] = {j: reader.scale(f"fc_norm.{j}", wide) for j in range(len(taps))}
    if own.num_hidden_layers > 1:
        params["more"] = {i - 1: _ordinary(reader, i, own) for i in range(1, own.num_hidden_layers)}
    return {"config": own, "layers": own.num_hidden_layers, "taps": taps, **flags}, params


def _ordinary(reader: Reader, i: int, own: Any) -> dict[str, Any]:
    """A layer after the first, which is a target's in all respects."""
    layer = reader.layer(f"layers.{i}", own, own.hidden_size)
    return {**layer, "attention_norm": reader.scale(f"layers.{i}.input_layernorm", own.hidden_size)}


def _layer_config(reader: Reader, config: dict[str, Any], target: Any, at: str) -> Any:
    """The layers' config: as many as there are tensors of, biases as the tensors have them, windows as `layer_types` say.

    SafeAILab's and SpecForge's code has one layer whatever `num_hidden_layers` says, and no biases whatever `attention_bias`
    says; speculators' has as many as it says.
    """
    if any(name.startswith("additional_layers.") for name in reader.tensors):
        raise ModelError(
            f"{reader.folder}: additional_layers.* are layers of a fork of SGLang, whose rule nobody has published a head for"
        )
    found = [
        int(at) for at in (name.split(".")[1] for name in reader.tensors if name.startswith("layers.")) if at.isdigit()
    ]
    layers = 1 + max(found, default=0)
    if reader.format == "speculators":
        layers = config.get("num_hidden_layers", layers)
    own = layer_config(reader, config, target, layers)
    has = lambda name: f"{at}.self_attn.{name}_proj.bias" in reader.tensors
    must = bool(config.get("qkv_bias")) or reader.format == "speculators" and own.near.qkv_bias
    window, sliding = windows(reader, config, layers)
    biases = {"qkv_bias": must or has("q"), "o_bias": has("o")}
    return windowed(own.every(AttentionConfig, **biases), window, sliding)


def windowed(own: Any, window: int | None, sliding: tuple[bool, ...]) -> Any:
    """The config with what `windows` found."""
    return base.mixers(own, lambda i: {"window": window if not sliding or sliding[i] else None})


def windows(reader: Reader, config: dict[str, Any], layers: int) -> tuple[int | None, tuple[bool, ...]]:
    """The window of the head's layers, None where they attend to everything, and which have it (empty: all)."""
    window, kinds = config.get("sliding_window"), config.get("layer_types")
    if kinds is None:  # the rule of Qwen's configurations
        first = config.get("max_window_layers")
        on = bool(config.get("use_sliding_window")) and isinstance(first, int)
        sliding = [on and i >= first for i in range(layers)]
    elif not isinstance(kinds, list) or len(set(map(str, kinds))) != 1 and len(kinds) != layers:
        raise ModelError(
            f"{reader.file}: layer_types is {kinds!r}, which must name the kind of each of {layers} layers"
        )
    else:
        sliding = [kinds[min(i, len(kinds) - 1)] == "sliding_attention" for i in range(layers)]
    if not any(sliding):
        if window is not None and config.get("use_sliding_window", True):
            reader.notes.append(f"attends to everything: nothing says that a layer has the sliding_window of {window}")
        return None, ()
    if not is_size(window):
        raise ModelError(f"{reader.file}: sliding_window must be a number of tokens, not {window!r}")
    where = "" if all(sliding) else f" in {sum(sliding)} of {layers} layers"
    reader.notes.append(f"attends to its last {window} tokens{where}")
    return window, () if all(sliding) else tuple(sliding)


def _norms(reader: Reader, config: dict[str, Any]) -> dict[str, bool]:
    """The flags of the head's norms."""
    flags = {name: bool(config.get(name)) for name in _NORMS}
    if flags["norm_before_fc"] and flags["fc_norm"]:
        raise ModelError(
            f"{reader.file}: norm_before_fc and fc_norm are both true, and each leaves no place for the other"
        )
    if "norm_output" in reader.chosen:
        flags["norm_output"] = bool(reader.chosen["norm_output"])
    elif flags["norm_output"] and reader.format != "speculators" and not flags["fc_norm"]:
        reader.notes.append(
            "feeds on its normed outputs (norm_output); SpecForge once wrote this flag for another thing: if acceptance falls "
            "with depth, try norm_output=false"
        )
    return flags


def embedding(reader: Reader, config: dict[str, Any], target: Any, size: int) -> dict[str, Any]:
    """A table of the head's own, trained or not: where it is narrower than the target, or where the file's is another."""
    shape, same = (target.lm.vocab_size, size), size == target.lm.config.hidden_size
    if "embed_tokens.weight" not in reader.tensors and same:
        return {}
    table = reader.take("embed_tokens.weight", shape)
    trained = bool(config.get("embed_requires_grad"))
    if same and not (target.abstract and trained) and is_embedding(table, target):
        return {}
    doubt = ", though nothing says that they were trained: it may belong to another target" * (same and not trained)
    reader.notes.append(f"has embeddings of its own{doubt}")
    return {"embed": {"embedding": table}}


def vocabulary_head(reader: Reader, config: dict[str, Any], target: Any, size: int) -> dict[str, Any]:
    """The head over the draft's vocabulary, and its ids where they are not all; nothing where the target's is borrowed."""
    vocab, stored = target.lm.vocab_size, reader.tensors.get("lm_head.weight")
    count = config.get("draft_vocab_size") or (vocab if stored is None else len(stored))
    if stored is None and count == vocab and size == target.lm.config.hidden_size:
        reader.notes.append("borrows the target's language-model head")
        kernel = {}
    else:
        kernel = {"head": reader.linear("lm_head", size, count)}
    if count < vocab or "d2t" in reader.tensors:
        ids = _ids(reader, count, vocab)
        kernel |= {"ids": ids} if count < vocab else {}
    return kernel


def _checked_nested(reader: Reader, config: dict[str, Any]) -> dict[str, Any]:
    """What stands in `eagle_config`.

    Raises:
      ModelError: on a flag that is not known, or has a value that makes another head of it.
    """
    nested = config.get("eagle_config") or {}
    for key in sorted(nested):
        if key not in _NESTED:
            raise ModelError(f"{reader.file} has the unknown flag eagle_config.{key}")
        allowed = _NESTED[key]
        if allowed is not None and nested[key] not in allowed:
            raise ModelError(
                f"{reader.file}: eagle_config.{key} is {nested[key]!r}; EAGLE-3 heads have {allowed[-1]!r} there"
            )
    return nested


def _ids(reader: Reader, count: int, vocab: int) -> np.ndarray:
    """Target ids of the draft's: `d2t` holds offsets, `t2d` says which target ids there are."""
    offsets = reader.take("d2t", (count,)).astype(np.int64)
    known = reader.take("t2d", (vocab,)).astype(bool) if "t2d" in reader.tensors else None
    if reader.problems:
        return np.arange(count)
    if count == vocab and not offsets.any():
        return np.arange(count)  # where there is nothing to map, t2d may never have been filled in
    if known is not None and np.array_equal(offsets, np.flatnonzero(known)):
        raise ModelError(f"{reader.folder}: d2t holds target ids, and must hold offsets from draft to target ids")
    try:
        ids = check_ids(np.arange(count) + offsets, vocab)
    except ValueError as error:
        raise ModelError(f"{reader.folder}: d2t holds offsets from draft to target ids: {error}") from error
    if known is not None and (known.sum() != count or not known[ids].all()):
        raise ModelError(f"{reader.folder}: t2d and d2t name different target ids")
    return ids


def read_ids(reader: Reader, config: dict[str, Any], target: Any) -> tuple[int, ...]:
    """The layers whose outputs are fused: those that the user chose, or what the file says."""
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
