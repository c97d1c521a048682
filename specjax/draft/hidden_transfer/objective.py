"""Training of Hidden Transfer's maps: a frozen target teaches the pseudo slots that they make (arXiv:2404.12022)."""

import dataclasses

import jax.numpy as jnp

from specjax.draft.hidden_transfer import HiddenTransfer, finished
from specjax.lm import Wants
from specjax.objectives.cuts import CutObjective


@dataclasses.dataclass(frozen=True)
class TrainHiddenTransfer(CutObjective):
    """Fits only the maps: the pseudo slots of a cut's last token are the guesses.

    The paper's loss is the Kullback-Leibler divergence from the target's distributions; `cuts` and `decay` are ours.
    """

    saved = ("layers",)

    drafter: HiddenTransfer

    @property
    def guesses(self) -> int:
        return self.drafter.maps

    @property
    def text_wants(self) -> Wants:
        return Wants(hidden=self.drafter.before)

    def said(self, params, target_params, batch, at, text):
        drafter = self.drafter
        rows, cuts = at.shape
        step, place = jnp.divmod(jnp.arange(drafter.maps * cuts), cuts)
        own = (place[:, None] == place[None]) & (step[None] <= step[:, None])
        block = self.slots(batch, at, place, step, own)
        entered = [jnp.take_along_axis(text.hidden[layer], at[:, :, None], axis=1) for layer in drafter.before]
        final = finished(drafter, params, target_params, entered, block, None, text.delta)
        by_cut = final.reshape(rows, drafter.maps, cuts, -1).swapaxes(1, 2).reshape(rows, cuts * drafter.maps, -1)
        return drafter.target.unembed(target_params, by_cut)
