"""Latent attention (MLA, DeepSeek-V2, arXiv:2405.04434, section 2.1): a token's keys and values of all heads are made of one
vector, and only that is cached.

The vector has r channels of which keys and values are linear functions, and d rotated channels that all heads share. Keys are
never made: queries go through the matrix of keys instead, and the sums of latents through the matrix of values (the absorbed
form, section 2.1.2). So attention has one key for all heads, and its values are the first r channels of its keys.

Per head and cached token that costs 2 r + d products, where keys and values would cost n + d + v, for n unrotated channels and
v channels of values. Making them costs r (n + v) more, per head and cached token, for all queries of a pass. For DeepSeek-V3
that is 1,088 against 320, and 131,072 once: it would pay for passes of more than 170 tokens over a cache that is full, and the
made keys would take 71 times its memory.

Shapes: `B` rows, `T` block tokens, `E` width, `N` heads, `K` copies of the vector, `r` latent channels.
"""

import dataclasses
import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from specjax.kernels.precision import by_tensor_cores
from specjax.kernels.tree_attention import Implementation, tree_attention
from specjax.lm import Block
from specjax.models.attention import AttentionConfig
from specjax.models.few_bits import plain
from specjax.models.kv import Slots
from specjax.models.kv_bits import parts, read, stored
from specjax.models.linear import Linear, by_heads
from specjax.models.mixers import Mixer, SlotMixerConfig, SlotSizes
from specjax.models.norms import NormConfig
from specjax.models.ropes import RopeConfig, rope_tables, rotate

