"""The published layouts of DFlash (z-lab, SpecForge, DeepSpec, speculators), and the part that DSpark's share with them."""

from collections.abc import Mapping
from typing import Any

from specjax.draft.dflash import published_taps
from specjax.draft.heads import speculators
from specjax.draft.heads.layout import Layout, Reader, Sure, check_flags, check_width, layer_config, named
from specjax.draft.heads.parts import MASKS, embedding, mask_of, read_ids, vocabulary_head, windowed, windows
from specjax.draft.windows import Windows
from specjax.models.errors import ModelError
from specjax.models.fields import an_object, is_size

_TAPS = ("target_layer_ids", "aux_hidden_state_layer_ids")
_FLAGS = (
    "dflash_config", "block_size", "num_target_layers", "is_causal", "draft_vocab_size", "target_hidden_size",
    "embed_requires_grad", "sample_from_anchor", "shift_label", "sliding_window_non_causal", "attention_sink_bias",
    "pure_draft_prefix_len", "emb_dim", "gru_hidden_dim", *_TAPS,
)  # fmt: skip
_NESTED = (
    "block_size", "causal", "causal_head", "use_swa", "swa_window_size", "target_layer_ids", "attention_mode", "shift_label",
    "pure_draft_prefix_len", "emb_dim", "gru_hidden_dim",
)  # fmt: skip
_EITHER = (
    "projector_type", "markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov",
    "confidence_head_alpha", "num_anchors", "lambda_base_start", "lambda_base_decay_ratio", "auf", "ce_loss_alpha",
    "l1_loss_alpha", "loss_decay_gamma", "conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k",
    "input_embedding_scale", "output_multiplier", "final_logit_softcapping", *MASKS,
)  # fmt: skip
"""Fields in `dflash_config` or beside it, of all heads with DFlash's layers; some concern their training."""


def read(reader: Reader, config: dict[str, Any], target: Any) -> tuple[dict[str, Any], Any]:
    """Fields and parameters of a DFlash head."""
    config = read_config(reader, config, "dflash")
    if config.get("markov_rank"):
        raise ModelError(
            f"{reader.file}: markov_rank is {config['markov_rank']!r}: a head for another drafter than dflash (try dspark)"
        )
    if is_second(config):
        raise ModelError(f"{reader.file}: a head with convolutions is for another drafter than dflash (try dflash2)")
    return read_block(reader, config, target)


def read_config(reader: Reader, config: dict[str, Any], kind: str) -> dict[str, Any]:
    """The flags of a head of `kind`, at one level.

    Raises:
      ModelError: for unknown flags, and for flags of another kind.
    """
    if speculators.is_one(config):
        config = speculators.flattened(reader, config, kind)
    check_flags(reader, config, *_FLAGS, *_EITHER)
    config = _unnested(reader, config)
    projector = config.get("projector_type") or kind
    if projector != kind:
        raise ModelError(f"{reader.file}: projector_type is {projector!r}: a head for another drafter than {kind}")
    if config.get("attention_mode") not in (None, "gqa", "mha"):  # which only checks the number of kv-heads
        raise ModelError(f"{reader.file}: attention_mode is {config['attention_mode']!r}; 'gqa' and 'mha' are read")
    return config


def read_block(
    reader: Reader, config: dict[str, Any], target: Any, from_anchor: bool = False
) -> tuple[dict[str, Any], Any]:
    """Fields and parameters of the layers that DFlash and DSpark share; `from_anchor` applies if the file does not say it."""
    _refuse(reader, config, target)
    own = _layers(reader, config, target)
    size, wide = own.hidden_size, target.lm.config.hidden_size
    key = "target_hidden_size" if config.get("target_hidden_size") else "hidden_size"
    check_width(reader, config.get(key) or size, target, key)
    if not any(config.get(name) for name in _TAPS):
        config = {**config, "target_layer_ids": list(published_taps(target.lm.num_layers, own.num_hidden_layers))}
        reader.notes.append("names no layers that it reads: those of z-lab's rule are taken")
    taps = read_ids(reader, config, target)
    _check_order(reader, config, target, taps)
    params = {
        "fc": reader.linear("fc", len(taps) * wide, size),
        "hidden_norm": reader.scale("hidden_norm", size),
        "norm": reader.scale("norm", size),
        "layers": {i: _layer(reader, i, own) for i in range(own.num_hidden_layers)},
        "mask": mask_of(reader, config, target),
        **embedding(reader, config, target, size),
        **vocabulary_head(reader, config, target, size),
    }
    block = config.get("block_size", 8 if reader.format == "speculators" else 16)
    if not is_size(block):
        raise ModelError(f"{reader.file}: block_size must be a number of slots, not {block!r}")
    causal = bool(config.get("causal_head") or config.get("is_causal", config.get("causal")))
    fields = {"config": own, "layers": own.num_hidden_layers, "taps": taps, "block": block, "causal": causal}
    fields |= {"windows": _windows(reader, config), "from_anchor": _from_anchor(reader, config, from_anchor)}
    return fields, params


def _check_order(reader: Reader, config: dict[str, Any], target: Any, taps: tuple[int, ...]) -> None:
    """Raises ModelError for ids in another order than the target computes them, and notes where the original reads
    elsewhere.
    """
    key = next((key for key in _TAPS if config.get(key)), _TAPS[0])
    ids = list(config.get(key) or taps)
    if ids != sorted(ids):
        raise ModelError(
            f"{reader.file}: {key} {ids} are not ascending: z-lab's code orders the columns of fc by this list, others by "
            "layer; sort the ids, and the columns with them"
        )
    if taps[-1] == target.lm.num_layers - 1 and reader.format != "speculators":
        reader.notes.append("reads the last layer before the final norm; z-lab's own code reads it after that")


