"""Training of Kangaroo's adapter: a frozen target teaches its own early exit (arXiv:2404.18911, section 3.1)."""

import dataclasses

import jax

from specjax.draft.kangaroo import Kangaroo
from specjax.draft.kangaroo import network as head
from specjax.lm import Wants
from specjax.objectives.base import Objective, Recipe, of_target
from specjax.objectives.losses import ForwardKL, Loss, acceptance, agreement
from specjax.objectives.means import MEAN


@dataclasses.dataclass(frozen=True)
class TrainKangaroo(Objective):
    """Fits the adapter's distribution to the target's, at every position of a text.

    The paper's soft cross-entropy is the forward KL plus the target's entropy, which has no gradient.

    Attributes:
      drafter: a Kangaroo bound to the target.
      divergence: between the distributions.
    """

    recipe = Recipe(0.5, clip_by="value", weight_decay=0.01)
    saved = ("exit_layer",)
    starts_from_layers = True
    follows_dtype = True

    drafter: Kangaroo
    divergence: Loss = ForwardKL()

    def __post_init__(self):
        if self.drafter.target is None:
            raise ValueError("kangaroo: bind the drafter to its target first")

    @property
    def reads(self):
        return Wants(final=True, hidden=(self.drafter.exit_layer - 1,))

    def init(self, key, target_params):
        return self.drafter.init_params(key, target_params)

    def loss(self, params, target_params, batch, key, mean=MEAN):
        target, layer = self.drafter.target, self.drafter.exit_layer - 1
        taught = of_target(target, target_params, batch, self.reads)
        features, _ = head.adapt(self.drafter.config, params, taught.hidden[layer], batch.block(), None)
        dist, logits = (target.unembed(target_params, h[:, :-1]) for h in (taught.final, features))
        dist = jax.lax.stop_gradient(dist)
        mask = batch.due(1)
        metrics = {
            "acceptance": mean(acceptance(dist, logits), mask),
            "agreement": mean(agreement(dist, logits), mask),
        }
        loss = self.divergence(dist, logits, mask, batch.tokens[:, 1:], mean)
        return loss, metrics | {"weight": mask.sum()}
