"""Training of Kangaroo's adapter: a frozen target teaches its own early exit (arXiv:2404.18911, section 3.1)."""

import dataclasses

import jax

from specjax.draft.heads import kangaroo as head
from specjax.draft.kangaroo import Kangaroo
from specjax.lm import Wants
from specjax.train.losses import ForwardKL, Loss, acceptance, agreement
from specjax.train.means import MEAN
from specjax.train.objective import Objective, Recipe, read


@dataclasses.dataclass(frozen=True)
class TrainKangaroo(Objective):
    """Fits the adapter's law to the target's, at every position of a text.

    The paper's soft cross-entropy is the forward KL plus the target's entropy, which has no gradient.

    Attributes:
      drafter: a Kangaroo bound to the target.
      divergence: between the laws.
    """

    recipe = Recipe(0.5, clip_by="value", weight_decay=0.01)
    saved = ("exit_layer",)

    drafter: Kangaroo
    divergence: Loss = ForwardKL()

    def __post_init__(self):
        if self.drafter.target is None:
            raise ValueError("kangaroo: bind the drafter to its target first")

    def init(self, key, target_params):
        return self.drafter.init_params(key, target_params)

    def loss(self, params, target_params, batch, key, mean=MEAN):
        target, layer = self.drafter.target, self.drafter.exit_layer - 1
        taught = jax.lax.stop_gradient(read(target, target_params, batch, Wants(logits=True, hidden=(layer,))))
        features, _ = head.adapt(self.drafter.config, params, taught.hidden[layer], batch.block(), None)
        law, logits = taught.logits[:, :-1], target.unembed(target_params, features[:, :-1])
        mask = batch.due(1)
        metrics = {
            "acceptance": mean(acceptance(law, logits), mask),
            "agreement": mean(agreement(law, logits), mask),
        }
        return self.divergence(law, logits, mask, mean=mean), metrics | {"weight": mask.sum()}