def _unnested(reader: Reader, config: dict[str, Any]) -> dict[str, Any]:
    """The config with the contents of `dflash_config` beside the rest."""
    nested = an_object("dflash_config", config.get("dflash_config"))
    unknown = sorted(set(nested) - set(_NESTED) - set(_EITHER))
    if unknown:
        raise ModelError(f"{reader.file} has the unknown flag dflash_config.{unknown[0]} ({nested[unknown[0]]!r})")
    return {**config, **nested}


def _refuse(reader: Reader, config: dict[str, Any], target: Any) -> None:
    """Raises ModelError for parts that are not read, and for a head of another target."""
    if config.get("attention_sink_bias") or config.get("use_swa"):
        key = "attention_sink_bias" if config.get("attention_sink_bias") else "dflash_config.use_swa"
        raise ModelError(f"{reader.file}: {key} is on; only heads without it are supported")
    neutral = {
        "input_embedding_scale": 1,
        "output_multiplier": 1,
        "final_logit_softcapping": target.lm.config.head.soft_cap,
    }
    if key := next((key for key, usual in neutral.items() if (config.get(key) or usual) != usual), None):
        raise ModelError(
            f"{reader.file}: {key} is {config[key]!r}: only heads of dflash2 have factors and caps other than the target's"
        )
    layers = config.get("num_target_layers", target.lm.num_layers)
    if layers != target.lm.num_layers:
        raise ModelError(
            f"{reader.file}: num_target_layers is {layers}, and {target.name!r} has {target.lm.num_layers}: the head belongs "
            "to another target"
        )


def _layers(reader: Reader, config: dict[str, Any], target: Any) -> Any:
    """The `ModelConfig` of the head's layers, with their windows."""
    count = config.get("num_hidden_layers")
    if not is_size(count):
        raise ModelError(f"{reader.file}: num_hidden_layers must be a number of layers, not {count!r}")
    own = layer_config(reader, config, target, count)
    window, sliding = windows(reader, config, count)
    return windowed(own, window, sliding)


def _windows(reader: Reader, config: dict[str, Any]) -> Windows:
    """What slots see in layers with a window: in speculators' code the window before the block, otherwise the one
    before themselves.
    """
    if reader.format == "speculators":
        return Windows(causal=not config.get("sliding_window_non_causal"), from_start=True)
    return Windows(causal=config.get("is_causal", config.get("causal")) is not False)


def _layer(reader: Reader, i: int, own: Any) -> dict[str, Any]:
    layer = reader.layer(f"layers.{i}", own, own.hidden_size)
    return {**layer, "attention_norm": reader.scale(f"layers.{i}.input_layernorm", own.hidden_size)}


def _from_anchor(reader: Reader, config: dict[str, Any], usual: bool) -> bool:
    """Whether the last token's slot predicts the next one.

    In DeepSpec's files it does, and they have no flag for it; `usual` is the value for other files without a flag.
    """
    if "from_anchor" in reader.chosen:
        return bool(reader.chosen["from_anchor"])
    said = [config[key] for key in ("sample_from_anchor", "shift_label") if config.get(key) is not None]
    if said:
        return any(said)
    if reader.format == "speculators" and not usual:
        return False
    if usual or "num_anchors" in config or "markov_rank" in config:
        reader.notes.append("drafts from its first slot, as DeepSpec's heads do: from_anchor=false if it does not")
        return True
    return False


def is_block(config: Mapping[str, Any]) -> bool:
    """Whether only files of blocks have such fields."""
    return "dflash_config" in config or "num_anchors" in config


def rank_of(config: Mapping[str, Any]) -> Any:
    """The rank of the Markov head, which DSpark's files have and DFlash's lack."""
    return an_object("dflash_config", config.get("dflash_config")).get("markov_rank", config.get("markov_rank"))


def projector_of(config: Mapping[str, Any]) -> Any:
    """What corrects the block's logits, by SpecForge's name for it; None where the file does not say it."""
    return an_object("dflash_config", config.get("dflash_config")).get("projector_type", config.get("projector_type"))


def is_causal_head(config: Mapping[str, Any]) -> bool:
    """Whether a file is JetSpec's: no slot sees a later one, in any layer."""
    return bool(an_object("dflash_config", config.get("dflash_config")).get("causal_head"))


def is_second(config: Mapping[str, Any]) -> bool:
    """Whether a file is DFlash 2's: its layers have convolutions."""
    nested = an_object("dflash_config", config.get("dflash_config"))
    return bool(nested.get("conv_kernel_size", config.get("conv_kernel_size"))) or named(config, "dflash2")


def _said(config: Mapping[str, Any]) -> Sure:
    other = rank_of(config) or is_causal_head(config) or projector_of(config) == "domino" or is_second(config)
    if is_block(config) and not other:
        return Sure.OWN
    return Sure.NAMED if named(config, "dflash") else Sure.NO


LAYOUT = Layout(
    read,
    said=_said,
    what="DFlash drafts blocks",
    beside=("dspark",),  # DeepSpec's class of DSpark heads without a Markov head is its DFlash
)
