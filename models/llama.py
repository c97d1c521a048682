"""The Llama family as flax nnx modules behind the LM contract: Llama 2 and 3, Mistral, Qwen2 and 3, Qwen3-MoE and Gemma.

They differ in the parts of one decoder layer, which `LlamaConfig` names: norms, ropes, windows, what becomes of scores, biases,
the MLP or experts in its place. What sets a family apart is in the table of docs/models.md.
Shapes: `B` rows, `T` block tokens, `S` cache slots, `E` width, `N` heads, `K` kv-heads, `H` head width, `V` vocabulary.
"""

import contextlib
import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from specjax.kernels.tree_attention import Implementation, tree_attention
from specjax.lm import Block, Draw, Output, Partial, Wants, inputs
from specjax.models.experts import SparseMLP
from specjax.models.kv import KVCache, KVDelta, commit_kv, init_kv, kv_axes
from specjax.models.kv_heads import copied
from specjax.models.llama_config import LlamaConfig
from specjax.models.mlp import MLP
from specjax.models.norms import RMSNorm, rms_norm
from specjax.models.param_axes import param_axes
from specjax.models.ropes import rope_tables, rotate
from specjax.models.stack import abstract_stack
from specjax.sharding.ambient import split_tokens

Array = jax.Array


class Attention(nnx.Module):
    """`inputs` is the width of what it reads, where that is not the model's; `kernel` the way to compute it."""

    def __init__(
        self, config: LlamaConfig, window: int | None, dtype: Any, rngs: nnx.Rngs, inputs: int | None = None,
        kernel: Implementation | None = None,
    ):  # fmt: skip
        c = config
        inputs = inputs or c.hidden_size
        linear = functools.partial(nnx.Linear, param_dtype=dtype, dtype=dtype, rngs=rngs)
        self.q = linear(inputs, c.num_attention_heads * c.head_dim, use_bias=c.qkv_bias)
        self.k = linear(inputs, c.num_key_value_heads * c.head_dim, use_bias=c.qkv_bias)
        if not c.value_is_key:
            self.v = linear(inputs, c.num_key_value_heads * c.head_dim, use_bias=c.qkv_bias)
        self.o = linear(c.num_attention_heads * c.head_dim, c.hidden_size, use_bias=c.o_bias)
        if c.qk_norm:
            self.q_norm = RMSNorm(c.head_dim, c.rms_norm_eps, dtype, c.norm)
            self.k_norm = RMSNorm(c.head_dim, c.rms_norm_eps, dtype, c.norm)
        self.config, self.window, self.kernel = config, window, kernel

    def values(self, x):
        """`[B, T, K, H]`."""
        c = self.config
        values = (self.k if c.value_is_key else self.v)(x).reshape(*x.shape[:2], c.num_key_value_heads, c.head_dim)
        return rms_norm(values, None, c.rms_norm_eps) if c.value_norm else values

    def __call__(self, x, rope, block: Block, cache, past, positions):
        """`cache`, `past` are this layer's (key, value) pairs or None. Returns the output and the block's (key, value)."""
        c = self.config
        batch, length, _ = x.shape
        q = self.q(x).reshape(batch, length, c.num_attention_heads, c.head_dim)
        k = self.k(x).reshape(batch, length, c.num_key_value_heads, c.head_dim)
        v = self.values(x)
        if c.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotate(q, *rope), rotate(k, *rope)
        if cache is not None:  # a block reads its own K/V as the cache will return them
            k, v = k.astype(cache[0].dtype), v.astype(cache[1].dtype)
        keys, values = k, v
        if past is not None:
            keys = jnp.concatenate([past[0], k], axis=1)
            values = jnp.concatenate([past[1], v], axis=1)
        out = tree_attention(
            q,
            keys,
            values,
            None if cache is None else cache[0],
            None if cache is None else cache[1],
            block.length,
            visible=block.visible,
            query_positions=block.positions,
            key_positions=positions,
            unseen=block.unseen,
            causal=block.causal,
            split=block.split,
            scale=c.head_dim**-0.5 if c.attention_scale is None else c.attention_scale,
            window=self.window,
            soft_cap=c.attn_logit_softcapping,
            implementation=self.kernel,
        )
        return self.o(out.reshape(batch, length, -1)), (k, v)


