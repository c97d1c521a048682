"""Contrastive decoding (Li et al. 2022, arXiv:2210.15097; in the form of O'Brien and Lewis 2023, arXiv:2309.09117), also of a
model with itself."""

import dataclasses
import math

import jax.numpy as jnp

from specjax.lm import LM, check_both_encode
from specjax.models.paired import Paired


@dataclasses.dataclass(frozen=True)
class Contrastive(Paired):
    """A model contrasted with a weaker one: `(1 + beta) * own - beta * other` in log-probabilities.

    Tokens below `alpha` times the probability of the model's likeliest token are removed. The amateur reads the same
    text. Parameters are {`lm`, `amateur`}.

    Attributes:
      amateur: the weaker model, with the same vocabulary.
      alpha: in (0, 1]; 1 keeps only the likeliest token.
      beta: at least 0; at 0 only the cut remains.

    Raises:
      ValueError: if alpha or beta is out of range, or if the vocabularies differ in size.
    """

    amateur: LM
    alpha: float = 0.1
    beta: float = 0.5

    def __post_init__(self):
        if not 0 < self.alpha <= 1:
            raise ValueError(f"alpha of a contrast must be in (0, 1], got {self.alpha!r}")
        if not (self.beta >= 0 and math.isfinite(self.beta)):
            raise ValueError(f"beta of a contrast must be a finite number >= 0, got {self.beta!r}")
        if self.amateur.vocab_size != self.lm.vocab_size:
            sizes = f"{self.amateur.vocab_size} tokens and the model {self.lm.vocab_size}"
            raise ValueError(f"the amateur has {sizes}: take one of the same vocabulary")
        check_both_encode(self.amateur, self.lm, "the amateur")

    def blended(self, own, other):
        plausible = own >= math.log(self.alpha) + own.max(axis=-1, keepdims=True)
        return jnp.where(plausible, (1 + self.beta) * own - self.beta * other, -jnp.inf)

    def other(self, params):
        return self.amateur, params["amateur"]

    def own(self, params):
        return params["lm"]

    @property
    def other_lm(self):
        return self.amateur

    def axes(self, params):
        return {"lm": self.lm.axes(params["lm"]), "amateur": self.amateur.axes(params["amateur"])}


@dataclasses.dataclass(frozen=True)
class SelfContrastive(Contrastive):
    """A model contrasted with itself under another config, such as one with other experts (SCMoE, arXiv:2405.14507).

    Both passes read the same parameters, which are the model's, and each keeps its own cache.
    """

    def other(self, params):
        return self.amateur, params

    def own(self, params):
        return params

    def axes(self, params):
        return self.lm.axes(params)
