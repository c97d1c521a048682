"""Training of Clover's heads: each learns the target's distribution some tokens further on (arXiv:2405.00263)."""

import dataclasses
from typing import Any

from specjax.objectives.base import check_not_negative
from specjax.objectives.losses import CrossEntropy
from specjax.objectives.means import MEAN
from specjax.objectives.teacher import Guess, HeadObjective, Teacher, score, teach


def chained(drafter: Any, own: Any, teacher: Teacher, heads: int, decay: float) -> list[Guess]:
    """The guesses of a recurrent chain of heads over the text's own tokens, head i's weighted `decay ** i`.

    Args:
      drafter: a `RegressiveDrafter`, bound to the target.
      own: {"target": ..., "draft": ...}.
      teacher: the batch as the target reads it.
      heads: how many tokens are drafted.
      decay: see above.
    """
    batch = teacher.batch
    h, _ = drafter.read(own, drafter.features(teacher.output)[:, :-1], batch.pairs(), None)
    embeds, guesses = drafter.embed(own, batch.tokens), []
    for i in range(heads):
        width = batch.tokens.shape[1] - i - 2
        drafted = teacher.ahead(embeds, i + 1, width) if i else None
        h = h[:, :width] if drafted is None else drafter.head.advance(own["draft"], h[:, :width], drafted)
        dist = lambda inputs, i=i: drafter.dist(own, *inputs, i)
        guesses.append(Guess((h, drafted), dist, i + 1, decay**i))
    return guesses


@dataclasses.dataclass(frozen=True)
class TrainClover(HeadObjective):
    """The target is frozen; head i learns its distribution i tokens further on, weighted `decay ** i`.

    With `preset=paper` they learn the text's own tokens, all weighted alike, as Medusa's authors do. The paper's own
    weights are not known.

    Attributes:
      decay: see above.
    """

    presets = {"paper": {"divergence": CrossEntropy("text"), "decay": 1.0}}
    saved = ("layers", "heads")
    starts_from_layers = True

    decay: float = 0.8

    def __post_init__(self):
        check_not_negative("clover", self, "decay")

    def loss(self, params, target_params, batch, key, mean=MEAN):
        drafter = self.drafter
        teacher = teach(drafter, target_params, batch, self.ids, drafter.feature_wants)
        own = {"target": target_params, "draft": params}
        return score(teacher, chained(drafter, own, teacher, drafter.heads, self.decay), self.divergence, mean)