class Layer(nnx.Module):
    """`sparse`: with experts in the place of the MLP."""

    def __init__(
        self, config: LlamaConfig, window: int | None, dtype: Any, rngs: nnx.Rngs, kernel: Implementation | None = None,
        sparse: bool = False,
    ):  # fmt: skip
        norm = lambda: RMSNorm(config.hidden_size, config.rms_norm_eps, dtype, config.norm)
        self.attention_norm = norm()
        self.attention = Attention(config, window, dtype, rngs, kernel=kernel)
        self.mlp_norm = norm()
        self.mlp = SparseMLP(config, dtype, rngs) if sparse else MLP(config, dtype, rngs)
        if config.post_norms:
            self.attention_post_norm, self.mlp_post_norm = norm(), norm()
        if config.layer_scalar:
            self.scalar = nnx.Param(jnp.ones((1,), dtype))
        self.config = config

    def __call__(self, x, rope, block, cache, past, positions, skip=None):
        """`skip` `[2]` bool, traced: whether to leave out the attention, and the MLP."""

        def attend(x):
            attended, kv = self.attention(self.attention_norm(x), rope, block, cache, past, positions)
            return x + (self.attention_post_norm(attended) if self.config.post_norms else attended), kv

        def feed(x):
            fed = self.mlp(self.mlp_norm(x))
            return x + (self.mlp_post_norm(fed) if self.config.post_norms else fed)

        if skip is None:
            x, kv = attend(x)
            return self._scaled(feed(x)), kv
        hole = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(attend, x)[1])
        x, kv = jax.lax.cond(skip[0], lambda x: (x, hole), attend, x)
        return self._scaled(jax.lax.cond(skip[1], lambda x: x, feed, x)), kv

    def _scaled(self, x):
        return x * self.scalar[...].astype(x.dtype)[None, None] if self.config.layer_scalar else x


class Llama(nnx.Module):
    """The whole stack. `LlamaLM` splits it into a static graph and a params pytree."""

    def __init__(self, config: LlamaConfig, dtype: Any, rngs: nnx.Rngs, kernel: Implementation | None = None):
        layer = lambda i: Layer(config.at(i), config.window(i), dtype, rngs, kernel, config.sparse(i))
        self.embed = nnx.Embed(config.vocab_size, config.hidden_size, param_dtype=dtype, dtype=dtype, rngs=rngs)
        self.layers = nnx.List([layer(i) for i in range(config.num_hidden_layers)])
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype, config.norm)
        if not config.tie_word_embeddings:
            self.head = nnx.Linear(
                config.hidden_size, config.vocab_size, use_bias=False, param_dtype=dtype, dtype=dtype, rngs=rngs
            )


@functools.lru_cache(maxsize=64)
def _abstract(config: LlamaConfig, dtype: Any, kernel: Implementation | None):
    """The graph of the stack, and its parameters as `ShapeDtypeStruct`s."""
    bare = dataclasses.replace(config, num_hidden_layers=0)
    kinds = [(config.at(i), config.window(i), config.sparse(i)) for i in range(config.num_hidden_layers)]
    shell = lambda: Llama(bare, dtype, nnx.Rngs(0), kernel)
    layer = lambda kind: Layer(kind[0], kind[1], dtype, nnx.Rngs(0), kernel, kind[2])
    return nnx.split(abstract_stack(shell, layer, kinds))


