"""Training of parallel prompt decoding's prompt tokens: a frozen target teaches its own prompt slots (arXiv:2405.18628)."""

import dataclasses

import jax
import jax.numpy as jnp

from specjax.draft.ppd import PPD
from specjax.lm import Block, Wants
from specjax.objectives.base import Batch, Objective, drawn_places, read
from specjax.objectives.losses import ForwardKL, Loss, acceptance, agreement
from specjax.objectives.means import MEAN
from specjax.objectives.teacher import of_depth

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class TrainPPD(Objective):
    """Fits only the embeddings.

    A text is cut at random places. The prompt tokens that follow a cut learn the target's own distributions some tokens
    further on. The loss is the mean over each one's own loss, weighted `decay ** j` for the j-th.

    Text and prompt slots pass through the target once. The text goes first, so that no gradient is taken through it;
    the slots of all cuts follow as one block over its keys and values.

    Attributes:
      drafter: a PPD bound to the target.
      cuts: places per row, at most as many as it has.
      decay: see above.
      divergence: between the distributions.
    """

    saved = ("trees", "ensembles")

    drafter: PPD
    cuts: int = 16
    decay: float = 0.8
    divergence: Loss = ForwardKL()

    def __post_init__(self):
        if self.drafter.target is None:
            raise ValueError("ppd: bind the drafter to its target first")
        if self.cuts < 1 or not 0 < self.decay <= 1:
            raise ValueError(f"ppd: cuts must be at least 1 and decay lie in (0, 1], got {self.cuts} and {self.decay}")

    def init(self, key, target_params):
        return self.drafter.init_params(key, target_params)

    def loss(self, params, target_params, batch, key, mean=MEAN):
        target, draft, mask = self._distributions(params, target_params, batch, key)
        count = self.drafter.prompts
        at = self._places(batch, key)[0][:, :, None] + 2 + jnp.arange(count)[None, None]
        labels = jnp.take_along_axis(
            batch.tokens, jnp.minimum(at, batch.tokens.shape[1] - 1).reshape(len(at), -1), axis=1
        )
        every = lambda j: [x[:, j::count] for x in (target, draft, mask, labels)]
        losses = jnp.stack([self.decay**j * self.divergence(*every(j), mean=mean) for j in range(count)])
        metrics = {"weight": mask.sum(), "agreement": mean(agreement(target, draft), mask)}
        kept = acceptance(target, draft)
        for j in range(count):
            metrics[of_depth("acceptance", j)] = mean(kept[:, j::count], mask[:, j::count])
        return losses.mean(), metrics

    def accuracy(self, params, target_params, batch: Batch, key: Array, ranks: int) -> tuple[Array, Array]:
        """How often the target's likeliest token is the candidate of a rank of each prompt token, on a batch's random cuts.

        Returns:
          Counts `[m, ranks]`, and the number of cases `[m]`. Their quotient is the input of `search_states`.
        """
        target, draft, mask = self._distributions(params, target_params, batch, key)
        candidates = jax.lax.top_k(draft, ranks)[1]
        hits = (candidates == jnp.argmax(target, axis=-1)[..., None]) & mask[..., None]
        count = self.drafter.prompts
        hits, mask = hits.reshape(-1, count, ranks), mask.reshape(-1, count)
        return hits.sum(axis=0), mask.sum(axis=0)

    def _places(self, batch, key):
        """Where texts are cut `[B, cuts]`, and at which cuts the first prompt token has something to learn."""
        return drawn_places(key, jnp.pad(batch.due(2), ((0, 0), (0, 2))), self.cuts)

    def _distributions(self, params, target_params, batch, key):
        """Logits `[B, cuts * m, V]` of the target and of the prompt slots, and where both are known `[B, cuts * m]`."""
        lm, prompts, members = self.drafter.target, self.drafter.prompts, self.drafter.ensembles
        rows, length = batch.tokens.shape
        at, chosen = self._places(batch, key)
        text = jax.lax.stop_gradient(read(lm, target_params, batch, Wants(final=True)))
        mine = batch.seen(at)  # [B, R, T]

        ahead = at[:, :, None] + jnp.arange(1, prompts + 1)[None, None]  # [B, R, m]
        flat = ahead.reshape(rows, -1)
        due = (mine & batch.mask[:, None]).reshape(rows, -1)
        row = jnp.repeat(jnp.arange(at.shape[1]), prompts)[None] * length
        known = jnp.take_along_axis(due, row + jnp.minimum(flat + 1, length - 1), axis=1) & (flat + 1 < length)
        known = known & jnp.repeat(chosen, prompts, axis=1)
        final = jnp.take_along_axis(text.final, jnp.minimum(flat, length - 1)[:, :, None], axis=1)
        target = lm.unembed(target_params, final)

        slots = at.shape[1] * prompts * members
        place, step, member = jnp.unravel_index(jnp.arange(slots), (at.shape[1], prompts, members))
        seen = (jnp.arange(length)[None, None] <= at[:, place][:, :, None]) & mine[:, place]  # [B, X, T]
        own = (place[:, None] == place[None]) & (member[:, None] == member[None]) & (step[:, None] >= step[None])
        visible = jnp.concatenate([seen, jnp.broadcast_to(own[None], (rows, slots, slots))], axis=2)
        embeddings = params["embeddings"][step, member]
        block = Block(
            tokens=jnp.zeros((rows, slots), jnp.int32),
            positions=jnp.take_along_axis(batch.positions, at, axis=1)[:, place] + 1 + step[None],
            length=jnp.zeros((rows,), jnp.int32),
            visible=visible,
            embeddings=jnp.broadcast_to(embeddings[None], (rows, *embeddings.shape)),
            embedded=jnp.ones((rows, slots), bool),
        )
        logits = lm(target_params, block, None, wants=Wants(logits=True), past=text.delta).logits
        draft = logits.reshape(rows, -1, members, logits.shape[-1]).mean(axis=2)
        return target, draft, known
