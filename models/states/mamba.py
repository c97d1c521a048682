"""Mamba (Gu and Dao 2023, arXiv:2312.00752): a state space with a decay for each channel and state, as a token mixer.

A channel c has a state of N numbers. A token with input x, step dt and directions B and C makes it
`exp(dt[c] A[c, n]) S[c, n] + dt[c] B[n] x[c]`, and its output is `S C + D x`. These decays do not factor into a product
of matrices, so the states after each of a block's tokens are computed, by pointer jumping: after i rounds, a token has the
sum over its last 2^i ancestors.

Shapes: `B` rows, `T` block tokens, `P` uncommitted tokens before the block, `J` = P + T, `M` tokens of a path, `E` width, `C`
channels, `N` states per channel, `R` rank of steps, `K` width of the convolution.
"""

import dataclasses
import functools
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from specjax.kernels.precision import full_einsum
from specjax.lm import Block
from specjax.models.linear import Linear
from specjax.models.mixers import Mixer, StateMixerConfig
from specjax.models.norms import NormConfig
from specjax.models.states import paths
from specjax.models.states.convolution import Convolution

Array = jax.Array

CHUNK = 32
"""Tokens of a text whose states `[C, N]` are computed at once."""


class MambaState(NamedTuple):
    """What is kept of a text.

    Attributes:
      sums: `[B, C, N]` float32, the states.
      window: `[B, K - 1, C]`, the last inputs of the convolution.
    """

    sums: Array
    window: Array


class Tokens(NamedTuple):
    """What tokens add to a state.

    Attributes:
      added: `[B, T, C]` float32, dt x.
      b: `[B, T, N]` float32, B.
      steps: `[B, T, C]` float32, dt.
    """

    added: Array
    b: Array
    steps: Array


class MambaDelta(NamedTuple):
    """What is kept of a block's tokens.

    Attributes:
      own: what they add to the state.
      inputs: `[B, T, C]`, of the convolution.
      rates: `[B, T, C, N]` float32, A, which is the same for all tokens: only that of the first is read, so that a compiler
        need not make it.
    """

    own: Tokens
    inputs: Array
    rates: Array


@dataclasses.dataclass(frozen=True)
class MambaConfig(StateMixerConfig):
    """The state space of a layer.

    Attributes:
      channels: C.
      state_size: N.
      rank: R.
      kernel_size: K.
      conv_bias: whether the convolution has a bias.
      bias: whether the first and the last product have biases.
      norm: the norm of steps, B and C before they are used (Jamba); None: they have none.
    """

    name: ClassVar[str] = "mamba"
    called: ClassVar[str] = "Mamba"

    channels: int
    state_size: int
    rank: int
    kernel_size: int = 4
    conv_bias: bool = True
    bias: bool = False
    norm: NormConfig | None = None

    def build(self, width: int, dtype: Any, rngs: nnx.Rngs, kernel: Any = None) -> "Mamba":
        return Mamba(self, width, dtype, rngs)

    def init(self, width: int, batch: int, dtype: Any) -> MambaState:
        shapes = (self.channels, self.state_size), (self.kernel_size - 1, self.channels)
        return MambaState(*(jnp.zeros((batch, *shape), jnp.float32) for shape in shapes))

    def commit(self, state: MambaState, delta: MambaDelta, count: Array) -> MambaState:
        sums = after(state.sums, delta.own, delta.rates[:, 0], count)
        return MambaState(sums, paths.moved(state.window, delta.inputs, count))

    def path(self, delta: MambaDelta, src: Array) -> MambaDelta:
        own, inputs = super().path((delta.own, delta.inputs), src)
        return MambaDelta(own, inputs, delta.rates)

    def axes(self, state: MambaState) -> MambaState:
        return MambaState(("batch", "state_heads", None), ("batch", None, "state_heads"))  # type: ignore

    @property
    def heads(self) -> int:
        return self.channels


def after(sums: Array, own: Tokens, rates: Array, count: Array) -> Array:
    """The states `[B, C, N]` after the first `count` `[B]` tokens of a path.

    Args:
      sums: `[B, C, N]`, before it.
      own: of its tokens.
      rates: `[B or 1, C, N]`.
      count: `[B]` int32.
    """
    left, later = paths.sums(own.steps, count)
    added = paths.real(count, own.added)
    # one loop over elements, without an array of all terms
    terms = jnp.exp(later[..., None] * rates[:, None]) * added[..., None] * paths.real(count, own.b)[:, :, None]
    return jnp.exp(left[:, :, None] * rates) * sums + terms.sum(axis=1)


