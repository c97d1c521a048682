"""EAGLE-3: fuses three of the target's layers and feeds on its own outputs (Li et al. 2025, arXiv:2503.01840)."""

import dataclasses

import jax.numpy as jnp

from specjax.about import About
from specjax.draft.eagle import Eagle
from specjax.draft.feature import layers_config, sized, sizes
from specjax.draft.head import head_kernel
from specjax.lm import Wants


@dataclasses.dataclass(frozen=True)
class Eagle3(Eagle):
    """EAGLE over taps of a low, a middle and a high layer, with a separate head over the draft's vocabulary.

    `params["draft"]` is Eagle3Head's, with `head`: {`kernel` `[E, U]`}. If U < V it has `ids` `[U]`; if the head has
    its own table, `embed`: {`embedding` `[V, E]`}. Without `head`, the target's head is used. E may differ from the
    target's width.

    Attributes:
      taps: the layers whose outputs are fused; empty: see `default_taps`.
      layers: decoder layers of the head, if `config` does not say it.
      inner: the width of their MLPs; 0 for the config's, or the target's.
      heads: heads of their attention; 0 for the config's, or the target's.
      kv_heads: key and value heads; 0 for the config's, or the target's.
      head_dim: the width of a head; 0 for the config's, or the target's.
      norm_before_residual: a flag of some published heads; see `Eagle3Head`.
      norm_before_fc: another; see `Eagle3Head`.
      fc_norm: another (EAGLE-3.1); see `Eagle3Head`.
      norm_output: whether the head feeds on its outputs after its last norm, not before it (EAGLE-3.1).
    """

    about = About(
        "eagle3",
        "autoregression on three layers' features",
        "arXiv:2503.01840",
        expander="chain:length=3",
        paper="expander=top_k,k=10,depth=8,nodes=60",
        loads="head",
    )
    tiles = True

    taps: tuple[int, ...] = ()
    layers: int = 1
    inner: int = 0
    heads: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False

    any_width = True

    @property
    def feature_wants(self) -> Wants:
        return Wants(hidden=self.taps)

    @property
    def head(self):
        from specjax.draft.eagle3.network import Eagle3Head

        wide = getattr(getattr(self.target, "config", None), "hidden_size", None)
        return Eagle3Head(
            self.config, len(self.taps), self.norm_before_residual, self.norm_before_fc, self.fc_norm, wide
        )

    def bind(self, target):
        if self.layers < 1:
            name = type(self).__name__.lower()
            raise ValueError(f"{name}: a head has at least one layer, got layers={self.layers}")
        own = sized(self, self.config or layers_config(target, "eagle3", self.layers))
        bound = dataclasses.replace(super().bind(target), config=own, layers=own.num_hidden_layers, **sizes(own))
        taps = self.taps or default_taps(target.num_layers)
        if list(taps) != sorted(set(taps)) or taps[0] < 0 or taps[-1] >= target.num_layers:
            raise ValueError(f"eagle3: taps {taps} must be increasing layers of the target's {target.num_layers}")
        return dataclasses.replace(bound, taps=taps)

    def init_params(self, key, target_params):
        """The head over the whole vocabulary starts as the target's own."""
        return {**self.head.init(key), "head": {"kernel": head_kernel(self.target, target_params)}}

    @classmethod
    def objective(cls):
        from specjax.draft.eagle3.objective import TrainEagle3

        return TrainEagle3

    @classmethod
    def layout(cls):
        from specjax.draft.eagle3.published import LAYOUT

        return LAYOUT

    def features(self, output):
        return jnp.concatenate([output.hidden[layer] for layer in self.taps], axis=-1)

    def read(self, params, features, block, cache, past=None):
        return super().read(params, self.head.fuse(params["draft"], features), block, cache, past)

    def reread(self, params, h, block, cache, past):
        h = self.head.norm(params["draft"], h) if self.norm_output else h
        return super().read(params, h, block, cache, past)

    def logits(self, params, h):
        return super().logits(params, self.head.norm(params["draft"], h))


def default_taps(layers: int) -> tuple[int, ...]:
    """Outputs of layers 1, L // 2 - 1 and L - 4, as published; for a small model, layers near its ends and middle."""
    if layers >= 12:
        return 1, layers // 2 - 1, layers - 4
    return tuple(sorted({layers // 8, layers // 2, layers - 1}))
