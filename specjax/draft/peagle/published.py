"""The published layouts of P-EAGLE (SpecForge, speculators)."""

from typing import Any

from specjax.draft.eagle3 import published as eagle3
from specjax.draft.heads.layout import Layout, Reader, Sure, named
from specjax.draft.heads.parts import MASKS, mask_of
from specjax.models.errors import ModelError


def read(reader: Reader, config: dict[str, Any], target: Any) -> tuple[dict[str, Any], Any]:
    """Fields and parameters of a P-EAGLE head: EAGLE-3's tensors with `layers.*`, and a feature for the slots of masks."""
    mask = mask_of(reader, config, target)
    feature = reader.tensors.pop("mask_hidden", None)
    if feature is None:
        raise ModelError(f"{reader.folder}: missing mask_hidden: a head without it is not a P-EAGLE head (try eagle3)")
    if "norm_output" in reader.chosen:
        raise ModelError("peagle never reads its own outputs: leave norm_output out")
    fields, params = eagle3.read(reader, {key: x for key, x in config.items() if key not in MASKS}, target, "peagle")
    taps, width = len(fields["taps"]), target.lm.config.hidden_size
    if feature.size != taps * width:
        wrong = f"mask_hidden has shape {list(feature.shape)}, expected {[1, 1, taps * width]}"
        raise ModelError(f"{reader.folder}: the head's tensors do not fit: {wrong}")
    return fields, {**params, "mask": mask, "mask_feature": {"embedding": feature.reshape(taps, width)}}


LAYOUT = Layout(
    read,
    said=lambda config: Sure.NAMED if named(config, "peagle") else Sure.NO,
    what="P-EAGLE drafts in parallel",
)
