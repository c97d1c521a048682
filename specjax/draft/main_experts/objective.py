"""Training of compressed experts: the text under the main experts and the vectors alone (arXiv:2503.00634)."""

import dataclasses

from specjax.objectives.means import MEAN
from specjax.objectives.next_token import NextToken


@dataclasses.dataclass(frozen=True)
class TrainCompressedExperts(NextToken):
    """The text's own tokens under a model whose auxiliary experts are replaced by vectors. No other model takes part.

    Attributes:
      lm: the model with vectors, `specjax.models.routing.compressed`.
      n_ce: how many of a token's experts the vectors stand for; 0: half of them, as published.
      only_vectors: whether the vectors alone are trained, so that they serve the target as it is. The published training
        changes all weights.
    """

    starts_from_layers = True

    n_ce: int = 0
    only_vectors: bool = False

    def init(self, key, target_params):
        """Vectors that change nothing, with the target's own parameters or without."""
        from specjax.models.routing import joined, ones

        vectors = ones(self.lm)
        return vectors if self.only_vectors else joined(target_params, vectors)

    def loss(self, params, target_params, batch, key, mean=MEAN):
        """See `NextToken.loss`."""
        from specjax.models.routing import joined

        whole = joined(target_params, params) if self.only_vectors else params
        return super().loss(whole, None, batch, key, mean)
