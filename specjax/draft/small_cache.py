"""The target drafts for itself from a smaller cache beside its own, which verifies (QuantSpec, arXiv:2502.10424)."""

import dataclasses
from typing import Any

from specjax.about import About
from specjax.draft.base import TreeDrafter
from specjax.draft.model import ModelDrafter
from specjax.expand import Chain, Expander


@dataclasses.dataclass(frozen=True)
class SmallCache(TreeDrafter):
    """Training-free. Drafts are the target's own words where the smaller cache loses nothing, so most are taken; each costs a
    pass over all of the target's weights, and pays where a step reads more of cache than of weights: long texts, large batches.

    The smaller cache lies beside the whole one and is written from the same tokens. (QuantSpec keeps the two in one: the upper
    four bits of each number are for drafts, all eight for the target.)

    Attributes:
      cache_dtype: of the smaller cache, see `specjax.models.load`.
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
        from specjax import models  # flax takes a while

        if not isinstance(target, models.LlamaLM):
            raise ValueError(
                f"small_cache makes another cache of its target, and a {type(target).__name__} has no other"
            )
        small = models.cached(models.Model(target, None), self.cache_dtype).lm
        if target.old is not None:
            raise ValueError(
                f"small_cache keeps all of a text, which the cache {type(target.old).__name__} is to forget: leave one out"
            )
        if small.cache_dtype == target.cache_dtype:
            raise ValueError(f"small_cache and its target would have the same cache twice, in {small.cache_dtype}")
        return dataclasses.replace(self, target=dataclasses.replace(small, ahead=None))

    @property
    def _own(self) -> ModelDrafter:
        return ModelDrafter(self.target, self.expander)

    def init(self, params, batch, capacity):
        return self._own.init(_of(params), batch, capacity)

    def axes(self, draft):
        return self._own.axes(draft)

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
    """The parameters as those of a draft model are given."""
    return {**params, "draft": params["target"]}
