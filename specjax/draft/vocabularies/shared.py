"""What drafters with a model of another vocabulary have in common: the model, and the text that it reads."""

import dataclasses
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from specjax.draft.base import Drafter, View
from specjax.draft.head import params_dtype
from specjax.draft.trim import TrimmedLM
from specjax.draft.vocabularies.spelling import WIDEST, Spelt
from specjax.draft.vocabularies.tables import Tables
from specjax.lm import Wants, encodes
from specjax.sharding.rules import shardings

Array = jax.Array
PyTree = Any
Text = TypeVar("Text", bound=Spelt)


@dataclasses.dataclass(frozen=True)
class SharedLM(TrimmedLM):
    """A draft LM of another vocabulary, as one of the target's tokens that both have.

    Its parameters are {`lm`: the model's, and the arrays of `Tables`}. It reads the target's tokens, each as one of its
    own, and gives logits `[..., U]`: those of its tokens that the target has, whose softmax is its distribution
    restricted to them.

    Attributes:
      lm: the model, which reads and writes its own tokens.
      vocab_size: V, of the target.
      kept: U.
      stretch: how many times as many tokens as the target's its own text may have.
    """

    vocab_size: int = 0
    kept: int = 0
    stretch: int = 1

    @classmethod
    def of(cls, lm: Any, tables: Tables) -> "SharedLM":
        """A draft LM over the tokens that both have. Its parameters are the tables' `arrays` and the model's own, `lm`."""
        return cls(lm, len(tables.counts), len(tables.ids), tables.stretch)

    def own(self, params, tokens):
        """The last of the model's tokens that spell each of the target's, int32. What both have is spelt by one."""
        ids = jnp.clip(tokens, 0, self.vocab_size - 1)
        last = params["counts"][ids] - 1
        return jnp.take_along_axis(params["spelling"][ids], last[..., None], axis=-1)[..., 0]

    def __call__(self, params, block, cache, *, wants, draw=None, past=None, partial=None):
        block = dataclasses.replace(block, tokens=self.own(params, block.tokens))
        return super().__call__(params, block, cache, wants=wants, draw=draw, past=past, partial=partial)

    def embed(self, params, tokens):
        return self.lm.embed(params["lm"], self.own(params, tokens))

    def unembed(self, params, h):
        return self.lm.unembed(params["lm"], h)[..., params["columns"]]


@dataclasses.dataclass(frozen=True)
class OtherTokens(Drafter):
    """A drafter with a `SharedLM`, whose state is a text of that model's own tokens.

    A committed token is read as the model's tokens that spell it. A text that needs more than `stretch` times the
    target's room has no more drafts.

    Attributes:
      lm: the draft model, a `SharedLM`.
    """

    lm: Any

    needs_params = True

    def check(self, target: Any) -> None:
        """Raises ValueError if it cannot draft for a target."""
        if not isinstance(self.lm, SharedLM):
            raise ValueError(
                f"{type(self).__name__} drafts with a SharedLM: make one with SharedLM.of; a ModelDrafter drafts with a "
                "model of the target's tokens"
            )
        if encodes(self.lm) or encodes(target):
            raise ValueError(
                "a draft model of other tokens knows no source: choose a target and a draft model without an encoder"
            )
        if self.lm.vocab_size != target.vocab_size:
            raise ValueError(
                f"the draft model's tables are for {self.lm.vocab_size} tokens, and the target has {target.vocab_size}: "
                "make them for this target"
            )

    def init(self, params, batch, capacity) -> Any:
        dtype = params_dtype(params["draft"]["lm"])
        return Spelt.empty(self.lm.lm, batch, self.lm.stretch * capacity, dtype)

    def axes(self, draft):
        return draft.axes(self.lm.lm)

    def param_shardings(self, mesh, params):
        return shardings(mesh, self.lm.axes(params), params, self.lm.axis_counts())

    def prefill(self, params, draft, chunk, output):
        own = params["draft"]
        draft = draft.spelling(own, chunk.block.tokens, chunk.real)
        return draft.read(self.lm.lm, own["lm"], min(chunk.real.shape[1], WIDEST), 0)

    def catch_up(self, params, draft, view):
        own, width = params["draft"], view.max_depth + 1
        read = lambda draft: _next(own, draft, view, view.length - 1).read(self.lm.lm, own["lm"], min(width, WIDEST), 0)
        behind = lambda draft: jnp.any(view.live & (view.length - draft.seen > width))
        return jax.lax.while_loop(behind, read, draft)

    def caught(self, params: PyTree, draft: Text, view: View) -> tuple[Text, Array]:
        """The state with the whole text read, and the features `[B, 1, E]` of its last token."""
        own, width = params["draft"], min(view.max_depth + 1, WIDEST)
        draft = _next(own, draft, view, view.length)
        draft = draft.read(self.lm.lm, own["lm"], width, width, view.live)
        count = draft.count - draft.length
        draft, output = draft.passed(self.lm.lm, own["lm"], width, count, Wants(final=True))
        last = jnp.clip(count - 1, 0, width - 1)
        return draft, jnp.take_along_axis(output.final, last[:, None, None], axis=1)


def _next(own: Any, draft: Text, view: View, end: Array) -> Text:
    """The text with the next D + 1 committed tokens spelt, of those before `end` `[B]`."""
    at = draft.seen[:, None] + jnp.arange(view.max_depth + 1)[None]
    return draft.spelling(own, jnp.take_along_axis(view.tokens, at, axis=1, mode="clip"), at < end[:, None])
