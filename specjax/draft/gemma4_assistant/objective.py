"""Training of assistants like Gemma 4's, over the keys of a frozen target. Google has not published its training."""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from specjax.lm import Block, Output
from specjax.objectives.base import Batch, check_not_negative
from specjax.objectives.means import MEAN
from specjax.objectives.teacher import Guess, HeadObjective, score, teach

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class TrainGemma4Assistant(HeadObjective):
    """Fits only the distributions, in unrolled passes.

    Pass s of `unroll` reads the previous pass's output in place of the target's feature. It attends from the position
    where its draft began, as a draft at depth s + 1 does. It is weighted `decay ** s`, as in EAGLE-3.

    Attributes:
      unroll: passes.
      decay: see above.
    """

    saved = ("layers",)

    unroll: int = 4
    decay: float = 0.8

    @property
    def reads(self):
        """Nothing that can be captured: the head attends to the keys and values of the target's layers."""
        return None

    def __post_init__(self):
        if self.unroll < 1:
            raise ValueError(f"gemma4_assistant: unroll must be at least 1, got {self.unroll}")
        check_not_negative("gemma4_assistant", self, "decay")
        if self.drafter.clusters:
            raise ValueError(
                "gemma4_assistant: a head over some clusters has no distribution of the others to train: use clusters=0"
            )

    def loss(self, params, target_params, batch, key, mean=MEAN):
        teacher = teach(self.drafter, target_params, batch, self.ids, self.drafter.feature_wants)
        own = {"target": target_params, "draft": params}
        dist = functools.partial(self.drafter.logits, own)
        passes = self.outputs(own, batch, teacher.output)
        guesses = [Guess(h[:, s:-1], dist, s + 1, self.decay**s) for s, h in enumerate(passes)]
        return score(teacher, guesses, self.divergence, mean)

    def outputs(self, own, batch: Batch, output: Output) -> list[Array]:
        """For every pass, the outputs `[B, T - 1, F]` after pairs of feature t and token t + 1.

        The first s pairs of pass s had nothing to read.
        """
        drafter, tokens = self.drafter, batch.tokens[:, 1:]
        features, embeds = drafter.features(output)[:, :-1], drafter.target.embed(own["target"], tokens)
        slots = jnp.arange(tokens.shape[1])
        together = batch.seen(jnp.broadcast_to(slots[None] + 1, tokens.shape))
        passes = []
        for s in range(self.unroll):
            begun = together & (jnp.arange(batch.tokens.shape[1])[None] <= slots[:, None] - s)[None]
            positions = batch.positions[:, :-1] + 1 - s
            block = Block(tokens, positions, jnp.zeros((len(tokens),), jnp.int32), begun)
            h, left = drafter.head(own["draft"], embeds, features, block, None, output.delta)
            passes.append(h)
            features = jnp.pad(left[:, :-1], ((0, 0), (1, 0), (0, 0)))
        return passes