@dataclasses.dataclass(frozen=True)
class LlamaLM:
    """The Llama family behind `specjax.lm.LM`: functions of a params pytree (nested dicts of arrays).

    Attributes:
      config: its shape.
      attention: the way to compute attention, see `implementation` of `specjax.kernels.tree_attention`.
      kv_copies: copies of every kv-head, side by side in parameters and cache (`specjax.models.kv_heads`).
      layer_cast: whether all but the stored parameters is float32: each weight is widened where it is used, inputs and cache
        are float32, and products have their full precision (LayerCast, Yuan et al. 2025, arXiv:2506.09501).
    """

    config: LlamaConfig
    attention: Implementation | None = None
    kv_copies: int = 1
    layer_cast: bool = False

    def _precisely(self) -> Any:
        return jax.default_matmul_precision("highest") if self.layer_cast else contextlib.nullcontext()

    @property
    def laid_out(self) -> LlamaConfig:
        """The config with the copies of its kv-heads."""
        return dataclasses.replace(self.config, num_key_value_heads=self.config.num_key_value_heads * self.kv_copies)

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @property
    def num_layers(self) -> int:
        return self.config.num_hidden_layers

    @property
    def reads_mixtures(self) -> bool:
        return True

    def init(self, key: Array, dtype: Any = jnp.float32) -> Any:
        """Random parameters of the given type."""
        plain = nnx.to_pure_dict(nnx.split(Llama(self.config, dtype, nnx.Rngs(key)))[1])
        return copied(plain, self.config, self.kv_copies)

    def abstract(self, dtype: Any = jnp.float32) -> Any:
        """The params pytree as `jax.ShapeDtypeStruct`s."""
        return nnx.to_pure_dict(_abstract(self.laid_out, dtype, None)[1])

    def bind(self, params: Any) -> Llama:
        """The nnx module that holds these parameters."""
        return nnx.merge(_abstract(self.laid_out, jnp.float32, self.attention)[0], params)

    def __call__(
        self,
        params: Any,
        block: Block,
        cache: KVCache | None,
        *,
        wants: Wants,
        draw: Draw | None = None,
        past: KVDelta | None = None,
        partial: Partial | None = None,
    ) -> Output:
        if partial is None:
            lo, h, below = 0, inputs(self, params, block), ((), ())
        else:
            lo, h, below = partial.lo, partial.h, (partial.delta.key, partial.delta.value)
        hidden = {}
        keys, values = list(below[0]), list(below[1])
        stops = sorted({layer + 1 for layer in wants.hidden} | {self.num_layers})
        for stop in stops:
            if stop > lo:
                h, delta = self.layers(params, h, lo, stop, block, cache, past)
                keys.extend(delta.key)
                values.extend(delta.value)
                lo = stop
            if stop - 1 in wants.hidden:
                hidden[stop - 1] = h
        logits = topk = drawn = None
        final = self.norm(params, h) if wants.final or wants.head else h
        if wants.head:
            logits = self.unembed(params, final)
            topk = jax.lax.top_k(logits, wants.topk) if wants.topk else None
            drawn = draw(logits) if wants.draw and draw is not None else None
        return Output(
            delta=KVDelta(tuple(keys), tuple(values), block.positions),
            logits=logits if wants.logits else None,
            topk=topk,
            draw=drawn,
            hidden=hidden if wants.hidden else None,
            final=final if wants.final else None,
        )

    def embed(self, params: Any, tokens: Array) -> Array:
        """Ids `[B, T]` to `[B, T, E]`; ids outside the vocabulary are read as token 0."""
        table = params["embed"]["embedding"]
        known = (tokens >= 0) & (tokens < self.vocab_size)
        h = table.at[jnp.where(known, tokens, 0)].get(mode="promise_in_bounds")
        h = h.astype(jnp.float32) if self.layer_cast else h
        return h if self.config.embedding_scale == 1 else h * jnp.asarray(self.config.embedding_scale, h.dtype)

    def layers(
        self,
        params: Any,
        h: Array,
        lo: int,
        hi: int,
        block: Block,
        cache: KVCache | None,
        past: KVDelta | None = None,
        skip: Array | None = None,
    ) -> tuple[Array, KVDelta]:
        """Runs layers `[lo, hi)` on `h` `[B, T, E]`; see `specjax.lm.LM.layers`."""
        model = self.bind(params)
        kinds = [self.laid_out.at(i) for i in range(lo, hi)]
        ropes = {kind: rope_tables(kind, block.positions) for kind in dict.fromkeys(kinds)}
        positions = block.positions
        if past is not None:
            positions = jnp.concatenate([past.positions, positions], axis=1)
        keys, values = [], []
        for i in range(lo, hi):
            with jax.named_scope(f"layer_{i}"), self._precisely():
                layer_cache = None if cache is None else (cache.key[i], cache.value[i])
                layer_past = None if past is None else (past.key[i], past.value[i])
                left_out = None if skip is None else skip[i]
                h = split_tokens(h) if block.split else h
                h, (k, v) = model.layers[i](
                    h, ropes[kinds[i - lo]], block, layer_cache, layer_past, positions, left_out
                )
            keys.append(k)
            values.append(v)
        return h, KVDelta(tuple(keys), tuple(values), block.positions)

    def values(self, params: Any, h: Array, layer: int) -> Array:
        """The values `[B, T, K, H]` of a layer, from the residual stream `[B, T, E]` that enters it."""
        entered = self.bind(params).layers[layer]
        return entered.attention.values(entered.attention_norm(h))

    def join(self, below: KVDelta, above: KVDelta) -> KVDelta:
        """See `specjax.lm.LM.join`."""
        return KVDelta(below.key + above.key, below.value + above.value, below.positions)

    def norm(self, params: Any, h: Array) -> Array:
        """The final norm."""
        return self.bind(params).norm(h)

    def unembed(self, params: Any, h: Array) -> Array:
        """Normed features `[B, T, E]` to logits `[B, T, V]` in float32."""
        with jax.named_scope("head"), self._precisely():
            if self.config.tie_word_embeddings:
                table = params["embed"]["embedding"]
                logits = jax.lax.dot_general(table, h, (((1,), (2,)), ((), ())), preferred_element_type=jnp.float32)
                logits = jnp.moveaxis(logits, 0, 2)
            else:
                logits = jnp.einsum("bte,ev->btv", h, params["head"]["kernel"], preferred_element_type=jnp.float32)
            logits = logits if self.config.logits_scaling == 1 else logits / self.config.logits_scaling
            cap = self.config.final_logit_softcapping
            return logits if cap is None else cap * jnp.tanh(logits / cap)

    def init_cache(self, batch: int, capacity: int, dtype: Any = jnp.float32) -> KVCache:
        """An empty cache of `capacity` slots a row."""
        return init_kv(self.laid_out, batch, capacity, jnp.float32 if self.layer_cast else dtype)

    def begin(self, params: Any, cache: KVCache, lengths: Array) -> KVCache:
        """See `specjax.lm.LM.begin`: the cache as it is."""
        return cache

    def commit(self, cache: KVCache, delta: KVDelta, src: Array | None, dst: Array) -> KVCache:
        """See `specjax.lm.LM.commit`."""
        return commit_kv(cache, delta, src, dst)

    def axes(self, params: Any) -> Any:
        """Logical axes of every parameter, by the name of the module that holds it."""
        return param_axes(params)

    def axis_counts(self) -> dict[str, int]:
        """How many units an axis splits into, where that is not its size (whole heads)."""
        shared = math.gcd(*(kv_heads for kv_heads, _ in self.laid_out.head_sizes))
        return {"heads": self.config.num_attention_heads, "kv_heads": shared}

    def cache_axes(self, cache: KVCache) -> KVCache:
        return kv_axes(cache)
