"""What BERT's family has between its final norm and its head: a dense layer, an activation and another norm."""

import dataclasses
from typing import Any

from flax import nnx

from specjax.models.linear import Linear
from specjax.models.mlp import ACTIVATIONS, Activation
from specjax.models.norms import NormConfig


@dataclasses.dataclass(frozen=True)
class TransformConfig:
    """The dense layer, activation and norm before a head.

    Attributes:
      act: the activation.
      norm: the norm.
      bias: whether the dense layer has a bias.
    """

    act: Activation
    norm: NormConfig
    bias: bool = False

    def build(self, width: int, dtype: Any, rngs: nnx.Rngs) -> "Transform":
        """The module, for a model of `width`."""
        return Transform(self, width, dtype, rngs)


class Transform(nnx.Module):
    """`norm(act(dense(x)))`."""

    def __init__(self, config: TransformConfig, width: int, dtype: Any, rngs: nnx.Rngs):
        self.dense = Linear(width, width, use_bias=config.bias, param_dtype=dtype, dtype=dtype, rngs=rngs)
        self.norm = config.norm.build(width, dtype)
        self.act = config.act

    def __call__(self, x):
        return self.norm(ACTIVATIONS[self.act](self.dense(x)))
