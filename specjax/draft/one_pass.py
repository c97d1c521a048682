"""The common part of drafters with a model that sees both ways: one pass gives the distributions of all positions ahead.

The model reads mask tokens after the text. Each position's distribution knows nothing of the others' tokens.
A committed token's keys and values come from the last pass that read it (Fast-dLLM's prefix cache). Outside the prompt,
that pass had the masks after the token. So a step reads only the new tokens, the masks, and the `recent` tokens before.
"""

import abc
import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from specjax.draft.base import Drafter, View, caught_up
from specjax.lm import LM, Block, Wants, check_both_encode, check_both_ways
from specjax.sharding.rules import shardings

Array = jax.Array
PyTree = Any


@dataclasses.dataclass(frozen=True)
class OnePass(Drafter):
    """Drafts from one pass of `lm`, a model that sees both ways. The state has its `cache` and `length` `[B]`, tokens in it.

    Attributes:
      lm: the model.
      mask_id: its mask; never proposed.
    """

    lm: LM
    mask_id: int

    called: ClassVar[str] = "diffusion model"
    """What kind of model it is, in messages."""

    needs_params = True

    @property
    @abc.abstractmethod
    def shift(self) -> bool:
        """Static: whether the model's output at position i - 1 is for position i (Dream), rather than the output at i
        (LLaDA).
        """

    @property
    def recent(self) -> int:
        """Static: how many tokens before the new ones a step reads again, since they now see others after them."""
        return 0

    @property
    @abc.abstractmethod
    def candidates(self) -> int:
        """Static: the most tokens that are taken of one position's distribution."""

    def bind(self, target):
        check_both_ways(self.lm, f"a {self.called}")
        check_both_encode(self.lm, target, f"the {self.called}")
        if self.lm.vocab_size != target.vocab_size:
            raise ValueError(
                f"the {self.called} has {self.lm.vocab_size} tokens and the target {target.vocab_size}: they must share "
                "one vocabulary"
            )
        rows = getattr(self.lm, "reads", self.lm.vocab_size)
        if not 0 <= self.mask_id < rows:
            raise ValueError(f"mask_id {self.mask_id} is outside the vocabulary of {rows} tokens")
        if self.candidates >= self.lm.vocab_size:
            raise ValueError(
                f"{self.candidates} candidates are taken of a distribution: fewer than the vocabulary holds are needed"
            )
        return self

    def model(self, params: PyTree) -> PyTree:
        """The model's parameters."""
        return params["draft"]

    def fresh(self, params: PyTree, batch: int, capacity: int) -> tuple[PyTree, Array]:
        """An empty cache and its lengths."""
        dtype = jax.tree.leaves(self.model(params))[0].dtype
        return self.lm.init_cache(batch, capacity, dtype), jnp.zeros((batch,), jnp.int32)

    def model_shardings(self, mesh: jax.sharding.Mesh, params: PyTree) -> PyTree:
        """Where the model's parameters belong on a mesh."""
        return shardings(mesh, self.lm.axes(params), params, self.lm.axis_counts())

    def encode(self, params, draft, source, tokens):
        return dataclasses.replace(draft, cache=self.lm.encode(self.model(params), draft.cache, source))

    def prefill(self, params, draft, chunk, output):
        seen = _seen(chunk.real)
        block = Block(chunk.block.tokens, chunk.block.positions, draft.length, seen, causal=False)
        delta = self.lm(self.model(params), block, draft.cache, wants=Wants()).delta
        cache = self.lm.commit(draft.cache, delta, None, draft.length)
        return dataclasses.replace(draft, cache=cache, length=draft.length + chunk.real.sum(axis=1, dtype=jnp.int32))

    def catch_up(self, params, draft, view):
        return caught_up(self.prefill, params, draft, view)

    def read(self, params: PyTree, draft: Any, view: View, masks: Array) -> tuple[PyTree, Array]:
        """One pass over the tokens of the last step, `recent` tokens before them, and the masks after them.

        Args:
          params: the parameters.
          draft: the state.
          view: of the step.
          masks: `[B, D]` bool, which of the D masks are seen; the first one always is.

        Returns:
          The cache, and log-probabilities `[B, D, V]` float32; those of masks that are not seen mean nothing.
        """
        batch, ahead = masks.shape
        width = min(self.recent + view.max_depth + 1, view.tokens.shape[1])
        begin = jnp.clip(draft.length - self.recent, 0, view.tokens.shape[1] - width)
        at = begin[:, None] + jnp.arange(width)[None]
        places = view.length[:, None] + jnp.arange(ahead)[None]
        new = jnp.take_along_axis(view.tokens, at, axis=1, mode="clip")
        tokens = jnp.concatenate([new, jnp.full((batch, ahead), self.mask_id)], axis=1)
        real = jnp.concatenate([at < view.length[:, None], masks], axis=1)
        positions = jnp.concatenate([at, places], axis=1)
        block = Block(tokens, positions, begin, _seen(real), causal=False)
        output = self.lm(self.model(params), block, draft.cache, wants=Wants(final=True))
        # the write depends on the read, so that the cache is updated in place; see `ModelDrafter.propose`
        after = jnp.where(jnp.isnan(output.final[:, 0, 0]), 0, begin)
        cache = self.lm.commit(draft.cache, jax.tree.map(lambda x: x[:, :width], output.delta), None, after)
        last = jnp.clip(view.length - begin - 1, 0, width - 1)
        of_root = jnp.take_along_axis(output.final, last[:, None, None], axis=1)
        of_masks = output.final[:, width:]
        final = jnp.concatenate([of_root, of_masks[:, :-1]], axis=1) if self.shift else of_masks
        logits = self.lm.unembed(self.model(params), final)
        return cache, jax.nn.log_softmax(logits.at[:, :, self.mask_id].set(-jnp.inf), axis=-1)


def _seen(real: Array) -> Array:
    """The visibility `[B, T, T]`: every token sees all real tokens, and every slot itself."""
    return real[:, None, :] | jnp.eye(real.shape[1], dtype=bool)[None]
