"""Multi-token prediction: some targets were trained with an extra layer, which drafts here (DeepSeek-V3, arXiv:2412.19437)."""

import dataclasses

from specjax.about import About
from specjax.draft.eagle import Eagle
from specjax.draft.feature import layers_config
from specjax.lm import Wants


@dataclasses.dataclass(frozen=True)
class MTP(Eagle):
    """EAGLE with a decoder layer of the target's own class, norms before and after it, and the target's head.

    One module drafts every depth: it feeds on its own normed output, as on the target's normed feature at depth 1.

    `params["draft"]` is MtpHead's. If the file has its own head or fewer tokens, it also has `head` and `ids`, as in
    EAGLE.

    Attributes:
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
        from specjax.draft.mtp.network import MtpHead

        return MtpHead(self.config)

    def bind(self, target):
        own = self.config or layers_config(target, "mtp")
        return super(MTP, dataclasses.replace(self, config=own)).bind(target)

    @classmethod
    def objective(cls):
        from specjax.draft.mtp.objective import TrainMTP

        return TrainMTP

    @classmethod
    def layout(cls):
        from specjax.draft.mtp.published import LAYOUT

        return LAYOUT
