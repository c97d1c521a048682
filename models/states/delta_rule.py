"""The gated delta rule (Yang et al. 2024, arXiv:2412.06464), over texts and over blocks of tokens with ancestors.

For each value head, a state S `[K, V]` maps keys to values. A token with key k, value v, strength beta and decay e^g first
shrinks it and then corrects what it gives for k:

    S <- e^g S;    d = beta (v - k S);    S <- S + k^T d;    o = q S

The correction d depends on a token's ancestors alone. So those of a block are the solution of one triangular system, a
commit is a weighted sum of outer products k^T d, and corrections of earlier blocks are never solved again. Powers of the
system's matrix would sum in log2(T) products. But their entries grow like binomials where keys repeat, and no digit is
left at 64 equal tokens. Forward substitution has no such terms.

Shapes: `B` rows, `T` block tokens, `P` uncommitted tokens before the block, `M` tokens of a path, `E` width, `N` key heads,
`R` value heads of each, `K` key channels, `V` value channels, `C` channels of a key head's convolution (2 K + R V), `W` width
of the convolution, `D` decays of a value head: one, or one for each key channel.
"""

import abc
import dataclasses
import functools
import math
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from specjax.kernels.delta_rule import delta_rule
from specjax.kernels.path_decays import decays
from specjax.kernels.precision import full_einsum
from specjax.lm import Block
from specjax.models.linear import Linear, by_heads
from specjax.models.mixers import Mixer, StateMixerConfig
from specjax.models.states import paths

Array = jax.Array
_PARTS = ("query", "key", "value")


class State(NamedTuple):
    """What is kept of a text.

    Attributes:
      window: `[B, W - 1, N, C]` float32, the last inputs of the convolution, oldest first: of a key head's query, key and
        values.
      sums: `[B, N, R, K, V]` float32, S.
    """

    window: Array
    sums: Array


class Delta(NamedTuple):
    """What a block's tokens add, all in float32.

    Attributes:
      inputs: `[B, T, N, C]`, of the convolution.
      key: `[B, T, N, K]`, normed.
      correction: `[B, T, N, R, V]`, d.
      log_decay: `[B, T, N, R, D]`, g.
    """

    inputs: Array
    key: Array
    correction: Array
    log_decay: Array


class Tokens(NamedTuple):
    """What a recurrence reads of tokens, all in float32. Tokens of zeros leave a state unchanged.

    Attributes:
      query: `[B, T, N, K]`, scaled.
      key: `[B, T, N, K]`.
      value: `[B, T, N, R, V]`.
      strength: `[B, T, N, R]`, beta.
      log_decay: `[B, T, N, R, D]`, g.
    """

    query: Array
    key: Array
    value: Array
    strength: Array
    log_decay: Array


def advanced(sums: Array, key: Array, correction: Array, log_decay: Array, count: Array) -> Array:
    """The state after the first `count` `[B]` tokens of a path; the others are as in `Delta`, for M tokens."""
    left, weight = paths.weights(log_decay, count)
    return left[..., None] * sums + full_einsum("bmnrk,bmnrv->bnrkv", weight * key[:, :, :, None], correction)


def corrected(sums: Array, past: Delta | None, own: Tokens, seen: Array) -> tuple[Array, Array]:
    """Outputs and corrections of a block's tokens, `[B, T, N, R, V]` each.

    Args:
      sums: `State.sums`.
      past: of the P tokens before the block.
      own: the block's tokens.
      seen: `[B or 1, T, P + T]` bool, the ancestors of each token, and itself.
    """
    if own.log_decay.shape[-1] > 1:
        return _by_channels(sums, past, own, seen)
    of_past = None if past is None else (past.key, past.correction, past.log_decay[..., 0])
    return delta_rule(*own[:4], own.log_decay[..., 0], seen, sums, of_past)


