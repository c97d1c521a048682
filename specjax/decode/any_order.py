"""Decoding of any-subset models: drafts of many positions, verified by the model that fills them in (ASSD)."""

import dataclasses
from typing import Any, Literal

from specjax import diffusion
from specjax.about import About, abouts, exported
from specjax.assembly.registry import entry_of, parse
from specjax.decoder import Decode
from specjax.diffusion import AnySubsetDraft, Assd

PyTree = Any

DRAFTS = {about.name: entry_of(kind, about) for kind in exported(AnySubsetDraft, diffusion) for about in abouts(kind)}
"""Who may draft, by name."""


@dataclasses.dataclass(frozen=True)
class AnyOrder(Decode):
    """Decoding of an any-subset model, which fills in open positions from left to right.

    Attributes:
      drafts: how many positions a round drafts.
      rule: see `specjax.diffusion.Assd`.
      drafter: who drafts: an object, or its name: `self`, the model, or `context_ngram`, bigrams of the known text.
    """

    about = About(
        "assd", "an any-subset model verifies drafts of many open positions at once", "arXiv:2504.20456",
        fields=("drafts", "rule", "drafter"),
    )  # fmt: skip

    drafts: int = 5
    rule: Literal["coupled", "rejection"] = "coupled"
    drafter: "str | AnySubsetDraft" = "self"

    def bind(self, model: Any, *, mesh: Any = None, rows: int = 1, logprobs: bool = False) -> tuple[Assd, PyTree]:
        """See `Decode.bind`."""
        if not model.any_subset:
            raise ValueError(
                f"{model.name} is {model.kind}, and assd needs an any-subset model, such as a folder of XLNet: decode otherwise"
            )
        if logprobs:
            raise ValueError(
                f"{model.name} is an any-subset model, whose records have no log-probabilities: leave logprobs out"
            )
        if mesh is not None:
            raise ValueError(f"{model.name} is an any-subset model, which decodes on one device: leave the mesh out")
        drafter = parse("drafter of assd", DRAFTS, self.drafter) if isinstance(self.drafter, str) else self.drafter
        if not isinstance(drafter, AnySubsetDraft):
            raise ValueError(f"the drafter of assd is one of {', '.join(DRAFTS)}, not {self.drafter!r:.60}")
        return Assd(model.lm, self.drafts, self.rule, drafter, model.masked.mask_id), {"target": model.params}
