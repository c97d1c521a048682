"""Training of parallel prompt decoding's prompt tokens: a frozen target teaches its own prompt slots (arXiv:2405.18628)."""

import dataclasses

import jax.numpy as jnp

from specjax.draft.ppd import PPD
from specjax.lm import Wants
from specjax.objectives.cuts import CutObjective


@dataclasses.dataclass(frozen=True)
class TrainPPD(CutObjective):
    """Fits only the embeddings: the prompt tokens that follow a cut are the guesses."""

    saved = ("trees", "ensembles")

    drafter: PPD

    @property
    def guesses(self) -> int:
        return self.drafter.prompts

    def said(self, params, target_params, batch, at, text):
        lm, prompts, members = self.drafter.target, self.drafter.prompts, self.drafter.ensembles
        rows, cuts = at.shape
        slots = cuts * prompts * members
        place, step, member = jnp.unravel_index(jnp.arange(slots), (cuts, prompts, members))
        own = (place[:, None] == place[None]) & (member[:, None] == member[None]) & (step[:, None] >= step[None])
        embeddings = params["embeddings"][step, member]
        block = dataclasses.replace(
            self.slots(batch, at, place, step, own),
            embeddings=jnp.broadcast_to(embeddings[None], (rows, *embeddings.shape)),
            embedded=jnp.ones((rows, slots), bool),
        )
        logits = lm(target_params, block, None, wants=Wants(logits=True), past=text.delta).logits
        return logits.reshape(rows, -1, members, logits.shape[-1]).mean(axis=2)
