"""Distillation of a small language model into a better draft (DistillSpec, arXiv:2310.08461)."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax import decoder as decoding
from specjax.lm import LM, Wants
from specjax.objectives.base import Batch, of_target, read
from specjax.objectives.draft import OfDraft
from specjax.objectives.losses import ForwardKL, Loss, acceptance, agreement
from specjax.objectives.means import MEAN
from specjax.objectives.teacher import Guess, Teacher, score
from specjax.prompts import Prompts
from specjax.sampling import SamplingArrays
from specjax.speculative import speculative
from specjax.train.select import select

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class Distill(OfDraft):
    """Fits a draft model's next-token distributions to the target's.

    `target_params` are the target's parameters or, with `keep` below 1, a pair of those and the reference draft's.

    Attributes:
      target: the teacher.
      draft: the model that is trained.
      divergence: the loss.
      temperature: divides both models' logits; use the decoding temperature to optimise acceptance at it.
      on_policy: the share of rows whose texts the draft writes itself, at temperature 1, in place of the data's.
      prompt: the least number of tokens of the data's text that it continues; a row's own prompt is kept whole.
      keep: the share of tokens to train on, chosen by `select` against a reference draft.
      eos_ids: tokens that end a text that the draft writes.
      ids: the tokens of a draft of few tokens (`specjax.draft.compact`); empty for one with all.
    """

    divergence: Loss = ForwardKL()
    temperature: float = 1.0
    on_policy: float = 0.0
    prompt: int = 16
    keep: float = 1.0
    eos_ids: tuple[int, ...] = ()
    ids: tuple[int, ...] = ()

    @property
    def packed(self):
        """Whether rows may be packed: not if the draft continues from the beginning of a row, which is then one
        document."""
        return self.on_policy == 0

    def __post_init__(self):
        if not 0 <= self.on_policy <= 1:
            raise ValueError(f"distill: on_policy must lie in [0, 1], got {self.on_policy}")
        if not 0 < self.keep <= 1:
            raise ValueError(f"distill: keep must lie in (0, 1], got {self.keep}")
        if not self.temperature > 0:
            raise ValueError(f"distill: temperature must be positive, got {self.temperature}")
        if self.prompt < 1:
            raise ValueError(f"distill: prompt must be at least 1 token, got {self.prompt}")
        if self.ids and (self.on_policy or self.keep < 1):
            raise ValueError("distill: on_policy and keep are for drafts with all tokens, without --draft-vocabulary")

    @property
    def reads(self):
        return Wants(final=True) if self.on_policy == 0 else None

    def held_out(self, target_params):
        """The same objective over all tokens of the unchanged text."""
        own = target_params[0] if self.keep < 1 else target_params
        return dataclasses.replace(self, on_policy=0.0, keep=1.0), own

    def export(self, params):
        return {**params, "ids": np.asarray(self.ids, np.int32)} if self.ids else params

    def loss(self, params, target_params, batch, key, mean=MEAN):
        if self.keep < 1:
            return self._loss_of_chosen(params, target_params, self._data(params, batch, key), mean)
        batch = self._data(params, batch, key)
        output = of_target(self.target, target_params, batch, Wants(final=True))
        of_target_model = lambda final: self.target.unembed(target_params, final) / self.temperature
        params = self.export(params)
        final = read(self.draft, params, batch, Wants(final=True)).final[:, :-1]
        of_draft = lambda final: self.draft.unembed(params, final) / self.temperature
        teacher = Teacher(batch, dataclasses.replace(output, topk=None), of_target_model, self.ids)
        loss, metrics = score(teacher, [Guess(final, of_draft, 0, 1.0)], self.divergence, mean)
        return loss, {"agreement" if name == "agreement_1" else name: value for name, value in metrics.items()}

    def _loss_of_chosen(self, params, frozen, batch, mean):
        target_params, reference_params = frozen
        mask = batch.due(1)
        final = of_target(self.target, target_params, batch, Wants(final=True)).final
        target = self.target.unembed(target_params, final[:, :-1]) / self.temperature
        draft = self._logits(self.draft, params, batch)
        chosen = select(target, draft, self._logits(self.draft, reference_params, batch), mask, self.keep, mean)
        metrics = {
            "acceptance": mean(acceptance(target, draft), mask),
            "agreement": mean(agreement(target, draft), mask),
            "weight": chosen.sum(),
        }
        return self.divergence(target, draft, chosen, batch.tokens[:, 1:], mean), metrics

    def _data(self, params: Any, batch: Batch, key: Array) -> Batch:
        if self.on_policy == 0:
            return batch
        batch = dataclasses.replace(batch, documents=None)  # a row is one
        noise = key if key.ndim else jax.random.split(key, len(batch.tokens))
        own = jax.vmap(lambda key: jax.random.uniform(jax.random.fold_in(key, 1)))(noise) < self.on_policy
        params = jax.lax.stop_gradient(params)

        def write():
            written = continuations(self.draft, params, batch, noise, prompt=self.prompt, eos_ids=self.eos_ids)
            tokens, mask = (
                jnp.where(own[:, None], new, old)
                for new, old in ((written.tokens, batch.tokens), (written.mask, batch.mask))
            )
            return dataclasses.replace(batch, tokens=tokens, mask=mask)

        return jax.lax.cond(own.any(), write, lambda: batch)

    def _logits(self, lm: LM, params: Any, batch: Batch) -> Array:
        """The logits of slots 0 to T - 2, which score tokens 1 to T - 1."""
        return read(lm, params, batch, Wants(logits=True)).logits[:, :-1] / self.temperature


def continuations(
    lm: LM, params: Any, batch: Batch, key: Array, *, prompt: int, eos_ids: tuple[int, ...] = ()
) -> Batch:
    """Rows with texts that a model writes itself, at temperature 1, from the beginnings of a batch's rows.

    A row keeps its own prompt (the tokens before the first predicted one), and at least `prompt` tokens if it has more
    than that. The model writes up to the row's end or an EOS. A row without tokens to predict stays so.

    Args:
      lm: the model.
      params: its parameters.
      batch: the rows.
      key: a typed key, or one per row.
      prompt: at least 1.
      eos_ids: ids that end a text.
    """
    rows, length = batch.tokens.shape
    slots = jnp.arange(length, dtype=jnp.int32)[None]
    first = jnp.argmax(batch.mask, axis=1)
    end = length - jnp.argmax(batch.mask[:, ::-1], axis=1)
    start = jnp.maximum(first, jnp.minimum(prompt, end - 1))
    start = jnp.clip(start, 1, length - 1).astype(jnp.int32)
    decoder = speculative(lm)
    models = {"target": params, "draft": None}
    prompts = Prompts(
        jnp.where(slots < start[:, None], batch.tokens, 0),
        start,
        key if key.ndim else jax.random.split(key, rows),
        jnp.full((rows,), length, jnp.int32),
        SamplingArrays.make(rows, temperature=1.0),
        jnp.tile(jnp.asarray(eos_ids, jnp.int32)[None], (rows, 1)) if eos_ids else None,
    )
    state = decoder.init(models, prompts, capacity=length + decoder.slack)
    state = decoding.run(decoder, models, state)
    written = slots < state.length[:, None]
    return Batch(
        jnp.where(written, state.tokens[:, :length], 0),
        written & (slots >= start[:, None]) & batch.mask.any(axis=1)[:, None],
    )
