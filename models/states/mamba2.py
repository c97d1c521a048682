"""Mamba-2 (Dao and Gu 2024, arXiv:2405.21060): a state space with one decay per head, as a token mixer with a running state.

A head has a state S `[P, N]`. A token with input x, step dt and directions B and C makes it `exp(dt A) S + dt x B^T`, and its
output is `S C + D x`. So a state is a sum over tokens, each of which shrinks by all later decays, and the outputs of a block
with ancestors are products of matrices.

Shapes: `B` rows, `T` block tokens, `P` uncommitted tokens before the block, `J` = P + T, `M` tokens of a path, `E` width, `N`
heads, `W` head width, `G` groups, `S` state size, `K` width of the convolution.
"""

import dataclasses
import functools
import math
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from specjax.kernels.path_decays import decays
from specjax.kernels.precision import full_einsum
from specjax.lm import Block
from specjax.models.linear import Linear, apart
from specjax.models.mixers import Mixer, StateMixerConfig
from specjax.models.norms import NormConfig, rms_norm
from specjax.models.states import paths
from specjax.models.states.convolution import Convolution

Array = jax.Array


class Mamba2State(NamedTuple):
    """What is kept of a text.

    Attributes:
      sums: `[B, N, W, S]` float32, the states.
      x: `[B, K - 1, N W]`, the last inputs of the convolution of x.
      bc: `[B, K - 1, 2 G S]`, those of B and C.
    """

    sums: Array
    x: Array
    bc: Array


class Tokens(NamedTuple):
    """What tokens add to a state.

    Attributes:
      added: `[B, T, N, W]` float32, dt x.
      b: `[B, T, G, S]` float32, B.
      log_decay: `[B, T, N]` float32, dt A.
    """

    added: Array
    b: Array
    log_decay: Array


class Mamba2Delta(NamedTuple):
    """What is kept of a block's tokens.

    Attributes:
      own: what they add to the state.
      x: `[B, T, N W]`, the inputs of the convolution of x.
      bc: `[B, T, 2 G S]`, those of B and C.
    """

    own: Tokens
    x: Array
    bc: Array


@dataclasses.dataclass(frozen=True)
class Mamba2Config(StateMixerConfig):
    """The state space of a layer.

    Attributes:
      num_heads: N.
      head_dim: W.
      state_size: S.
      groups: G; the heads of a group share B and C.
      kernel_size: K.
      conv_bias: whether the convolution has a bias.
      in_bias: whether the products before it have biases.
      out_bias: whether the last product has one.
      norm: the norm of a group's outputs; None: there is none.
      norm_first: whether the norm is before the gate, and not after it.
      time_step_limit: the least and the greatest dt.
      scales: the factors of the first product's five parts: gate, x, B, C and dt (Falcon-H1).
    """

    name: ClassVar[str] = "mamba2"
    called: ClassVar[str] = "Mamba-2"

    num_heads: int
    head_dim: int
    state_size: int
    groups: int = 1
    kernel_size: int = 4
    conv_bias: bool = True
    in_bias: bool = False
    out_bias: bool = False
    norm: NormConfig | None = NormConfig(1e-5)
    norm_first: bool = False
    time_step_limit: tuple[float, float] = (0.0, math.inf)
    scales: tuple[float, float, float, float, float] = (1.0, 1.0, 1.0, 1.0, 1.0)

    @property
    def inner(self) -> int:
        """The width of all heads."""
        return self.num_heads * self.head_dim

    def build(self, width: int, dtype: Any, rngs: nnx.Rngs, kernel: Any = None) -> "Mamba2":
        return Mamba2(self, width, dtype, rngs)

    def init(self, width: int, batch: int, dtype: Any) -> Mamba2State:
        shapes = (self.num_heads, self.head_dim, self.state_size), (self.kernel_size - 1, self.inner)
        both = self.kernel_size - 1, 2 * self.groups * self.state_size
        return Mamba2State(*(jnp.zeros((batch, *shape), jnp.float32) for shape in (*shapes, both)))

    def commit(self, state: Mamba2State, delta: Mamba2Delta, count: Array) -> Mamba2State:
        sums = after(state.sums, delta.own, count)
        return Mamba2State(sums, paths.moved(state.x, delta.x, count), paths.moved(state.bc, delta.bc, count))

    def axes(self, state: Mamba2State) -> Mamba2State:
        return Mamba2State(("batch", "state_heads", None, None), ("batch", None, "state_heads"), ("batch", None, None))  # type: ignore

    @property
    def heads(self) -> int:
        return self.num_heads


def after(sums: Array, own: Tokens, count: Array) -> Array:
    """The states `[B, N, W, S]` after the first `count` `[B]` tokens of a path."""
    added, b, log_decay = own
    left, weight = paths.weights(log_decay, count)
    groups, shape = b.shape[2], sums.shape
    by_group = lambda x: x.reshape(*x.shape[:2], groups, -1, *x.shape[3:])
    more = full_einsum("bmghw,bmgs->bghws", by_group(added * weight[..., None]), b)
    return sums * left[:, :, None, None] + more.reshape(shape)