def _by_channels(sums: Array, past: Delta | None, own: Tokens, seen: Array) -> tuple[Array, Array]:
    """`corrected` with a decay for each key channel, which is no factor of a product of keys."""
    size, before = own.key.shape[1], seen.shape[2] - own.key.shape[1]
    keys = own.key if past is None else jnp.concatenate([past.key, own.key], axis=1)
    logs = own.log_decay if past is None else jnp.concatenate([past.log_decay, own.log_decay], axis=1)
    kept, left = decays(logs, seen)
    of_state = lambda x: full_einsum("btnrk,bnrkv->btnrv", kept * x[:, :, :, None], sums)
    strength = own.strength[..., None]
    likeness = strength[:, :, None, ..., 0] * _scores(own.key, keys, left)
    wanted = strength * (own.value - of_state(own.key))
    if past is not None:
        wanted = wanted - full_einsum("btsnr,bsnrv->btnrv", likeness[:, :, :before], past.correction)
    made = _solved(likeness[:, :, before:], wanted) if size > 1 else wanted
    every = made if past is None else jnp.concatenate([past.correction, made], axis=1)
    read = full_einsum("btsnr,bsnrv->btnrv", _scores(own.query, keys, left), every)
    return of_state(own.query) + read, made


def _scores(a: Array, b: Array, left: Array) -> Array:
    """Products `[B, T, S, N, R]` of `a` `[B, T, N, K]` and `b` `[B, S, N, K]`, by what is left, `[B, T, S, N, R, K]`. The
    quotient of two factors, one for each token, would overflow."""
    return (left * a[:, :, None, :, None] * b[:, None, :, :, None]).sum(axis=-1)


def _solved(below: Array, wanted: Array) -> Array:
    """The solution `[B, T, N, R, V]` of `(1 + below) x = wanted`; of `below` `[B, T, T, N, R]` only what is below the diagonal
    counts."""
    matrix, right = jnp.moveaxis(below, (1, 2), (3, 4)), jnp.moveaxis(wanted, 1, 3)
    found = jax.lax.linalg.triangular_solve(matrix, right, left_side=True, lower=True, unit_diagonal=True)
    return jnp.moveaxis(found, 3, 1)


def in_text(sums: Array, past: Delta | None, own: Tokens, size: int) -> tuple[Array, Array]:
    """`corrected` for a text that goes on from all of `past`, `size` tokens at a time."""
    read = lambda sums, chunk, seen: corrected(sums, None, chunk, seen)

    def after(sums: Array, of: Any, got: Any, count: Array) -> Array:
        return advanced(sums, of.key, of.correction if got is None else got[1], of.log_decay, count)

    return paths.read_text(read, after, sums, past, own, size)


@dataclasses.dataclass(frozen=True)
class DeltaRuleConfig(StateMixerConfig):
    """A mixer with this rule; names follow Hugging Face's `config.json` where it has one.

    Attributes:
      num_key_heads: N.
      num_value_heads: N R; key head i serves the value heads from i R on.
      key_head_dim: K.
      value_head_dim: V.
      kernel_size: W.
      eps: of the norm of outputs.
    """

    chunk: ClassVar[int] = paths.CHUNK
    """Tokens of a text that are solved at once."""

    num_key_heads: int
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int
    kernel_size: int = 4
    eps: float = 1e-6

    @property
    def heads(self) -> int:
        return self.num_key_heads

    @property
    def served(self) -> int:
        """R."""
        return self.num_value_heads // self.num_key_heads

    @property
    def channels(self) -> tuple[int, int, int]:
        """Channels of a key head's query, key and values."""
        return self.key_head_dim, self.key_head_dim, self.served * self.value_head_dim

    def init(self, width: int, batch: int, dtype: Any) -> State:
        """Zeros in float32, whatever the cache's type."""
        window = (batch, self.kernel_size - 1, self.num_key_heads, sum(self.channels))
        sums = (batch, self.num_key_heads, self.served, self.key_head_dim, self.value_head_dim)
        return State(jnp.zeros(window, jnp.float32), jnp.zeros(sums, jnp.float32))

    def commit(self, state: State, delta: Delta, count: Array) -> State:
        window = paths.moved(_flat(state.window), _flat(delta.inputs), count).reshape(state.window.shape)
        return State(window, advanced(state.sums, delta.key, delta.correction, delta.log_decay, count))

    def axes(self, state: State) -> State:
        return State(("batch", None, "state_heads", None), ("batch", "state_heads", None, None, None))  # type: ignore[arg-type]


