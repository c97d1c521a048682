"""EAGLE-3: fuses three of the target's layers and feeds on its own outputs (Li et al. 2025, arXiv:2503.01840)."""

import dataclasses

import jax.numpy as jnp

from specjax.about import About
from specjax.draft.eagle import Eagle
from specjax.draft.head import head_kernel
from specjax.lm import Wants


@dataclasses.dataclass(frozen=True)
class Eagle3(Eagle):
    """As EAGLE, over taps of a low, a middle and a high layer, with its own head over the draft's vocabulary.

    `params["draft"]` is Eagle3Head's, with `head`: {`kernel` `[E, U]`} and, where U < V, `ids` `[U]`.

    Attributes:
      taps: the layers whose outputs are fused; empty: see `default_taps`.
      norm_before_residual: a flag of some published heads; see `Eagle3Head`.
      norm_before_fc: likewise.
    """

    about = About(
        "eagle3",
        "autoregression on three layers' features",
        "arXiv:2503.01840",
        expander="chain:length=3",
        loads="head",
    )

    taps: tuple[int, ...] = ()
    norm_before_residual: bool = False
    norm_before_fc: bool = False

    @property
    def feature_wants(self) -> Wants:
        return Wants(hidden=self.taps)

    @property
    def head(self):
        from specjax.draft.heads.eagle import Eagle3Head

        return Eagle3Head(self.config, len(self.taps), self.norm_before_residual, self.norm_before_fc)

    def bind(self, target):
        bound = super().bind(target)
        taps = self.taps or default_taps(target.num_layers)
        if list(taps) != sorted(set(taps)) or taps[0] < 0 or taps[-1] >= target.num_layers:
            raise ValueError(f"eagle3: taps {taps} must be increasing layers of the target's {target.num_layers}")
        return dataclasses.replace(bound, taps=taps)

    def init_params(self, key, target_params):
        """The head over the whole vocabulary starts as the target's own."""
        return {**self.head.init(key), "head": {"kernel": head_kernel(self.target, target_params)}}

    def features(self, output):
        return jnp.concatenate([output.hidden[layer] for layer in self.taps], axis=-1)

    def read(self, params, features, block, cache, past=None):
        return self.reread(params, self.head.fuse(params["draft"], features), block, cache, past)

    def reread(self, params, features, block, cache, past):
        embeds = self.target.embed(params["target"], block.tokens)
        return self.head(params["draft"], embeds, features, block, cache, past)

    def logits(self, params, h):
        return super().logits(params, self.head.norm(params["draft"], h))


def default_taps(layers: int) -> tuple[int, ...]:
    """Outputs of layers 1, L // 2 - 1 and L - 4, as published; of a small model, layers near its ends and middle."""
    if layers >= 12:
        return 1, layers // 2 - 1, layers - 4
    return tuple(sorted({layers // 8, layers // 2, layers - 1}))
