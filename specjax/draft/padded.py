"""A draft model whose tables have different padding from its target's: the same tokens, then more or fewer rows."""

import dataclasses
from typing import Any

import jax.numpy as jnp

from specjax.draft.head import with_head
from specjax.lm import LM


@dataclasses.dataclass(frozen=True)
class PaddedLM:
    """A draft LM whose distributions have as many columns as the target's.

    Surplus columns are cut off, and missing ones are -inf. Its parameters are the model's. A token without a row is
    read as token 0; no tokenizer writes one.

    Attributes:
      lm: the model.
      vocab_size: V, of the target.
    """

    lm: LM
    vocab_size: int

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.lm, name)

    @property
    def reads(self) -> int:
        """How many tokens it reads: the rows of its table."""
        return self.lm.vocab_size

    def __call__(self, params, block, cache, *, wants, draw=None, past=None, partial=None):
        run = lambda body: self.lm(params, block, cache, wants=body, past=past, partial=partial)
        return with_head(run, lambda h: self.unembed(params, h), wants, draw)

    def unembed(self, params, h):
        logits = self.lm.unembed(params, h)[..., : self.vocab_size]
        lacking = self.vocab_size - logits.shape[-1]
        width = [(0, 0)] * (logits.ndim - 1) + [(0, lacking)]
        return jnp.pad(logits, width, constant_values=-jnp.inf) if lacking else logits
