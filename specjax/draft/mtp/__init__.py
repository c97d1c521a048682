"""Multi-token prediction: some targets were trained with an extra layer, which drafts here (DeepSeek-V3, arXiv:2412.19437)."""

import dataclasses
import functools
from typing import Any

import jax

from specjax.about import About
from specjax.draft.base import Proposal
from specjax.draft.eagle import Eagle
from specjax.draft.feature import layers_config
from specjax.draft.mtp import several
from specjax.lm import Wants


def own_layers(target: Any, count: int = 1) -> Any:
    """The `ModelConfig` of a module's layers: as other heads' layers, but with latent attention where the target's last layer
    has it.

    Raises:
      ValueError: see `specjax.draft.feature.head_config`.
    """
    from specjax.models.latent import LatentAttentionConfig

    plain, last = layers_config(target, "mtp", count), target.config.layers[-1].mixer
    if not isinstance(last, LatentAttentionConfig):
        return plain
    return plain.each(lambda i, layer: dataclasses.replace(layer, mixer=last))


@dataclasses.dataclass(frozen=True)
class MTP(Eagle):
    """EAGLE with a decoder layer of the target's own class, norms before and after it, and the target's head.

    One module drafts every depth: it feeds on its own normed output, as on the target's normed feature at depth 1. Of several
    modules, each drafts one depth (`specjax.draft.mtp.several`).

    `params["draft"]` is MtpHead's or, of several modules, {`modules`: {0: MtpHead's, 1: ...}}. If the file has its own head
    or fewer tokens, it also has `head` and `ids`, as in EAGLE.

    Attributes:
      config: of the modules' layers, one for each.
      final_norm: whether the target's features are read after its final norm, as in DeepSeek-V3, or before it, as in
        MiMo.
    """

    about = About(
        "mtp",
        "the extra layer that a target was trained with, from its own folder",
        "arXiv:2412.19437",
        expander="chain:length=3",
        loads="own_head",
    )
    tiles = True

    final_norm: bool = True

    @property
    def feature_wants(self) -> Wants:
        return Wants(final=True) if self.final_norm else Wants(hidden=(self.target.num_layers - 1,))

    def features(self, output):
        return output.final if self.final_norm else output.hidden[self.target.num_layers - 1]

    @property
    def head(self):
        return self.heads[0]

    @property
    def heads(self):
        """The modules, as functions."""
        from specjax.draft.mtp.network import MtpHead

        return tuple(MtpHead(self.config.only(i)) for i in range(self.modules))

    @property
    def modules(self) -> int:
        """Static: how many modules there are."""
        return self.config.num_hidden_layers

    @property
    def feature_size(self) -> int:
        return self.modules * self.config.hidden_size

    def init_params(self, key, target_params):
        if self.modules == 1:
            return super().init_params(key, target_params)
        keys = jax.random.split(key, self.modules)
        return {"modules": {i: head.init(key) for i, (head, key) in enumerate(zip(self.heads, keys, strict=True))}}

    def continued(self, params, draft, features, tokens):
        if self.modules == 1:
            return features
        width = self.config.hidden_size
        return several.of_each(features, draft.feature[:, width:].reshape(features.shape[0], -1, width))

    def read(self, params, features, block, cache, past=None):
        if self.modules == 1:
            return super().read(params, features, block, cache, past)
        return several.read(self, params, features, block, cache)

    def propose(self, params, draft, view, sampler):
        if self.modules == 1:
            return super().propose(params, draft, view, sampler)
        first = self.logits(params, draft.feature[:, None, : self.config.hidden_size])[:, 0]
        sampler = self.restricted(params, sampler)
        grow = functools.partial(several.grow, self, params, draft)
        begin = several.start(view.root.shape[0], self.config.hidden_size)
        tree = self.expander(view.root, first, grow, begin, sampler, keep_q=view.keep_q)
        return Proposal(tree, draft)

    def bind(self, target):
        own = self.config or own_layers(target)
        return super(MTP, dataclasses.replace(self, config=own)).bind(target)

    def hidden(self, carry):
        return super().hidden(carry) if self.modules == 1 else carry.outputs[:, -1]

    @classmethod
    def objective(cls):
        from specjax.draft.mtp.objective import TrainMTP

        return TrainMTP

    @classmethod
    def layout(cls):
        from specjax.draft.mtp.published import LAYOUT

        return LAYOUT
