"""Attention as a token mixer, over a cache and a block with ancestors: grouped heads, ropes, windows, sinks and more.

Shapes: `B` rows, `T` block tokens, `E` width, `N` heads, `K` kv-heads, `H` head width, `W` width of values.
"""

import dataclasses
import functools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from specjax.kernels.tree_attention import Implementation, tree_attention
from specjax.lm import Block
from specjax.models.kv import Slots
from specjax.models.kv_bits import parts, read, stored
from specjax.models.linear import Linear, by_heads
from specjax.models.mixers import Mixer, SlotMixerConfig, SlotSizes
from specjax.models.norms import NormConfig, rms_norm
from specjax.models.ropes import QueryScale, RopeConfig, rope_tables, rotate

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class AttentionConfig(SlotMixerConfig):
    """The attention of a layer. Names follow Hugging Face's `config.json` where it has one.

    Attributes:
      num_attention_heads: N.
      num_key_value_heads: K.
      head_dim: H.
      rope: the rotary embedding; None: queries and keys have no positions.
      window: how many tokens a query sees, counting back from and including itself; None: all.
      chunked: whether a text is cut into chunks of `window` tokens, and a query sees only those of its own chunk (Llama 4).
      qkv_bias: whether queries, keys and values have biases.
      o_bias: whether the output has one.
      k_bias: whether keys have one; None: as `qkv_bias` says.
      qk_norm: the norm of each head of queries and keys.
      norm_first: whether that norm is before the rope, and not after it (Hunyuan).
      qk_head_norm: a norm before the rope with other parameters for each head (StableLM).
      qk_wide_norm: the norm of queries and keys over all heads at once, before they are split (OLMo).
      clip: keeps queries and keys, after their wide norms, and values within this distance of zero (OLMoE).
      query_scale: the factor of queries by their positions; None: 1.
      scale: the factor of the scores; None: H^-0.5.
      soft_cap: keeps scores within this distance of zero, by a tanh.
      sinks: whether every head has a learned score without a value that takes part in its softmaxes.
      v_head_dim: W; None: H.
      key_scale: the factor of keys before their norm and rope (Falcon-H1).
      value_scale: the factor of values (MiMo-V2).
      value_is_key: whether values are the output of the key projection, before norm and rope.
      value_norm: the norm of values, without a scale.
      gated: whether sigmoids of the token, one for each channel of a head, multiply what heads give (Qwen3-Next).
      distances: whether the numbers that the model's table has for distances (`specjax.models.distances`) are added to scores.
      source: the earlier layer whose keys and values this one reads; None: it has its own.
    """

    name: ClassVar[str] = "attention"

    head_dim: int
    rope: RopeConfig | None = RopeConfig()
    window: int | None = None
    chunked: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    k_bias: bool | None = None
    qk_norm: NormConfig | None = None
    norm_first: bool = True
    qk_head_norm: NormConfig | None = None
    qk_wide_norm: NormConfig | None = None
    clip: float | None = None
    query_scale: QueryScale | None = None
    scale: float | None = None
    soft_cap: float | None = None
    sinks: bool = False
    v_head_dim: int | None = None
    key_scale: float = 1.0
    value_scale: float = 1.0
    value_is_key: bool = False
    value_norm: NormConfig | None = None
    gated: bool = False
    distances: bool = False
    source: int | None = None

    def build(
        self, width: int, dtype: Any, rngs: nnx.Rngs, kernel: Implementation | None = None, inputs: int | None = None
    ) -> "Attention":
        """The module. `inputs` is the width of its input where that is not the model's."""
        return Attention(self, width, dtype, rngs, kernel, inputs)

    @property
    def scores_scale(self) -> float:
        """The factor of the scores."""
        return self.head_dim**-0.5 if self.scale is None else self.scale

    @property
    def value_dim(self) -> int:
        """The width of values."""
        return self.head_dim if self.v_head_dim is None else self.v_head_dim

    @property
    def slots(self) -> SlotSizes:
        return SlotSizes(self.num_key_value_heads, self.head_dim, self.value_dim)

    def turned(self, module: str) -> tuple[int, int, int] | None:
        of_heads = module in ("q_proj", "k_proj", "q_norm", "k_norm")
        return (0, self.rotary_dim, self.head_dim) if of_heads and self.rotary_dim else None

    @property
    def rotary_dim(self) -> int:
        """The number of channels of a head that are rotated."""
        return 0 if self.rope is None else self.rope.channels(self.head_dim)

    def window_ends(self, positions: Array) -> Array:
        """Where the windows of queries at `positions` end: there or, with `chunked`, where their chunks end.

        The window that ends with a chunk is the chunk. A causal mask leaves out the keys after the query."""
        if self.window is None or not self.chunked:
            return positions
        return positions // self.window * self.window + self.window - 1

    @property
    def reads(self) -> Any:
        return self.rope, self.head_dim, self.distances

    def tables(self, positions: Array, longest: int) -> tuple[Array, Array] | None:
        """The rope's tables; see `specjax.models.ropes.tables_of`."""
        return None if self.rope is None else rope_tables(self.rope, self.head_dim, positions, longest)


