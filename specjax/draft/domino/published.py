"""The published layout of Domino (SpecForge): DFlash's with a recurrent network and a projection."""

from collections.abc import Mapping
from typing import Any

from specjax.draft.dflash.published import projector_of, read_block, read_config
from specjax.draft.heads.layout import Layout, Reader, Sure, named
from specjax.models.errors import ModelError
from specjax.models.fields import is_size


def read(reader: Reader, config: dict[str, Any], target: Any) -> tuple[dict[str, Any], Any]:
    """Fields and parameters of a Domino head: DFlash's and the correction's."""
    config = read_config(reader, config, "domino")
    prefix = "logit_head."  # in early files
    reader.tensors = {name.removeprefix(prefix): x for name, x in reader.tensors.items()}
    state, rank, plain = (config.get(key) for key in ("gru_hidden_dim", "emb_dim", "pure_draft_prefix_len"))
    plain = 0 if plain is None else plain  # as in SpecForge's code
    if not is_size(state) or not is_size(rank):
        raise ModelError(
            f"{reader.file}: gru_hidden_dim is {state!r} and emb_dim {rank!r}; both are sizes above 0 (without them it is a "
            "dflash)"
        )
    if not (is_size(plain) or plain == 0):
        raise ModelError(f"{reader.file}: pure_draft_prefix_len must be a number of tokens, not {plain!r}")
    config = {**config, "shift_label": bool(config.get("shift_label"))}  # false if it is left out
    fields, params = read_block(reader, config, target)
    size = fields["config"].hidden_size
    columns = len(params["ids"]) if "ids" in params else target.lm.vocab_size
    params["correction"] = {
        "token": {"kernel": reader.take("prefix_gru.weight_ih_l0", (size, 3 * state), transpose=True)},
        "memory": {"kernel": reader.take("prefix_gru.weight_hh_l0", (state, 3 * state), transpose=True)},
        "inner": reader.linear("embed_proj.0", size + state, rank),
        "head": reader.linear("embed_proj.2", rank, columns),
    }
    return {**fields, "state": state, "rank": rank, "plain": plain}, params


def _said(config: Mapping[str, Any]) -> Sure:
    return Sure.OWN if projector_of(config) == "domino" else Sure.NAMED if named(config, "domino") else Sure.NO


LAYOUT = Layout(read, said=_said, what="Domino corrects blocks with a recurrent network", beside=("dflash",))