def read(sums: Array, every: Tokens, c: Array, rates: Array, ancestors: paths.Ancestors) -> Array:
    """What a block's tokens read, without D, `[B, T, C]`.

    Args:
      sums: `[B, C, N]`, the states before the P tokens.
      every: of all J tokens.
      c: `[B, T, N]`, C of the block's tokens.
      rates: `[C, N]`.
      ancestors: of the block's tokens.
    """
    total, size = every.b.shape[1], c.shape[1]
    since, own = _by_jumps(every, rates, jnp.broadcast_to(paths.parents(ancestors), (len(sums), total)))
    since, own = since[:, total - size :], own[:, total - size :]
    states = jnp.exp(since[..., None] * rates[None, None]) * sums[:, None] + own
    return full_einsum("btcn,btn->btc", states, c)


def _by_jumps(every: Tokens, rates: Array, parents: Array) -> tuple[Array, Array]:
    """For every token, the sum of steps on its path `[B, J, C]`, and the state that its path makes of nothing
    `[B, J, C, N]`."""
    added, b, steps = every
    own = added[..., None] * b[:, :, None]
    for _ in range((added.shape[1] - 1).bit_length()):
        found = parents >= 0
        at = jnp.maximum(parents, 0)
        take = lambda x, at=at, found=found: jnp.where(
            found.reshape(*found.shape, *[1] * (x.ndim - 2)),
            jnp.take_along_axis(x, at.reshape(*at.shape, *[1] * (x.ndim - 2)), axis=1), 0,
        )  # fmt: skip
        own = own + jnp.exp(steps[..., None] * rates[None, None]) * take(own)
        steps = steps + take(steps)
        parents = jnp.where(found, jnp.take_along_axis(parents, at, axis=1), -1)
    return steps, own


class Mamba(Mixer):
    """See `MambaConfig`."""

    def __init__(self, config: MambaConfig, width: int, dtype: Any, rngs: nnx.Rngs):
        c = config
        linear = functools.partial(Linear, param_dtype=dtype, dtype=dtype, rngs=rngs)
        self.x, self.z = (linear(width, c.channels, use_bias=c.bias) for _ in range(2))
        self.conv_x = Convolution(c.channels, c.kernel_size, c.conv_bias, dtype, rngs)
        self.x_proj = linear(c.channels, c.rank + 2 * c.state_size, use_bias=False)
        self.dt = linear(c.rank, c.channels, use_bias=True)
        if c.norm is not None:
            self.dt_norm = c.norm.build(c.rank, dtype)
            self.b_norm, self.c_norm = (c.norm.build(c.state_size, dtype) for _ in range(2))
        spread = jnp.log(jnp.arange(1, c.state_size + 1, dtype=jnp.float32))
        self.A_log = nnx.Param(jnp.broadcast_to(spread[None], (c.channels, c.state_size)))
        self.D = nnx.Param(jnp.ones((c.channels,), jnp.float32))
        self.out_proj = linear(c.channels, width, use_bias=c.bias)
        self.config = config

    def __call__(self, x, tables, block: Block, cache, past, positions, shared=None):
        """See `Mixer`; the delta is a `MambaDelta`."""
        c = self.config
        state = c.init(x.shape[2], len(x), jnp.float32) if cache is None else cache
        ancestors = paths.ancestors(block, 0 if past is None else past.inputs.shape[1])
        raw, z = (part(x).astype(jnp.float32) for part in (self.x, self.z))
        convolved = jax.nn.silu(self.conv_x(state.window, None if past is None else past.inputs, raw, ancestors))
        three = self.x_proj(convolved.astype(x.dtype)).astype(jnp.float32)
        dt, b, to_read = jnp.split(three, [c.rank, c.rank + c.state_size], axis=2)
        if c.norm is not None:
            dt, b, to_read = self.dt_norm(dt), self.b_norm(b), self.c_norm(to_read)
        dt = jax.nn.softplus(self.dt(dt.astype(x.dtype)).astype(jnp.float32))
        rates = -jnp.exp(self.A_log[...].astype(jnp.float32))
        own = Tokens(convolved * dt, b, dt)
        y = self._read(state.sums, None if past is None else past.own, own, to_read, rates, ancestors)
        y = (y + self.D[...].astype(jnp.float32)[None, None] * convolved) * jax.nn.silu(z)
        rates = jnp.broadcast_to(rates[None, None], (*dt.shape, c.state_size))
        return self.out_proj(y.astype(x.dtype)), MambaDelta(own, raw, rates)

    def _read(self, sums, past, own, c, rates, ancestors):
        """See `read`; a long text is read in chunks."""
        if not ancestors.text or c.shape[1] <= CHUNK:
            return read(sums, paths.every(past, own), c, rates, ancestors)
        made = lambda sums, of, seen: read(sums, of[0], of[1], rates, paths.Ancestors(seen, True))
        further = lambda sums, of, got, count: after(sums, of[0], rates[None], count)
        return paths.read_text(made, further, sums, None if past is None else (past,), (own, c), CHUNK)

    def split_products(self) -> tuple[Any, ...]:
        return (self.x_proj, self.out_proj)
