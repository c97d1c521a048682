"""EasySpec: a draft model drafts with groups of layers whose attention reads one stale stream (arXiv:2502.02493)."""

import dataclasses
from typing import Any

from specjax.about import About
from specjax.draft.model import ModelDrafter
from specjax.lm import Output


@dataclasses.dataclass(frozen=True)
class EasySpec(ModelDrafter):
    """`ModelDrafter` whose passes over drafted tokens are fuzzy: layers go in groups, and a group's attention waits for no
    layer of the group.

    All attention of a group reads the residual stream that enters the group. Its results are then added layer by layer,
    each before that layer's MLP. The first and the last layer are alone, as usual. On a mesh the results of a group are
    summed over the chips together, so a pass waits for fewer exchanges.

    Keys and values of such a pass last for one proposal. The pass with which every proposal begins is exact. It reads
    what the last step committed, so the cache holds the keys and values of a plain draft model. The authors call it
    bonus calibration. The first token of every path is therefore the plain draft model's.

    A verifier gets the distributions from which tokens were drawn, the fuzzy ones.

    Attributes:
      group: how many layers a group has, at least 2; the last group may have fewer.
    """

    about = About(
        "easyspec",
        "a small model whose layers draft in groups, from one stale input, and whose keys one exact pass mends",
        "arXiv:2502.02493",
        expander="chain",
        loads="model",
    )
    tiles = True

    group: int = 4

    def __post_init__(self):
        super().__post_init__()
        if self.group < 2:
            raise ValueError(
                f"easyspec needs group >= 2, got {self.group}; one layer after another is the drafter draft"
            )

    def bind(self, target):
        bound = super().bind(target)
        if not getattr(self.lm, "reads_stale", False):
            raise ValueError(
                "easyspec needs a draft model whose layers can read a stale stream, and this one adds branches to several "
                "streams, or to their inputs, or is no model of specjax: use draft"
            )
        if self.lm.num_layers < 4:
            raise ValueError(
                f"easyspec groups the layers between the first and the last, and the draft model has {self.lm.num_layers} in "
                "all: use one of at least 4 layers, or draft"
            )
        return bound

    @property
    def groups(self) -> tuple[tuple[int, int], ...]:
        """Static: the layers `[lo, hi)` of every group, in order."""
        last = self.lm.num_layers - 1
        inner = [(lo, min(lo + self.group, last)) for lo in range(1, last, self.group)]
        return ((0, 1), *inner, (last, last + 1))

    def passed(self, params: Any, block: Any, cache: Any, past: Any) -> Output:
        lm: Any = self.lm
        h, delta = lm.embed(params, block.tokens), None
        for lo, hi in self.groups:
            h, own = lm.layers(params, h, lo, hi, block, cache, past, below=delta, stale=h if lo else None)
            delta = own if delta is None else lm.join(delta, own)
        final = lm.norm(params, h)
        return Output(delta, logits=lm.unembed(params, final), final=final)
