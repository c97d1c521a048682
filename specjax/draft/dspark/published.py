"""The published layouts of DSpark (DeepSpec, SpecForge, speculators): DFlash's with more parts."""

from collections.abc import Mapping
from typing import Any

from specjax.draft.dflash.published import is_block, rank_of, read_block, read_config
from specjax.draft.dspark.network import KINDS, MarkovHead
from specjax.draft.heads.layout import Layout, Reader, Sure, named
from specjax.models.errors import ModelError
from specjax.models.fields import is_size


def read(reader: Reader, config: dict[str, Any], target: Any) -> tuple[dict[str, Any], Any]:
    """Fields and parameters of a DSpark head: DFlash's, a Markov head and optionally a confidence head."""
    config = read_config(reader, config, "dspark")
    prefix = "logit_head."  # in early files of SpecForge
    reader.tensors = {name.removeprefix(prefix): x for name, x in reader.tensors.items()}
    rank, kind = config.get("markov_rank"), config.get("markov_head_type", "vanilla")
    if not is_size(rank) or kind not in KINDS:
        raise ModelError(
            f"{reader.file}: markov_rank is {rank!r} and markov_head_type {kind!r}: a rank above 0 and one of "
            f"{', '.join(KINDS)} are read (without the head it is a dflash)"
        )
    fields, params = read_block(reader, config, target, from_anchor=True)
    params["markov"] = _markov(reader, MarkovHead(kind, rank, fields["config"].hidden_size), params, target)
    confidence = bool(config.get("enable_confidence_head", config.get("confidence_head_alpha")))  # SpecForge's rule
    if confidence:
        stored, size = reader.tensors.get("confidence_head.proj.weight"), fields["config"].hidden_size
        with_markov = config.get("confidence_head_with_markov", stored is not None and stored.shape[-1] != size)
        params["confidence"] = reader.linear("confidence_head.proj", size + rank * bool(with_markov), 1, bias=True)
    return {**fields, "markov": kind, "rank": rank, "confidence": confidence}, params


def _markov(reader: Reader, bias: MarkovHead, params: dict[str, Any], target: Any) -> dict[str, Any]:
    """Parameters of a Markov head: its table has the target's ids, its columns are the draft's."""
    at, vocab = "markov_head", target.lm.vocab_size
    columns = len(params["ids"]) if "ids" in params else vocab
    markov: dict[str, Any] = {
        "table": {"embedding": reader.take(f"{at}.markov_w1.weight", (vocab, bias.rank))},
        "head": reader.linear(f"{at}.markov_w2", bias.rank, columns),
    }
    if bias.kind != "vanilla":
        name = {"gated": "gate_proj", "rnn": "joint_proj"}[bias.kind]
        markov["mix"] = reader.linear(f"{at}.{name}", *bias.mixed, bias=True)
    return markov


def _said(config: Mapping[str, Any]) -> Sure:
    if is_block(config) and rank_of(config):
        return Sure.OWN
    return Sure.NAMED if named(config, "dspark") else Sure.NO


LAYOUT = Layout(read, said=_said, what="DSpark drafts blocks", beside=("dflash",))