class DeltaRule(Mixer):
    """Projections and convolutions of queries, keys and values, and the rule. A mixer adds `rates` and `gated`."""

    query: Linear
    key: Linear
    value: Linear

    def __init__(self, config: Any, width: int, dtype: Any, rngs: nnx.Rngs):
        c = config
        linear = functools.partial(Linear, use_bias=False, param_dtype=dtype, dtype=dtype, rngs=rngs)
        for name, size in zip(_PARTS, c.channels, strict=True):
            setattr(self, name, linear(width, c.num_key_heads * size))
            taps = nnx.initializers.lecun_normal()(rngs.params(), (c.kernel_size, c.num_key_heads * size), dtype)
            setattr(self, f"{name}_taps", nnx.Param(taps))
        self.output = linear(c.num_value_heads * c.value_head_dim, width)
        self.config = c

    @abc.abstractmethod
    def rates(self, x: Array) -> tuple[Array, Array]:
        """The strengths `[B, T, N, R]` and logarithms of decays `[B, T, N, R, D]` of tokens `[B, T, E]`, in float32."""

    @abc.abstractmethod
    def gated(self, out: Array, x: Array) -> Array:
        """The outputs `[B, T, N R, V]` of value heads, normed and gated by the tokens `[B, T, E]`."""

    def __call__(self, x, tables, block: Block, cache, past, positions, shared=None):
        """See `Mixer`; the delta is a `Delta`."""
        c, size = self.config, x.shape[1]
        ancestors = paths.ancestors(block, 0 if past is None else past.key.shape[1])
        state = c.init(x.shape[2], len(x), x.dtype) if cache is None else cache
        parts = [by_heads(getattr(self, name)(x), width) for name, width in zip(_PARTS, c.channels, strict=True)]
        inputs = jnp.concatenate(parts, axis=3).astype(jnp.float32)
        own = self._tokens(x, inputs, state, past, ancestors)
        if ancestors.text and size > c.chunk:
            out, made = in_text(state.sums, past, own, c.chunk)
        else:
            out, made = corrected(state.sums, past, own, ancestors.seen)
        out = self.gated(out.reshape(*x.shape[:2], c.num_value_heads, c.value_head_dim), x)
        return self.output(out.reshape(*x.shape[:2], -1).astype(x.dtype)), Delta(inputs, own.key, made, own.log_decay)

    def _tokens(self, x: Array, inputs: Array, state: State, past: Delta | None, ancestors: paths.Ancestors) -> Tokens:
        """The block's tokens after the convolution, with `inputs` as in `Delta`."""
        c = self.config
        taps = [getattr(self, f"{name}_taps")[...] for name in _PARTS]
        taps = jnp.concatenate([each.reshape(c.kernel_size, c.num_key_heads, -1) for each in taps], axis=2)
        every = paths.every(None if past is None else past.inputs, inputs)
        mixed = paths.convolved(_flat(taps).astype(jnp.float32), _flat(state.window), _flat(every), ancestors)
        mixed = nnx.silu(mixed).reshape(inputs.shape)
        query, key, value = jnp.split(mixed, (c.key_head_dim, 2 * c.key_head_dim), axis=3)
        value = value.reshape(*value.shape[:3], c.served, c.value_head_dim)
        return Tokens(_unit(query) * c.key_head_dim**-0.5, _unit(key), value, *self.rates(x))

    def split_products(self) -> tuple[Any, ...]:
        return (self.output,)


def _flat(x: Array) -> Array:
    """The channels of all key heads, `[..., N C]` of `[..., N, C]`; there may be no tokens."""
    return x.reshape(*x.shape[:-2], math.prod(x.shape[-2:]))


def _unit(x: Array) -> Array:
    """Vectors of the last axis with a length of 1."""
    return x * jax.lax.rsqrt(jnp.square(x).sum(axis=-1, keepdims=True) + 1e-6)
