"""Training of Clover-2: its chain of heads over the text's own tokens (arXiv:2408.00264, section 3.4)."""

import dataclasses

import jax.numpy as jnp

from specjax.draft.clover2 import Clover2
from specjax.lm import Block
from specjax.train.heads.teacher import Guess, Ids, score, teach, trimmed, with_ids
from specjax.train.losses import Divergence, ForwardKL
from specjax.train.objective import Objective


@dataclasses.dataclass(frozen=True)
class TrainClover2(Objective):
    """The target is frozen; head i learns its law i tokens further on, weighted `decay ** i`. Laws alone are fitted: the
    paper's regression of states to the target's features is left out, as EAGLE-3 does.

    Attributes:
      drafter: bound to the target.
      ids: the draft's vocabulary; empty: the target's.
      heads: how many tokens are drafted in training.
      decay: see above.
      divergence: between the laws.
    """

    drafter: Clover2
    ids: Ids = ()
    heads: int = 4
    decay: float = 0.7
    divergence: Divergence = ForwardKL()

    def __post_init__(self):
        if self.heads < 1:
            raise ValueError(f"clover2: heads must be at least 1, got {self.heads}")

    @property
    def fields(self):
        return {"layers": self.drafter.layers}

    def init(self, key, target_params):
        return trimmed(self.drafter, self.drafter.init_params(key, target_params), target_params, self.ids)

    def export(self, params):
        return with_ids(params, self.ids)

    def loss(self, params, target_params, batch, key):
        drafter = self.drafter
        teacher = teach(drafter, target_params, batch, self.ids, drafter.feature_wants)
        rows, length = batch.tokens.shape
        own = {"target": target_params, "draft": params}
        positions = jnp.broadcast_to(jnp.arange(length - 1)[None], (rows, length - 1))
        block = Block(batch.tokens[:, 1:], positions, jnp.zeros((rows,), jnp.int32))
        h, _ = drafter.read(own, drafter.features(teacher.output)[:, :-1], block, None)
        embeds = drafter.target.embed(target_params, batch.tokens)
        guesses = []
        for i in range(self.heads):
            width = length - i - 2
            drafted = teacher.ahead(embeds, i + 1, width) if i else None
            h = h[:, :width] if drafted is None else drafter.head.advance(params, h[:, :width], drafted)
            guesses.append(Guess(drafter.law(own, h, drafted), i + 1, self.decay**i))
        return score(teacher, guesses, self.divergence)
