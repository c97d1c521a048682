"""The published layout of JetSpec (hao-ai-lab/JetSpec): DFlash's, with a flag."""

from collections.abc import Mapping
from typing import Any

from specjax.draft.dflash.published import is_causal_head
from specjax.draft.dflash.published import read as read_dflash
from specjax.draft.heads.layout import Layout, Reader, Sure, named
from specjax.models.errors import ModelError


def read(reader: Reader, config: dict[str, Any], target: Any) -> tuple[dict[str, Any], Any]:
    """Fields and parameters of a JetSpec head."""
    if not is_causal_head(config):
        raise ModelError(
            f"{reader.file}: dflash_config.causal_head is not true: a head for another drafter (try dflash)"
        )
    return read_dflash(reader, config, target)


def _said(config: Mapping[str, Any]) -> Sure:
    return Sure.OWN if is_causal_head(config) else Sure.NAMED if named(config, "jetspec") else Sure.NO


LAYOUT = Layout(read, said=_said, what="JetSpec drafts blocks", beside=("dflash",))