class Attention(Mixer):
    """See `AttentionConfig.build`; `kernel` is the way to compute it."""

    def __init__(
        self, config: AttentionConfig, width: int, dtype: Any, rngs: nnx.Rngs, kernel: Implementation | None = None,
        inputs: int | None = None,
    ):  # fmt: skip
        c = config
        inputs = inputs or width
        linear = functools.partial(Linear, param_dtype=dtype, dtype=dtype, rngs=rngs)
        self.q = linear(inputs, c.num_attention_heads * c.head_dim, use_bias=c.qkv_bias)
        self.shares = c.source is not None
        if not self.shares:
            self.k = linear(
                inputs, c.num_key_value_heads * c.head_dim, use_bias=c.qkv_bias if c.k_bias is None else c.k_bias
            )
        if not self.shares and not c.value_is_key:
            self.v = linear(inputs, c.num_key_value_heads * c.value_dim, use_bias=c.qkv_bias)
        self.o = linear(c.num_attention_heads * c.value_dim, width, use_bias=c.o_bias)
        if c.gated:
            self.o_gate = linear(inputs, c.num_attention_heads * c.value_dim, use_bias=c.qkv_bias)
        if c.qk_norm is not None:
            self.q_norm = c.qk_norm.build(c.head_dim, dtype)
        if c.qk_norm is not None and not self.shares:
            self.k_norm = c.qk_norm.build(c.head_dim, dtype)
        if c.qk_head_norm is not None:
            self.q_head_norm = c.qk_head_norm.build(c.head_dim, dtype, c.num_attention_heads)
            self.k_head_norm = c.qk_head_norm.build(c.head_dim, dtype, c.num_key_value_heads)
        if c.qk_wide_norm is not None:
            self.q_wide_norm = c.qk_wide_norm.build(c.num_attention_heads * c.head_dim, dtype)
            self.k_wide_norm = c.qk_wide_norm.build(c.num_key_value_heads * c.head_dim, dtype)
        if c.sinks:
            self.sinks = nnx.Param(jnp.zeros((c.num_attention_heads,), dtype))
        self.config, self.kernel = config, kernel

    def _own(self, x, rope, cache):
        k, v = self.keys(x, rope), self.values(x)
        # a block reads its own K/V as the cache will return them
        return (k, v) if cache is None else (stored(k, cache[0]), stored(v, cache[1]))

    def values(self, x):
        """`[B, T, K, W]`."""
        c = self.config
        values = by_heads(self._clipped((self.k if c.value_is_key else self.v)(x)), c.value_dim)
        values = values if c.value_scale == 1 else values * jnp.asarray(c.value_scale, values.dtype)
        return values if c.value_norm is None else rms_norm(values, None, c.value_norm.eps)

    def _clipped(self, x):
        clip = self.config.clip
        return x if clip is None else jnp.clip(x, -clip, clip)

    def _placed(self, x, which, rope):
        """Queries or keys (`which`) by heads, normed and rotated."""
        c = self.config
        x = x if c.qk_wide_norm is None else getattr(self, f"{which}_wide_norm")(x)
        x = by_heads(self._clipped(x), c.head_dim)
        norm = (lambda x: x) if c.qk_norm is None else getattr(self, f"{which}_norm")
        x = norm(x) if c.norm_first else x
        x = x if c.qk_head_norm is None else getattr(self, f"{which}_head_norm")(x)
        x = x if rope is None else rotate(x, *rope)
        return x if c.norm_first else norm(x)

    def keys(self, x, rope):
        """`[B, T, K, H]`, rotated."""
        keys, scale = self.k(x), self.config.key_scale
        return self._placed(keys if scale == 1 else keys * jnp.asarray(scale, keys.dtype), "k", rope)

    def __call__(self, x, rope, block: Block, cache, past, positions, shared=None):
        """Returns the output, the block's (key, value), and the block's queries where the cache asks for them.

        `rope` is the rope's tables or, with `distances`, the model's table `[N, 2 R + 1]`.

        `cache` and `past` are this layer's (key, value) pairs, or None. A layer that shares another layer's pairs takes
        that layer's, and `shared` is that layer's pair for the block. `cache` may hold more; see `Slots`.

        Raises:
          ValueError: if the layer has chunks, and queries see later tokens.
        """
        c = self.config
        distances, rope = (rope, None) if c.distances else (None, rope)
        if c.chunked and not block.causal:
            raise ValueError(
                "layers that see chunks of a text read it from left to right, not both ways: use another model"
            )
        batch, length, _ = x.shape
        q = self._placed(self.q(x), "q", rope)
        if c.query_scale is not None:
            q = q * c.query_scale.at(block.positions)[:, :, None, None].astype(q.dtype)
        k, v = self._own(x, rope, cache) if shared is None else shared[:2]
        keys, values = read(k, q.dtype), read(v, q.dtype)
        if past is not None:
            keys = jnp.concatenate([read(past[0], q.dtype), keys], axis=1)
            values = jnp.concatenate([read(past[1], q.dtype), values], axis=1)
        seen = Slots(None, None) if cache is None else Slots(*cache)
        cache_key, key_scale = parts(seen.key)
        cache_value, value_scale = parts(seen.value)
        scale = c.scores_scale
        out = tree_attention(
            q,
            keys,
            values,
            cache_key,
            cache_value,
            block.length if seen.unseen is None else jnp.full_like(block.length, seen.unseen.shape[1]),
            visible=block.visible,
            query_positions=c.window_ends(block.positions),
            key_positions=positions,
            cache_positions=seen.positions,
            unseen=block.unseen if seen.unseen is None else seen.unseen,
            causal=block.causal,
            split=block.split,
            scale=scale,
            window=c.window,
            soft_cap=c.soft_cap,
            key_scale=key_scale,
            value_scale=value_scale,
            sinks=self.sinks[...] if c.sinks else None,
            distances=distances,
            implementation=self.kernel if seen.attend is None else seen.attend,
        )
        asked = ((q * scale).reshape(batch, length, k.shape[2], -1),) if seen.asks else ()
        out = out.reshape(batch, length, -1)
        out = out * nnx.sigmoid(self.o_gate(x)) if c.gated else out
        return self.o(out), (k, v, *asked)

    def split_products(self) -> tuple[Any, ...]:
        return (self.o,)
