"""Parts of several published layouts: windows, embedding tables, the draft's vocabulary, taps, and a mask."""

from typing import Any

import jax.numpy as jnp
import numpy as np

from specjax.draft.head import check_ids
from specjax.draft.heads.layout import Reader, is_embedding
from specjax.draft.heads.taps import Taps, read_taps
from specjax.models.errors import ModelError
from specjax.models.families import base
from specjax.models.fields import is_id, is_size
from specjax.sharding.distributed import to_host

MASKS = ("mask_token_id", "dspark_noise_token_id", "pard_token", "ptd_token_id")
"""Names of the mask's id; the first one found counts."""


def windows(reader: Reader, config: dict[str, Any], layers: int) -> tuple[int | None, tuple[bool, ...]]:
    """The window of the head's layers (None if they attend to everything), and which layers have it (empty: all)."""
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


def windowed(own: Any, window: int | None, sliding: tuple[bool, ...]) -> Any:
    """The config with the results of `windows`."""
    return base.mixers(own, lambda i: {"window": window if not sliding or sliding[i] else None})


def embedding(reader: Reader, config: dict[str, Any], target: Any, size: int) -> dict[str, Any]:
    """The head's own table, trained or not: if the head is narrower than the target, or the file's table differs."""
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
    """The head over the draft's vocabulary, and its ids if they are not all; nothing if the target's is borrowed."""
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


def _ids(reader: Reader, count: int, vocab: int) -> np.ndarray:
    """The target ids of the draft's ids: `d2t` holds offsets, `t2d` says which target ids there are."""
    offsets = reader.take("d2t", (count,)).astype(np.int64)
    known = reader.take("t2d", (vocab,)).astype(bool) if "t2d" in reader.tensors else None
    if reader.problems:
        return np.arange(count)
    if count == vocab and not offsets.any():
        return np.arange(count)  # if there is nothing to map, t2d may never have been filled in
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
    """The layers whose outputs are fused: the user's choice, or the file's."""
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


def mask_of(reader: Reader, config: dict[str, Any], target: Any) -> dict[str, Any]:
    """The embedding of the mask, from the file's table or the target's; the user's id takes precedence over the file's."""
    given = {"mask": reader.chosen["mask"]} if reader.chosen.get("mask", -1) != -1 else config
    key = next((key for key in ("mask", *MASKS) if given.get(key) is not None), None)
    if key is None:
        raise ModelError(
            f"{reader.file} names no mask: looked for {', '.join(MASKS)}; set the id that the head was trained with (mask=ID)"
        )
    number, table = given[key], reader.tensors.get("embed_tokens.weight")
    rows = target.lm.vocab_size if table is None else len(table)
    if not is_id(number) or number >= rows:
        raise ModelError(f"{reader.file}: {key} is {number!r}, and the table of embeddings has {rows} rows")
    if table is not None:
        return {"embedding": np.asarray(table[number : number + 1])}
    if target.abstract:
        return {"embedding": np.zeros((1, target.lm.config.hidden_size), np.float32)}
    return {"embedding": np.asarray(to_host(target.lm.embed(target.params, jnp.full((1, 1), number))[0]))}
