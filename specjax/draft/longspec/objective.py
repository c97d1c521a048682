"""Training of LongSpec's layer on the keys of a frozen target (arXiv:2502.17421, section 3.2; sail-sg/LongSpec)."""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from specjax.draft.longspec.network import Beside, Seen
from specjax.lm import Wants
from specjax.objectives.base import Batch, Recipe, check_not_negative, each_row
from specjax.objectives.losses import CrossEntropy, Loss
from specjax.objectives.means import MEAN
from specjax.objectives.teacher import Guess, HeadObjective, Teacher, score

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class TrainLongSpec(HeadObjective):
    """Fits the layer to the text's own tokens, at positions far beyond the text's length.

    Anchor-offset positions: a row's first tokens, none to `sinks` of them, keep their positions, and all later ones are
    moved by one random number. It is at most `reach`, and leaves 1,000 positions of the target free (the authors' choice).
    So short texts train the layer for long ones. Target and layer read the same positions, and the layer's window still counts
    tokens. Rows of more than `short` tokens
    keep their own.

    In every row, a token does not see the last 1 to `lag` of the target's keys before and at it, since a draft reads the
    keys of committed tokens alone.

    Attributes:
      sinks: see above.
      reach: see above; 0: no row is moved.
      short: see above.
      lag: see above.
    """

    recipe = Recipe(weight_decay=0.1)
    saved = ("window", "layer")

    divergence: Loss = CrossEntropy("text")
    sinks: int = 4
    reach: int = 30000
    short: int = 1200
    lag: int = 4

    @property
    def reads(self):
        """Nothing that can be captured: the layer attends to the target's keys."""
        return None

    def __post_init__(self):
        check_not_negative("longspec", self, "sinks", "reach", "short")
        if self.lag < 1:
            raise ValueError(
                f"longspec: a draft never sees the newest keys of the target, so lag is at least 1, got {self.lag}"
            )

    def loss(self, params, target_params, batch, key, mean=MEAN):
        target, own = self.drafter.target, {"target": target_params, "draft": params}
        positions, lag = self.drawn(batch, key)
        block = dataclasses.replace(batch.block(), positions=positions)
        output = target(target_params, block, None, wants=Wants(final=True))
        teacher = Teacher(batch, output, functools.partial(target.unembed, target_params), self.ids)
        h = self.outputs(own, batch, output, positions, lag)
        dist = functools.partial(self.drafter.logits, own)
        return score(teacher, [Guess(h[:, :-1], dist, 0, 1.0)], self.divergence, mean)

    def held_out(self, target_params):
        """Positions of held-out text are its own, and the newest key is the only one that is left out."""
        return dataclasses.replace(self, reach=0, lag=1), target_params

    def drawn(self, batch: Batch, key: Array) -> tuple[Array, Array]:
        """Positions `[B, T]` int32, and how many of the target's newest keys the rows `[B]` do not see."""
        length = batch.tokens.shape[1]
        longest = self.drafter.target.config.max_position_embeddings
        most = max(min(self.reach, longest - 1000) - length, 0) if length <= self.short else 0

        def draw(key):
            keys = jax.random.split(key, 3)
            bounds = (0, self.sinks + 1), (0, most + 1), (1, self.lag + 1)
            return tuple(jax.random.randint(one, (), *ends) for one, ends in zip(keys, bounds, strict=True))

        sinks, offset, lag = each_row(draw, key, len(batch.tokens))
        own = batch.positions
        return jnp.where(own >= sinks[:, None], own + offset[:, None], own), lag

    def outputs(self, own, batch: Batch, output, positions: Array, lag: Array) -> Array:
        """The layer's outputs `[B, T, E]` for the tokens of a batch; see `drawn` for the last two."""
        drafter, length = self.drafter, batch.tokens.shape[1]
        place = drafter.target.config.places[drafter.layer].slots
        slots = jnp.arange(length)
        before = slots[None, None] <= slots[None, :, None] - lag[:, None, None]
        together = batch.seen(jnp.broadcast_to(slots[None], batch.tokens.shape))
        keys = output.delta.key[place], output.delta.value[place]
        seen = Seen(jnp.zeros((len(batch.tokens),), jnp.int32), Beside(keys, positions, before & together))
        embeds = drafter.target.embed(own["target"], batch.tokens)
        return drafter.head(own["draft"], embeds, batch.block(), None, seen, turned=positions)[0]
