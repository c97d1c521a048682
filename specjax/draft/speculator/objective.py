"""Training of speculators (arXiv:2404.19124, section 4): all steps over the text's own tokens.

The authors first train on ordinary text (stage 1), then on text that the target drew (stage 2). The loss is the same in
both: which stage it is, the data says.
"""

import dataclasses
import functools

from specjax.objectives.base import Recipe, check_not_negative
from specjax.objectives.losses import CrossEntropy
from specjax.objectives.means import MEAN
from specjax.objectives.teacher import Guess, HeadObjective, score, teach


@dataclasses.dataclass(frozen=True)
class TrainSpeculator(HeadObjective):
    """The target is frozen. Step i, after the text's next i + 1 tokens, learns the target's distribution of the one after.

    The losses of the steps, each a mean, are summed with the weights `decay ** i`. With `preset=paper` they learn the text's
    own tokens, as the authors do; their loss leaves out a text's last places, where not every step has a token to learn.

    Attributes:
      decay: see above; the authors' is 1.
    """

    recipe = Recipe(weight_decay=0.1)
    presets = {"paper": {"divergence": CrossEntropy("text")}}

    decay: float = 1.0

    def __post_init__(self):
        check_not_negative(self.drafter.name, self, "decay")

    def loss(self, params, target_params, batch, key, mean=MEAN):
        drafter = self.drafter
        teacher = teach(drafter, target_params, batch, self.ids, drafter.feature_wants)
        state, length, guesses = teacher.output.final, batch.tokens.shape[1], []
        for i in range(drafter.heads):
            width = length - i - 2
            tokens = teacher.ahead(batch.tokens, i + 1, width)
            state = drafter.advance(params, i, state[:, :width], tokens)
            guesses.append(Guess(state, functools.partial(drafter.dist, params, i), i + 1, self.decay**i))
        return score(teacher, guesses, self.divergence, mean)


@dataclasses.dataclass(frozen=True)
class TrainMLPSpeculator(TrainSpeculator):
    """See `TrainSpeculator`."""

    saved = ("heads", "inner", "scale_input", "tied")


@dataclasses.dataclass(frozen=True)
class TrainLSTMSpeculator(TrainSpeculator):
    """See `TrainSpeculator`."""

    saved = ("heads", "inner", "scale_input", "one_table")
