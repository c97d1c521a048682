"""Training of Chimera's encoders and heads (arXiv:2402.15758), over the text's own tokens."""

import dataclasses

import jax
import jax.numpy as jnp

from specjax.lm import Block
from specjax.objectives.base import Batch, check_not_negative
from specjax.objectives.losses import CrossEntropy
from specjax.objectives.means import MEAN
from specjax.objectives.teacher import Guess, HeadObjective, score, teach

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class TrainChimera(HeadObjective):
    """The target is frozen; encoders and heads learn its distributions, head i's weighted `decay ** i`.

    Head i reads the output for the token i places after the known one, in a pass of its own, in which a trigram sees no
    feature later than its head's: so is it when a draft is made. The trigrams are the text's.

    With `preset=paper` the heads learn the text's own tokens, all weighted alike, as in the authors' code
    (kafkayu/Chimera). That code makes the trigrams of its later heads of their own guesses at neighbouring places, and
    lets their losses train no trigrams; that is not taken over. It also learns no token before the text's fourth.

    Attributes:
      decay: see above.
    """

    presets = {"paper": {"divergence": CrossEntropy("text")}}
    saved = ("heads",)

    decay: float = 1.0

    def __post_init__(self):
        check_not_negative("chimera", self, "decay")

    def loss(self, params, target_params, batch, key, mean=MEAN):
        drafter = self.drafter
        teacher = teach(drafter, target_params, batch, self.ids, drafter.feature_wants)
        own = {"target": target_params, "draft": params}
        embeds = drafter.embed(own, batch.tokens)
        before = jnp.concatenate([embeds[:, :1], embeds[:, :-1]], axis=1)
        features = drafter.joined(teacher.output.final, embeds, before)[:, :-1]
        x, slots = drafter.slots_of(own, features, batch.pairs())
        guesses = []
        for i in range(drafter.heads):
            width = batch.tokens.shape[1] - i - 2
            block = dataclasses.replace(slots, visible=seen(batch, i)) if i else slots
            out, _ = drafter.head(params, x, block, None)
            final = teacher.output.final[:, :width].astype(out.dtype)
            both = jnp.concatenate([final, out[:, 1::2][:, i : i + width]], axis=-1)
            dist = lambda inputs, i=i: drafter.dist(params, i, inputs)
            guesses.append(Guess(both, dist, i + 1, self.decay**i))
        return score(teacher, guesses, self.divergence, mean)


def seen(batch: Batch, late: int) -> Array:
    """`[B or 1, 2 W, 2 W]` bool, what slots of W pairs see: trigrams up to their own, features up to `late` pairs before."""
    pairs: Block = batch.pairs()
    at = jnp.arange(pairs.tokens.shape[1])
    trigrams = (at[None] <= at[:, None])[None]
    if pairs.visible is not None:
        trigrams &= pairs.visible
    features = trigrams & (at[None] <= at[:, None] - late)[None]
    both = jnp.stack([features, trigrams], axis=-1)
    return jnp.repeat(both.reshape(*both.shape[:2], -1), 2, axis=1)
