"""The target drafts for itself from a smaller cache beside its own cache, which verifies (QuantSpec, arXiv:2502.10424)."""

import dataclasses
from typing import Any

from specjax.about import About
from specjax.draft.base import TreeDrafter
from specjax.draft.model import ModelDrafter
from specjax.expand import Chain, Expander


@dataclasses.dataclass(frozen=True)
class SmallCache(TreeDrafter):
    """The target as its own draft model, with a smaller cache; training-free.

    If the smaller cache loses nothing, drafts are the target's own tokens, so most are accepted. Each costs a pass over
    all of the target's weights. So it pays if a step reads more cache than weights: for long texts and large batches.

    The smaller cache lies beside the whole one and is written from the same tokens. QuantSpec keeps the two in one: the
    upper four bits of each number are for drafts, all eight for the target.

    Attributes:
      cache_dtype: the smaller cache's, see `specjax.models.load`.
      expander: turns next-token distributions into a tree.
      target: with that cache; filled in by `bind`.
    """

    about = About(
        "small_cache",
        "the target itself, from a cache in eight bits beside its own",
        "arXiv:2502.10424",
        expander="chain",
    )

    cache_dtype: str = "int8"
    expander: Expander = Chain()
    target: Any = None

    def bind(self, target):
        from specjax import models  # flax is slow to import

        if not isinstance(target, models.LlamaLM):
            raise ValueError(
                f"small_cache needs a second kind of cache for its target, and a {type(target).__name__} has only one"
            )
        small = models.cached(models.Model(target, None), self.cache_dtype).lm
        if target.old is not None:
            raise ValueError(
                f"small_cache keeps the whole text, and the cache {type(target.old).__name__} forgets: leave one out"
            )
        if small.cache_dtype == target.cache_dtype:
            raise ValueError(
                f"small_cache and its target both have a cache in {small.cache_dtype}: choose another type"
            )
        return dataclasses.replace(self, target=dataclasses.replace(small, ahead=None))

    @property
    def _own(self) -> ModelDrafter:
        return ModelDrafter(self.target, self.expander)

    def init(self, params, batch, capacity):
        return self._own.init(_of(params), batch, capacity)

    def axes(self, draft):
        return self._own.axes(draft)

    def encode(self, params, draft, source, tokens):
        return self._own.encode(_of(params), draft, source, tokens)

    def prefill(self, params, draft, chunk, output):
        return self._own.prefill(_of(params), draft, chunk, output)

    def catch_up(self, params, draft, view):
        return self._own.catch_up(_of(params), draft, view)

    def propose(self, params, draft, view, sampler):
        return self._own.propose(_of(params), draft, view, sampler)

    def hidden(self, carry):
        """See `ModelDrafter.hidden`."""
        return self._own.hidden(carry)


def _of(params: Any) -> Any:
    """The parameters in the form of a draft model's."""
    return {**params, "draft": params["target"]}
