"""VocabTrim: a draft head over only the most frequent tokens (arXiv:2506.22694). Changes speed, never text."""

import dataclasses
from typing import Any

import jax.numpy as jnp

from specjax.draft.base import Drafter, TreeDrafter
from specjax.draft.head import check_ids, head_columns, with_bias, with_head
from specjax.lm import LM
from specjax.models.param_axes import param_axes

PyTree = Any
_ALREADY = "this drafter's head is trimmed already: trim the one with all tokens"


@dataclasses.dataclass(frozen=True)
class TrimmedLM:
    """A draft LM whose head has U columns; everything else is the model's.

    Its parameters are {`lm`, `head`: {`kernel` `[E, U]`}, `ids` `[U]`}, and the head has a `bias` `[U]` if the model's
    has one. `vocab_size` remains V, the tokens that it reads.

    Attributes:
      lm: the model.
    """

    lm: LM

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.lm, name)

    def __call__(self, params, block, cache, *, wants, draw=None, past=None, partial=None):
        run = lambda body: self.lm(params["lm"], block, cache, wants=body, past=past, partial=partial)
        return with_head(run, lambda h: self.unembed(params, h), wants, draw)

    def encode(self, params, cache, source):
        return self.lm.encode(params["lm"], cache, source)

    def embed(self, params, tokens):
        return self.lm.embed(params["lm"], tokens)

    def layers(self, params, *args, **kwargs):
        return self.lm.layers(params["lm"], *args, **kwargs)

    def norm(self, params, h):
        return self.lm.norm(params["lm"], h)

    def unembed(self, params, h):
        head = params["head"]
        return with_bias(jnp.matmul(h, head["kernel"], preferred_element_type=jnp.float32), head)

    def axes(self, params):
        return {**param_axes(params), "lm": self.lm.axes(params["lm"])}


def trim(drafter: Drafter, params: PyTree, ids: Any, vocab_size: int) -> tuple[Drafter, PyTree]:
    """A drafter that proposes only the tokens `ids`, with a head of their columns.

    Args:
      drafter: bound to its target; it must have a language-model head.
      params: {"target": ..., "draft": ...}.
      ids: `[U]` increasing target ids, such as `specjax.draft.head.most_frequent` picks from a corpus.
      vocab_size: V.

    Returns:
      The drafter and its own parameters.

    Raises:
      ValueError: for ids that are not increasing target ids, or fewer than its tree takes; and for a drafter without a
        head, or with one that is already trimmed.
    """
    ids = check_ids(ids, vocab_size)
    if isinstance(params["draft"], dict) and "ids" in params["draft"]:
        raise ValueError(_ALREADY)
    if isinstance(drafter, TreeDrafter) and drafter.expander.width > ids.size:
        raise ValueError(
            f"the drafter takes {drafter.expander.width} candidates per node: keep more than {ids.size} tokens"
        )
    return drafter.trimmed(params["draft"], params["target"], ids)


def trimmed_model(lm: LM, params: PyTree, ids: Any) -> tuple[TrimmedLM, PyTree]:
    """A draft LM and its parameters, with only the columns `ids` of its head.

    Raises:
      ValueError: if its head is trimmed already.
    """
    if isinstance(lm, TrimmedLM):
        raise ValueError(_ALREADY)
    return TrimmedLM(lm), {
        "lm": params,
        "head": head_columns(lm, params, ids),
        "ids": jnp.asarray(ids, jnp.int32),
    }
