"""A draft model of few tokens: it reads and writes the most frequent tokens of its target, and all others are one to it.

VocabTrim (arXiv:2506.22694) cuts a draft's head; here the table of embeddings is cut too. A small model over a large
vocabulary is mostly these two tables. Changes speed, never text.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp

from specjax.draft.trim import TrimmedLM


@dataclasses.dataclass(frozen=True)
class CompactLM(TrimmedLM):
    """A draft LM with U tokens of V, and one more that stands for all others.

    Its parameters are {`lm`: those of a model with U + 1 tokens, `ids` `[U]`: its tokens, increasing}. It reads any token and
    gives logits `[..., U]`.

    Attributes:
      lm: the model of U + 1 tokens; the last one is read in place of all others, and never written.
      vocab_size: V.
    """

    lm: Any
    vocab_size: int = 0

    @property
    def kept(self) -> int:
        """U."""
        return self.lm.vocab_size - 1

    def init(self, key):
        """Random parameters, without the list of ids."""
        return {"lm": self.lm.init(key)}

    def columns(self, params, tokens):
        """The inner model's tokens for those of the target, int32."""
        places = jnp.full((self.vocab_size,), self.kept, jnp.int32)
        return places.at[params["ids"]].set(jnp.arange(self.kept, dtype=jnp.int32))[tokens]

    def __call__(self, params, block, cache, *, wants, draw=None, past=None, partial=None):
        block = dataclasses.replace(block, tokens=self.columns(params, block.tokens))
        return super().__call__(params, block, cache, wants=wants, draw=draw, past=past, partial=partial)

    def embed(self, params, tokens):
        return self.lm.embed(params["lm"], self.columns(params, tokens))

    def unembed(self, params, h):
        return self.lm.unembed(params["lm"], h)[..., : self.kept]

    def whole(self, params: Any) -> tuple[Any, Any]:
        """The same model with V tokens and a head of its own, for programs that know no other, and its parameters.

        A token that is not kept has the logit of the first kept one. Where that is the likeliest, another program may draft
        another token; such drafts are rejected.
        """
        from specjax.models.embedding import EmbeddingConfig
        from specjax.models.widening import untied

        lm, own = untied(self.lm, params["lm"])
        config = lm.config.every(EmbeddingConfig, vocab_size=self.vocab_size)
        read = self.columns(params, jnp.arange(self.vocab_size))
        written = jnp.where(read == self.kept, 0, read)
        own = {**own, "embed": {"embedding": own["embed"]["embedding"][read]}}
        own["head"] = {"kernel": own["head"]["kernel"][:, written]}
        return dataclasses.replace(lm, config=config), own
