"""Training of Hydra's heads: as Medusa's, with the text's own tokens as the drafted ones (arXiv:2402.05109, section 3)."""

import dataclasses

import jax.numpy as jnp

from specjax.draft.hydra import Hydra, head_law
from specjax.lm import Block
from specjax.train.heads.teacher import Guess, Ids, score, teach, trimmed, with_ids
from specjax.train.losses import Divergence, ForwardKL
from specjax.train.objective import Objective


@dataclasses.dataclass(frozen=True)
class TrainHydra(Objective):
    """The target is frozen; heads and the prefix layer learn its laws, weighted `decay ** i`.

    Attributes:
      drafter: bound to the target.
      ids: the draft's vocabulary; empty: the target's.
      decay: see above.
      divergence: between the laws.
    """

    drafter: Hydra
    ids: Ids = ()
    decay: float = 0.8
    divergence: Divergence = ForwardKL()

    @property
    def fields(self):
        drafter = self.drafter
        return {"heads": drafter.heads, "layers": drafter.layers, "prefix_layer": drafter.prefix_layer}

    def init(self, key, target_params):
        return trimmed(self.drafter, self.drafter.init_params(key, target_params), target_params, self.ids)

    def export(self, params):
        return with_ids(params, self.ids)

    def loss(self, params, target_params, batch, key):
        drafter = self.drafter
        teacher = teach(drafter, target_params, batch, self.ids, drafter.feature_wants)
        rows, length = batch.tokens.shape
        positions = jnp.broadcast_to(jnp.arange(length)[None], (rows, length))
        block = Block(batch.tokens, positions, jnp.zeros((rows,), jnp.int32))
        own = {"target": target_params, "draft": params}
        prefix, _ = drafter.read(own, teacher.output.final, block, None)
        embeds = drafter.target.embed(target_params, batch.tokens)
        guesses = []
        for i, head in enumerate(params["heads"]):
            width = length - i - 2
            seen = [teacher.ahead(embeds, j, width) for j in range(1, i + 2)]
            logits = head_law(head, jnp.concatenate([prefix[:, :width], *seen], axis=-1))
            guesses.append(Guess(logits, i + 1, self.decay**i))
        return score(teacher, guesses, self.divergence)
