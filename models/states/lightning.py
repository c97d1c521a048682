"""Lightning attention (Qin et al. 2024, arXiv:2401.04658, as in MiniMax-01, arXiv:2501.08313): linear attention whose state
shrinks by a constant of the head with every token.

`S <- exp(-s) S + k v^T` and `o = S^T q`, with SiLU on q, k and v. The outputs of all heads are normed together, and a sigmoid
of the token gates them.

Shapes: `B` rows, `T` block tokens, `P` uncommitted tokens before the block, `M` tokens of a path, `E` width, `N` heads, `H`
the width of a head.
"""

import dataclasses
import functools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from specjax.kernels.path_decays import decays
from specjax.kernels.precision import full_einsum
from specjax.lm import Block
from specjax.models.linear import Linear, by_heads
from specjax.models.mixers import Mixer, StateMixerConfig
from specjax.models.norms import NormConfig
from specjax.models.states import paths

Array = jax.Array
Delta = tuple[Array, Array]
"""Keys and values `[B, T, N, H]` float32."""


@dataclasses.dataclass(frozen=True)
class LightningConfig(StateMixerConfig):
    """Lightning attention of a layer. Its state is `[B, N, H, H]` float32: keys by values.

    Attributes:
      num_attention_heads: N.
      head_dim: H.
      rate: the factor of the slopes `2^(-8 (h + 1) / N)` of heads h; it falls from layer to layer.
      norm: of all heads' outputs at once.
    """

    name: ClassVar[str] = "lightning"
    called: ClassVar[str] = "lightning attention"

    num_attention_heads: int
    head_dim: int
    rate: float = 1.0
    norm: NormConfig = NormConfig(1e-6)

    def build(self, width: int, dtype: Any, rngs: nnx.Rngs, kernel: Any = None) -> "Lightning":
        return Lightning(self, width, dtype, rngs)

    @property
    def slopes(self) -> Array:
        """`[N]` float32: by how much a token lowers the logarithm of what is left of those before it."""
        heads = np.arange(1, self.num_attention_heads + 1)
        return jnp.asarray(self.rate * 2.0 ** (-8 * heads / self.num_attention_heads), jnp.float32)

    def init(self, width: int, batch: int, dtype: Any) -> Array:
        """Zeros."""
        return jnp.zeros((batch, self.num_attention_heads, self.head_dim, self.head_dim), jnp.float32)

    def commit(self, state: Array, delta: Delta, count: Array) -> Array:
        key, value = delta
        return _after(state, key, value, self.log_decay(key), count)

    def axes(self, state: Array) -> Any:
        return "batch", "state_heads", None, None

    @property
    def heads(self) -> int:
        return self.num_attention_heads

    def log_decay(self, key: Array) -> Array:
        """`[B, M, N]` float32, for keys `[B, M, N, H]`."""
        return jnp.broadcast_to(-self.slopes[None, None], key.shape[:3])


def _after(state: Array, key: Array, value: Array, log_decay: Array, count: Array) -> Array:
    """The state after the first `count` `[B]` tokens of a path."""
    left, kept = paths.weights(log_decay, count)
    return left[:, :, None, None] * state + full_einsum("bmnk,bmnv->bnkv", key * kept[..., None], value)


def _read(state: Array, query: Array, key: Array, value: Array, log_decay: Array, seen: Array) -> Array:
    """What tokens get `[B, T, N, H]` of the state and of the tokens that they have `seen`."""
    left, kept = decays(log_decay, seen)
    scores = full_einsum("btnk,bjnk->btjn", query, key) * kept
    return full_einsum("btjn,bjnv->btnv", scores, value) + left[..., None] * full_einsum(
        "btnk,bnkv->btnv", query, state
    )


class Lightning(Mixer):
    """See `LightningConfig`. A mesh splits its heads over `model`."""

    def __init__(self, config: LightningConfig, width: int, dtype: Any, rngs: nnx.Rngs):
        linear = functools.partial(Linear, use_bias=False, param_dtype=dtype, dtype=dtype, rngs=rngs)
        inner = config.num_attention_heads * config.head_dim
        self.query, self.key, self.value = linear(width, inner), linear(width, inner), linear(width, inner)
        self.output_gate = linear(width, inner)
        self.norm = config.norm.build(inner, dtype)
        self.attended = linear(inner, width)
        self.config = config

    def __call__(self, x, tables, block: Block, cache, past, positions, shared=None):
        """See `Mixer`; the delta is `Delta`."""
        before, size = 0 if past is None else past[0].shape[1], x.shape[1]
        made = lambda product: by_heads(nnx.silu(product(x)), self.config.head_dim).astype(jnp.float32)
        query, own = made(self.query), (made(self.key), made(self.value))
        state = self.config.init(x.shape[2], len(x), None) if cache is None else cache
        seen, text = paths.ancestors(block, before)
        with_decay = lambda tokens: (*tokens, self.config.log_decay(tokens[0]))
        if text and size > paths.CHUNK:
            read = lambda state, of, seen: _read(state, of[3], of[0], of[1], of[2], seen)
            after = lambda state, of, got, count: _after(state, of[0], of[1], of[2], count)
            before_it = None if past is None else with_decay(past)
            out = paths.read_text(read, after, state, before_it, (*with_decay(own), query))
        else:
            key, value, log_decay = with_decay(paths.every(past, own))
            out = _read(state, query, key, value, log_decay, seen)
        out = self.norm(out.reshape(*out.shape[:2], -1).astype(x.dtype))
        return self.attended((nnx.sigmoid(self.output_gate(x)) * out).astype(x.dtype)), own

    def split_products(self) -> tuple[Any, ...]:
        """The products whose inputs a mesh splits over `model`, so that their parts are summed over it."""
        return (self.attended,)
