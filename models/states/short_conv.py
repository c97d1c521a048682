"""A gated short convolution (LFM2, huggingface.co/LiquidAI): `out(C * conv(B * x))`, without an activation.

Shapes: `B` rows, `T` block tokens, `P` uncommitted tokens before the block, `M` tokens of a path, `E` width, `K` width of the
convolution.
"""

import dataclasses
import functools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from specjax.lm import Block
from specjax.models.linear import Linear
from specjax.models.mixers import Mixer, StateMixerConfig
from specjax.models.states import paths
from specjax.models.states.convolution import Convolution

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class ShortConvConfig(StateMixerConfig):
    """The short convolution of a layer. Its state is the window: the last K - 1 inputs of the convolution.

    Attributes:
      kernel_size: K.
      bias: whether the convolution and both products have biases.
    """

    name: ClassVar[str] = "short_conv"
    called: ClassVar[str] = "short convolutions"

    kernel_size: int = 3
    bias: bool = False

    def build(self, width: int, dtype: Any, rngs: nnx.Rngs, kernel: Any = None) -> "ShortConv":
        return ShortConv(self, width, dtype, rngs)

    def init(self, width: int, batch: int, dtype: Any) -> Array:
        """`[B, K - 1, E]` float32 zeros."""
        return jnp.zeros((batch, self.kernel_size - 1, width), jnp.float32)

    def commit(self, state: Array, delta: Array, count: Array) -> Array:
        return paths.moved(state, delta, count)

    def axes(self, state: Array) -> Any:
        """Rows and channels are split."""
        return "batch", None, "mlp"


class ShortConv(Mixer):
    """See `ShortConvConfig`. A mesh splits its channels over `model`."""

    def __init__(self, config: ShortConvConfig, width: int, dtype: Any, rngs: nnx.Rngs):
        linear = functools.partial(
            Linear, width, width, use_bias=config.bias, param_dtype=dtype, dtype=dtype, rngs=rngs
        )
        self.inner, self.outer, self.read = linear(), linear(), linear()
        self.conv = Convolution(width, config.kernel_size, config.bias, dtype, rngs)
        self.mixed = linear()
        self.config = config

    def __call__(self, x, tables, block: Block, cache, past, positions, shared=None):
        """See `Mixer`; the delta holds the convolution's inputs `[B, T, E]`."""
        before = 0 if past is None else past.shape[1]
        own = (self.inner(x) * self.read(x)).astype(jnp.float32)
        window = self.config.init(x.shape[2], len(x), None) if cache is None else cache
        mixed = self.conv(window, past, own, paths.ancestors(block, before))
        return self.mixed((self.outer(x) * mixed).astype(x.dtype)), own

    def split_products(self) -> tuple[Any, ...]:
        """The products whose inputs a mesh splits over `model`, so that their parts are summed over it."""
        return (self.mixed,)
