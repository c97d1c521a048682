"""Two mixers side by side in a layer: one with a slot per token, and one with a running state (Falcon-H1,
huggingface.co/tiiuae).

Shapes: see `specjax.models.mixers`.
"""

import dataclasses
from collections.abc import Hashable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from specjax.lm import Block
from specjax.models.attention import AttentionConfig
from specjax.models.kept import Kept
from specjax.models.mixers import Mixer, MixerConfig, StateMixerConfig

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class BothConfig(MixerConfig):
    """Attention and a mixer with a running state, which read the same input, and whose outputs are added.

    Attributes:
      slots: the attention.
      state: the other mixer.
      slots_factors: the factors of what the attention reads, and of what it gives.
      state_factors: those of the other mixer.
    """

    name: ClassVar[str] = "both"

    slots: AttentionConfig
    state: StateMixerConfig
    slots_factors: tuple[float, float] = (1.0, 1.0)
    state_factors: tuple[float, float] = (1.0, 1.0)

    def build(self, width: int, dtype: Any, rngs: nnx.Rngs, kernel: Any = None) -> "Both":
        return Both(self, width, dtype, rngs, kernel)

    @property
    def parts(self) -> tuple[MixerConfig, ...]:
        return (self.slots, self.state)

    def given(self, kept: Kept) -> Kept:
        return kept

    def kept(self, delta: Kept) -> Kept:
        return delta

    @property
    def reads(self) -> Hashable:
        return self.slots.reads, type(self.state), self.state.reads

    def tables(self, positions: Array, longest: int) -> tuple[Any, Any]:
        return self.slots.tables(positions, longest), self.state.tables(positions, longest)


class Both(Mixer):
    """See `BothConfig`; the names of its parts are those of their modules."""

    def __init__(self, config: BothConfig, width: int, dtype: Any, rngs: nnx.Rngs, kernel: Any = None):
        for part in config.parts:
            setattr(self, part.name, part.build(width, dtype, rngs, kernel))
        self.config = config

    def __call__(self, x, tables, block: Block, cache, past, positions, shared=None):
        """See `Mixer`; `cache`, `past` and the delta are `Kept`."""
        c, none = self.config, Kept()
        cache, past, shared = (none if one is None else one for one in (cache, past, shared))
        scaled = lambda x, by: x if by == 1 else x * jnp.asarray(by, x.dtype)
        total, deltas = None, []
        for at, (part, (before, after)) in enumerate(zip(c.parts, (c.slots_factors, c.state_factors), strict=True)):
            module = getattr(self, part.name)
            own, delta = module(scaled(x, before), tables[at], block, cache[at], past[at], positions, shared[at])
            own = scaled(own, after)
            total = own if total is None else total + own
            deltas.append(delta)
        return total, Kept(*deltas)

    def split_products(self) -> tuple[Any, ...]:
        return tuple(product for part in self.config.parts for product in getattr(self, part.name).split_products())