Array = jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class LatentAttentionConfig(SlotMixerConfig):
    """Latent attention. Names follow Hugging Face's `config.json`.

    Attributes:
      num_attention_heads: N.
      num_key_value_heads: K; more than one only on a mesh that splits heads (`specjax.models.kv_heads`).
      kv_lora_rank: r.
      qk_nope_head_dim: how many channels of a head's queries and keys are not rotated.
      qk_rope_head_dim: how many are, after those; they are the same for the keys of all heads.
      v_head_dim: the channels of a head's values.
      q_lora_rank: the width between the two matrices of queries; None: there is one matrix.
      rope: the rotary embedding; None: the shared channels are not rotated (Kimi Linear).
      bias: whether the projections to the latents, and the output, have biases.
      mscale_all_dim: by how much YaRN sharpens the scores: `(0.1 mscale_all_dim log(factor) + 1)^2` is a factor of them.
      norm: of both latents.
    """

    name: ClassVar[str] = "attention"

    num_attention_heads: int
    num_key_value_heads: int = 1
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    q_lora_rank: int | None = None
    rope: RopeConfig | None = RopeConfig()
    bias: bool = False
    mscale_all_dim: float = 0.0
    norm: NormConfig = NormConfig(1e-6)

    def build(
        self, width: int, dtype: Any, rngs: nnx.Rngs, kernel: Implementation | None = None, inputs: int | None = None
    ) -> "LatentAttention":
        """The module. `inputs` is the width of its input where that is not the model's."""
        return LatentAttention(self, width, dtype, rngs, kernel, inputs)

    @property
    def qk_head_dim(self) -> int:
        """The channels of a head's queries and keys."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def vector_dim(self) -> int:
        """The channels of the cached vector."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def slots(self) -> SlotSizes:
        """Latents and rotated channels differ in range, so in eight bits no scale is shared by both."""
        alike = math.gcd(self.kv_lora_rank, self.qk_rope_head_dim)
        return SlotSizes(self.num_key_value_heads, self.vector_dim, 0, self.vector_dim // alike)

    @property
    def scores_scale(self) -> float:
        """The factor of the scores."""
        scaling = None if self.rope is None else self.rope.scaling
        sharper = 1.0
        if scaling is not None and scaling.factor > 1:
            sharper = 0.1 * self.mscale_all_dim * math.log(scaling.factor) + 1
        return self.qk_head_dim**-0.5 * sharper**2

    @property
    def made(self) -> AttentionConfig:
        """Attention over keys and values of every head, as latents would make them: its sizes are those of other layers for the
        same model."""
        rope = None if self.rope is None else dataclasses.replace(self.rope, share=1.0)
        return AttentionConfig(
            self.num_attention_heads, self.num_attention_heads, self.qk_head_dim, rope, o_bias=self.bias,
            v_head_dim=self.v_head_dim, scale=self.scores_scale,
        )  # fmt: skip

    def turned(self, module: str) -> tuple[int, int, int] | None:
        first = {"q_proj": self.qk_nope_head_dim, "q_b_proj": self.qk_nope_head_dim}
        first["kv_a_proj_with_mqa"] = self.kv_lora_rank
        if module not in first or self.rope is None:
            return None
        return first[module], self.qk_rope_head_dim, first[module] + self.qk_rope_head_dim

    @property
    def reads(self) -> Any:
        return self.rope, self.qk_rope_head_dim

    def tables(self, positions: Array, longest: int) -> tuple[Array, Array] | None:
        """The rope's tables; see `specjax.models.ropes.tables_of`."""
        return None if self.rope is None else rope_tables(self.rope, self.qk_rope_head_dim, positions, longest)


class LatentAttention(Mixer):
    """See `LatentAttentionConfig.build`; `kernel` is the way to compute it."""

    def __init__(
        self, config: LatentAttentionConfig, width: int, dtype: Any, rngs: nnx.Rngs,
        kernel: Implementation | None = None, inputs: int | None = None,
    ):  # fmt: skip
        c, inputs, heads = config, inputs or width, config.num_attention_heads

        def linear(wide: int, outputs: int, bias: bool = False) -> Linear:
            return Linear(wide, outputs, use_bias=bias, param_dtype=dtype, dtype=dtype, rngs=rngs)

        if c.q_lora_rank is None:
            self.q = linear(inputs, heads * c.qk_head_dim)
        else:
            self.q_a = linear(inputs, c.q_lora_rank, c.bias)
            self.q_a_norm = c.norm.build(c.q_lora_rank, dtype)
            self.q_b = linear(c.q_lora_rank, heads * c.qk_head_dim)
        self.kv_a = linear(inputs, c.vector_dim, c.bias)
        self.kv_a_norm = c.norm.build(c.kv_lora_rank, dtype)
        self.k_b = linear(c.kv_lora_rank, heads * c.qk_nope_head_dim)
        self.v_b = linear(c.kv_lora_rank, heads * c.v_head_dim)
        self.o = linear(heads * c.v_head_dim, width, c.bias)
        self.config, self.kernel = config, kernel

    def queries(self, x: Array, rope: tuple[Array, Array] | None) -> Array:
        """`[B, T, N, r + d]`, as they meet the cached vectors."""
        c = self.config
        q = self.q(x) if c.q_lora_rank is None else self.q_b(self.q_a_norm(self.q_a(x)))
        q = by_heads(q, c.qk_head_dim)
        own, shared = q[..., : c.qk_nope_head_dim], q[..., c.qk_nope_head_dim :]
        shared = shared if rope is None else rotate(shared, *rope)
        return jnp.concatenate([_of_each("btnd,rnd->btnr", own, self.k_b, c.qk_nope_head_dim), shared], axis=-1)

    def vectors(self, x: Array, rope: tuple[Array, Array] | None) -> Array:
        """`[B, T, K, r + d]`, as they are cached."""
        c, both = self.config, self.kv_a(x)
        latent = self.kv_a_norm(both[..., : c.kv_lora_rank])[:, :, None]
        shared = both[..., c.kv_lora_rank :][:, :, None]
        shared = shared if rope is None else rotate(shared, *rope)
        vector = jnp.concatenate([latent, shared], axis=-1)
        return jnp.broadcast_to(vector, (*vector.shape[:2], c.num_key_value_heads, c.vector_dim))

    def __call__(self, x, tables, block: Block, cache, past, positions, shared=None):
        """Returns the output, and the block's vectors with None for values, which the cache does not have.

        `cache` and `past` are this layer's pairs of that kind, or None; `cache` may hold more, see `Slots`."""
        c = self.config
        q, vectors = self.queries(x, tables), self.vectors(x, tables)
        vectors = vectors if cache is None else stored(vectors, cache[0])
        keys = read(vectors, q.dtype)
        if past is not None:
            keys = jnp.concatenate([read(past[0], q.dtype), keys], axis=1)
        seen = Slots(None, None) if cache is None else Slots(*cache)
        cache_key, key_scale = parts(seen.key)
        out = tree_attention(
            q, keys, None, cache_key, None, block.length, visible=block.visible, unseen=block.unseen, causal=block.causal,
            split=block.split, scale=c.scores_scale, key_scale=key_scale, implementation=self.kernel,
        )  # fmt: skip
        out = _of_each("btnr,rnd->btnd", out[..., : c.kv_lora_rank], self.v_b, c.v_head_dim)
        return self.o(out.reshape(*x.shape[:2], -1)), (vectors, None)

    def split_products(self) -> tuple[Any, ...]:
        return (self.o,)


def _of_each(how: str, x: Array, matrix: Linear, width: int) -> Array:
    """The product of every head's rows `[B, T, N, ...]` and its part of a matrix `[r, N width]`, by an einsum's letters."""
    kernel = matrix.kernel.get_value()

    def product(x: Array) -> Array:
        by_head = plain(kernel, x.dtype).reshape(kernel.shape[0], -1, width)
        return jnp.einsum(how, x, by_head, preferred_element_type=jnp.float32)

    return by_tensor_cores(product, x, kernel.dtype).astype(x.dtype)