def read(sums: Array, every: Tokens, c: Array, seen: Array) -> Array:
    """What a block's tokens read, without D, `[B, T, N, W]`.

    Args:
      sums: `[B, N, W, S]`, the states before the P tokens.
      every: of all J tokens.
      c: `[B, T, G, S]`, C of the block's tokens.
      seen: `paths.Ancestors.seen`.
    """
    added, b, log_decay = every
    groups = b.shape[2]
    from_state, left = decays(log_decay, seen)
    by_group = lambda x: x.reshape(*x.shape[:-1], groups, -1)
    mix = by_group(left) * full_einsum("btgs,bjgs->btjg", c, b)[..., None]
    own = full_einsum("btjgh,bjghw->btghw", mix, added.reshape(*added.shape[:2], groups, -1, added.shape[3]))
    kept = full_einsum("btgs,bghws->btghw", c, sums.reshape(len(sums), groups, -1, *sums.shape[2:]))
    return (own + by_group(from_state)[..., None] * kept).reshape(*c.shape[:2], *added.shape[2:])


class Mamba2(Mixer):
    """See `Mamba2Config`."""

    def __init__(self, config: Mamba2Config, width: int, dtype: Any, rngs: nnx.Rngs):
        c = config
        linear = functools.partial(Linear, param_dtype=dtype, dtype=dtype, rngs=rngs)
        both = 2 * c.groups * c.state_size
        self.z, self.x = (linear(width, c.inner, use_bias=c.in_bias) for _ in range(2))
        self.bc = linear(width, both, use_bias=c.in_bias)
        self.dt = linear(width, c.num_heads, use_bias=c.in_bias)
        self.conv_x = Convolution(c.inner, c.kernel_size, c.conv_bias, dtype, rngs)
        self.conv_bc = Convolution(both, c.kernel_size, c.conv_bias, dtype, rngs)
        spread = jnp.arange(1, c.num_heads + 1, dtype=jnp.float32)
        self.A_log = nnx.Param(jnp.log(spread))
        self.D, self.dt_bias = (nnx.Param(jnp.ones((c.num_heads,), jnp.float32)) for _ in range(2))
        if c.norm is not None:
            self.gated_norm = c.norm.build(c.inner, dtype)
        self.out_proj = linear(c.inner, width, use_bias=c.out_bias)
        self.config = config

    def __call__(self, x, tables, block: Block, cache, past, positions, shared=None):
        """See `Mixer`; the delta is a `Mamba2Delta`."""
        c, size = self.config, x.shape[1]
        state = c.init(x.shape[2], len(x), jnp.float32) if cache is None else cache
        ancestors = paths.ancestors(block, 0 if past is None else past.x.shape[1])
        scales = [jnp.asarray(scale, jnp.float32) for scale in c.scales]
        z, raw_x, raw_bc = (part(x).astype(jnp.float32) for part in (self.z, self.x, self.bc))
        dt = self.dt(apart(x)).astype(jnp.float32)
        raw_x, raw_bc = raw_x * scales[1], raw_bc * jnp.repeat(jnp.stack(scales[2:4]), raw_bc.shape[2] // 2)[None, None]
        ofx = jax.nn.silu(self.conv_x(state.x, None if past is None else past.x, raw_x, ancestors))
        ofbc = jax.nn.silu(self.conv_bc(state.bc, None if past is None else past.bc, raw_bc, ancestors))
        b, to_read = jnp.split(ofbc.reshape(len(x), size, 2 * c.groups, c.state_size), 2, axis=2)
        by_head = lambda x: x.reshape(*x.shape[:2], c.num_heads, c.head_dim)
        dt = jax.nn.softplus(dt * scales[4] + self.dt_bias[...].astype(jnp.float32)[None, None])
        dt = jnp.clip(dt, *c.time_step_limit)
        log_decay = -jnp.exp(self.A_log[...].astype(jnp.float32))[None, None] * dt
        own = Tokens(by_head(ofx) * dt[..., None], b, log_decay)
        y = self._read(state.sums, None if past is None else past.own, own, to_read, ancestors)
        y = y + self.D[...].astype(jnp.float32)[None, None, :, None] * by_head(ofx)
        out = self.out_proj(self._gated(y.reshape(*y.shape[:2], -1), z * scales[0]).astype(x.dtype))
        return out, Mamba2Delta(own, raw_x, raw_bc)

    def _read(self, sums, past, own, c, ancestors):
        """See `read`; a long text is read in chunks."""
        if not ancestors.text or c.shape[1] <= paths.CHUNK:
            return read(sums, paths.every(past, own), c, ancestors.seen)
        made = lambda sums, of, seen: read(sums, of[0], of[1], seen)
        further = lambda sums, of, got, count: after(sums, of[0], count)
        return paths.read_text(made, further, sums, None if past is None else (past,), (own, c))

    def _gated(self, y, z):
        """Outputs `[B, T, N W]` by the gate, and normed in groups."""
        c, gate = self.config, jax.nn.silu(z)
        if c.norm is None:
            return y * gate
        y = y if c.norm_first else y * gate
        split = lambda x: x.reshape(*x.shape[:-1], c.groups, -1)
        scale = split(self.gated_norm.scale[...])
        y = rms_norm(split(y), scale, c.norm.eps, c.norm.kind).reshape(y.shape)
        return y * gate if c.norm_first else y

    def split_products(self) -> tuple[Any, ...]:
        return (self.out_proj,)
