"""DFlash 2: DFlash's block with convolutions over its slots, and a selector that walks the likeliest tokens of each slot
(z-lab/dflash, https://inco.ai/blog/dflash2/).
"""

import dataclasses

import jax
import jax.numpy as jnp

from specjax.about import About
from specjax.draft.base import Proposal
from specjax.draft.dflash import DFlash
from specjax.draft.dflash2.selector import Selector, spread
from specjax.draft.head import params_dtype
from specjax.expand import Chain, Expander


@dataclasses.dataclass(frozen=True)
class DFlash2(DFlash):
    """DFlash, but convolutions are around all of its sublayers, and a slot's distribution is over its likeliest tokens,
    scored by the token before, so that it depends on the node's path.

    The layers run once for a block, the selector once for a level. `params["draft"]` is DFlash's with `selector`, see
    Selector; `convolution` is in each layer's `attention` and `mlp`, see Convolution.

    Attributes:
      reach: how many slots a convolution reads: its own and those before it in the block.
      group: how many channels share a convolution's dynamic coefficients.
      rank: of the selector.
      candidates: how many of a slot's likeliest tokens the selector scores; other tokens are not drafted.
      input_scale: the factor of the slots' embeddings.
      multiplier: the factor of logits, before candidates are taken.
      soft_cap: keeps these logits within this distance of zero, by a tanh; 0: they are not capped.
    """

    about = About(
        "dflash2",
        "DFlash with convolutions over the block, and a selector of each slot's likeliest tokens",
        "z-lab/dflash",
        expander="chain:length=3",
        paper="expander=chain,length=7",
        loads="head",
    )
    shared = False

    expander: Expander = Chain(3)
    reach: int = 2
    group: int = 16
    rank: int = 32
    candidates: int = 16
    input_scale: float = 1.0
    multiplier: float = 1.0
    soft_cap: float = 0.0

    def __post_init__(self):
        super().__post_init__()
        least = {name: getattr(self, name) for name in ("reach", "group", "rank", "candidates")}
        if low := next((name for name, size in least.items() if size < 1), None):
            raise ValueError(f"dflash2: {low} must be at least 1, got {least[low]}")
        if self.reach > self.block:
            raise ValueError(f"dflash2: reach={self.reach} is more than the {self.block} slots of a block")
        if min(self.input_scale, self.multiplier) <= 0:
            raise ValueError(
                f"dflash2: input_scale and multiplier must be above 0, got {self.input_scale} and {self.multiplier}"
            )
        if self.soft_cap < 0:
            raise ValueError(f"dflash2: soft_cap must not be negative, got {self.soft_cap}; 0 is none")

    def bind(self, target):
        bound = super().bind(target)
        if bound.config.hidden_size % self.group:
            raise ValueError(
                f"dflash2: group={self.group} does not divide the {bound.config.hidden_size} channels of its layers"
            )
        return bound

    @property
    def head(self):
        from specjax.draft.dflash2.network import ConvolutionConfig, convolved  # flax is slow to import

        plain = super().head
        around = ConvolutionConfig(self.reach, self.group, self.block)
        return dataclasses.replace(plain, config=convolved(plain.config, around))

    @property
    def selector(self) -> Selector:
        """The selector, as functions."""
        return Selector(self.config.hidden_size, self.rank, self.candidates)

    def init_params(self, key, target_params):
        """Parameters with which drafts are those of a DFlash over its likeliest tokens."""
        params = super().init_params(key, target_params)
        made = self.selector.init(jax.random.fold_in(key, 1), self.target.vocab_size, params_dtype(params["fc"]))
        return {**params, "selector": made}

    @classmethod
    def objective(cls):
        from specjax.draft.dflash2.objective import TrainDFlash2

        return TrainDFlash2

    @classmethod
    def layout(cls):
        from specjax.draft.dflash2.published import LAYOUT

        return LAYOUT

    def trimmed(self, params, target_params, ids):
        drafter, own = super().trimmed(params, target_params, ids)
        after = {"embedding": params["selector"]["after"]["embedding"][ids]}
        return drafter, {**own, "selector": {**params["selector"], "after": after}}

    def widened(self, params, k, width):
        from specjax.draft.dflash2.widening import with_groups

        return with_groups(params, k, width)

    def slots(self, params, tokens):
        embeds = super().slots(params, tokens)
        return embeds if self.input_scale == 1 else embeds * self.input_scale

    def logits(self, params, h):
        logits = super().logits(params, h)
        logits = logits if self.multiplier == 1 else logits * self.multiplier
        return self.soft_cap * jnp.tanh(logits / self.soft_cap) if self.soft_cap else logits

    def propose(self, params, draft, view, sampler):
        h = self.outputs(params, draft, view)[:, : self.expander.depth]
        logits, own = self.logits(params, h), params["draft"]["selector"]
        likeliest = self.selector.likeliest(logits)

        def dist(depth, tokens):
            values, columns = (x[:, depth] for x in likeliest)
            return spread(self.selector(own, h[:, depth], tokens, (values, columns)), columns, logits.shape[-1])

        grow = lambda carry, level: (carry, dist(level.depth, level.tokens))
        first = dist(0, view.root[:, None])[:, 0]
        sampler = self.restricted(params, sampler)
        return Proposal(self.expander(view.root, first, grow, None, sampler, keep_q=view.keep_q), draft)
