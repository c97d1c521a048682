"""The Llama family as flax nnx modules behind the LM contract: Llama, Mistral, Qwen, Gemma and the others of docs/models.md.

They differ in the parts of one decoder layer, which `LlamaConfig` names: norms, ropes, windows, what becomes of scores, biases,
the MLP or experts in its place. What sets a family apart is in its description in `specjax.models.families`.
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
from specjax.models.caches.base import Old, OldCache
from specjax.models.experts import SparseMLP
from specjax.models.few_bits import embedded, is_quantised, padded_rows, scores
from specjax.models.gemma_experts import Beside, with_experts
from specjax.models.kv import KVCache, KVDelta, Slots, commit_kv, init_kv, kv_axes
from specjax.models.kv_bits import parts, read, stored
from specjax.models.kv_heads import copied
from specjax.models.layer_inputs import LayerInput, LayerInputs
from specjax.models.linear import Linear, by_heads
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
        linear = functools.partial(Linear, param_dtype=dtype, dtype=dtype, rngs=rngs)
        self.q = linear(inputs, c.num_attention_heads * c.head_dim, use_bias=c.qkv_bias)
        self.shares = c.num_kv_shared_layers > 0
        if not self.shares:
            self.k = linear(inputs, c.num_key_value_heads * c.head_dim, use_bias=c.qkv_bias)
        if not self.shares and not c.value_is_key:
            self.v = linear(inputs, c.num_key_value_heads * c.head_dim, use_bias=c.qkv_bias)
        self.o = linear(c.num_attention_heads * c.head_dim, c.hidden_size, use_bias=c.o_bias)
        if c.qk_norm:
            self.q_norm = RMSNorm(c.head_dim, c.rms_norm_eps, dtype, c.norm)
        if c.qk_norm and not self.shares:
            self.k_norm = RMSNorm(c.head_dim, c.rms_norm_eps, dtype, c.norm)
        if c.qk_wide_norm:
            self.q_wide_norm = RMSNorm(c.num_attention_heads * c.head_dim, c.rms_norm_eps, dtype, c.norm)
            self.k_wide_norm = RMSNorm(c.num_key_value_heads * c.head_dim, c.rms_norm_eps, dtype, c.norm)
        if c.attention_sinks:
            self.sinks = nnx.Param(jnp.zeros((c.num_attention_heads,), dtype))
        self.config, self.window, self.kernel = config, window, kernel

    def _own(self, x, rope, cache):
        c = self.config
        k = self.k_wide_norm(self.k(x)) if c.qk_wide_norm else self.k(x)
        k = by_heads(k, c.head_dim)
        k, v = rotate(self.k_norm(k) if c.qk_norm else k, *rope), self.values(x)
        # a block reads its own K/V as the cache will return them
        return (k, v) if cache is None else (stored(k, cache[0]), stored(v, cache[1]))

    def values(self, x):
        """`[B, T, K, H]`."""
        c = self.config
        values = by_heads((self.k if c.value_is_key else self.v)(x), c.head_dim)
        return rms_norm(values, None, c.rms_norm_eps) if c.value_norm else values

    def __call__(self, x, rope, block: Block, cache, past, positions, shared=None):
        """`cache`, `past` are this layer's (key, value) pairs or None; of a layer that shares those of another, that one's, and
        `shared` is its pair of the block; `cache` may say more, see `Slots`. Returns the output and the block's (key, value),
        and its queries where the cache asks for them."""
        c = self.config
        batch, length, _ = x.shape
        q = self.q_wide_norm(self.q(x)) if c.qk_wide_norm else self.q(x)
        q = by_heads(q, c.head_dim)
        q = rotate(self.q_norm(q) if c.qk_norm else q, *rope)
        k, v = self._own(x, rope, cache) if shared is None else shared[:2]
        keys, values = read(k, q.dtype), read(v, q.dtype)
        if past is not None:
            keys = jnp.concatenate([read(past[0], q.dtype), keys], axis=1)
            values = jnp.concatenate([read(past[1], q.dtype), values], axis=1)
        seen = Slots(None, None) if cache is None else Slots(*cache)
        cache_key, key_scale = parts(seen.key)
        cache_value, value_scale = parts(seen.value)
        scale = c.head_dim**-0.5 if c.attention_scale is None else c.attention_scale
        out = tree_attention(
            q,
            keys,
            values,
            cache_key,
            cache_value,
            block.length if seen.unseen is None else jnp.full_like(block.length, seen.unseen.shape[1]),
            visible=block.visible,
            query_positions=block.positions,
            key_positions=positions,
            cache_positions=seen.positions,
            unseen=block.unseen if seen.unseen is None else seen.unseen,
            causal=block.causal,
            split=block.split,
            scale=scale,
            window=self.window,
            soft_cap=c.attn_logit_softcapping,
            key_scale=key_scale,
            value_scale=value_scale,
            sinks=self.sinks[...] if c.attention_sinks else None,
            implementation=self.kernel,
        )
        asked = ((q * scale).reshape(batch, length, k.shape[2], -1),) if seen.asks else ()
        return self.o(out.reshape(batch, length, -1)), (k, v, *asked)


class Layer(nnx.Module):
    """`sparse`: with experts in the place of the MLP."""

    def __init__(
        self, config: LlamaConfig, window: int | None, dtype: Any, rngs: nnx.Rngs, kernel: Implementation | None = None,
        sparse: bool = False,
    ):  # fmt: skip
        norm = lambda: RMSNorm(config.hidden_size, config.rms_norm_eps, dtype, config.norm)
        self.attention = Attention(config, window, dtype, rngs, kernel=kernel)
        if config.pre_norms:
            self.attention_norm, self.mlp_norm = norm(), norm()
        beside = config.experts if sparse and config.experts is not None and config.experts.beside_mlp else None
        self.mlp = SparseMLP(config, dtype, rngs) if sparse and not beside else MLP(config, dtype, rngs)
        if beside:
            self.beside = Beside(beside, config.hidden_size, config.rms_norm_eps, dtype, rngs)
        if config.post_norms:
            self.attention_post_norm, self.mlp_post_norm = norm(), norm()
        if config.layer_scalar:
            self.scalar = nnx.Param(jnp.ones((1,), dtype))
        if config.hidden_size_per_layer_input:
            self.layer_input = LayerInput(config, dtype, rngs)
        self.config, self.is_beside = config, beside is not None

    def __call__(self, x, rope, block, cache, past, positions, skip=None, shared=None, inputs=None):
        """`skip` `[2]` bool, traced: whether to leave out the attention, and the MLP. `shared` is as for `Attention`, `inputs`
        `[B, T, P]` as for `LayerInput`."""

        def attend(x):
            attended, kv = self.attention(self.entered(x), rope, block, cache, past, positions, shared)
            return self._added(x, self.attention_post_norm(attended) if self.config.post_norms else attended), kv

        def feed(x):
            fed = self.mlp(self.mlp_norm(x) if self.config.pre_norms else x)
            fed = with_experts(self.beside, x, fed) if self.is_beside else fed
            return self._added(x, self.mlp_post_norm(fed) if self.config.post_norms else fed)

        if skip is None:
            x, kv = attend(x)
            return self._end(feed(x), inputs), kv
        hole = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(attend, x)[1])
        x, kv = jax.lax.cond(skip[0], lambda x: (x, hole), attend, x)
        return self._end(jax.lax.cond(skip[1], lambda x: x, feed, x), inputs), kv

    def split_products(self):
        """The products whose inputs a mesh splits over `model`, so that their parts are summed over it."""
        return (self.attention.o, self.mlp.down) if isinstance(self.mlp, MLP) else (self.attention.o,)

    def entered(self, x):
        """What attention reads of the residual stream."""
        return self.attention_norm(x) if self.config.pre_norms else x

    def _added(self, x, branch):
        scale = self.config.residual_multiplier
        return x + (branch if scale == 1 else branch * jnp.asarray(scale, branch.dtype))

    def _end(self, x, inputs):
        x = x if inputs is None else self.layer_input(x, inputs)
        return x * self.scalar[...].astype(x.dtype)[None, None] if self.config.layer_scalar else x


class Llama(nnx.Module):
    """The whole stack, or with `bare` all but its layers. `LlamaLM` splits it into a static graph and a params pytree."""

    def __init__(
        self, config: LlamaConfig, dtype: Any, rngs: nnx.Rngs, kernel: Implementation | None = None, bare: bool = False
    ):
        layer = lambda i: Layer(config.at(i), config.window(i), dtype, rngs, kernel, config.sparse(i))
        self.embed = nnx.Embed(config.vocab_size, config.hidden_size, param_dtype=dtype, dtype=dtype, rngs=rngs)
        self.layers = nnx.List([layer(i) for i in range(0 if bare else config.num_hidden_layers)])
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype, config.norm)
        if config.hidden_size_per_layer_input:
            self.layer_inputs = LayerInputs(config, dtype, rngs)
        if not config.tie_word_embeddings:
            self.head = Linear(
                config.hidden_size, config.vocab_size, use_bias=False, param_dtype=dtype, dtype=dtype, rngs=rngs
            )


@functools.lru_cache(maxsize=64)
def _abstract(config: LlamaConfig, dtype: Any, kernel: Implementation | None, reduce_dtype: str | None):
    """The graph of the stack, and its parameters as `ShapeDtypeStruct`s."""
    kinds = [(config.at(i), config.window(i), config.sparse(i)) for i in range(config.num_hidden_layers)]
    shell = lambda: Llama(config, dtype, nnx.Rngs(0), kernel, bare=True)

    def layer(kind):
        made = Layer(kind[0], kind[1], dtype, nnx.Rngs(0), kernel, kind[2])
        for product in () if reduce_dtype is None else made.split_products():
            product.reduce_dtype = reduce_dtype
        return made

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
      ahead: where given, layers with a window keep that and so many tokens besides, in a ring (`specjax.models.kv.KVCache`),
        for whoever writes at most so many ahead of what it reads next and never goes back further; None: every layer keeps all.
      cache_dtype: where given, the type of its caches, whatever whoever makes them asks for; one of
        `specjax.models.kv_bits.CACHE_DTYPES`.
      reduce_dtype: the type in which parts of products are summed over a mesh, such as `bfloat16`, at half the exchange; None:
        float32. Those of attention and of MLPs, not those of experts.
      old: where given, what its caches keep of older tokens (`specjax.models.caches`), which needs `ahead`, and
        layers that see all of a text.
    """

    config: LlamaConfig
    attention: Implementation | None = None
    kv_copies: int = 1
    layer_cast: bool = False
    ahead: int | None = None
    cache_dtype: str | None = None
    reduce_dtype: str | None = None
    old: Old | None = None

    def __post_init__(self):
        if self.old is not None and self.has_windows:
            raise ValueError(
                f"the cache {type(self.old).__name__} is for layers that see the whole text, and this model has windows: "
                "leave the cache out"
            )

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
    def has_windows(self) -> bool:
        """Whether a layer has a sliding window."""
        return any(self.config.window(i) is not None for i in range(self.num_layers))

    @property
    def reads_mixtures(self) -> bool:
        return not self.config.hidden_size_per_layer_input  # those are of tokens

    @property
    def widest(self) -> int | None:
        """How many tokens of a prompt are read together at most, where its cache forgets: as many as are folded."""
        return None if self.old is None else self.old.chunk

    def init(self, key: Array, dtype: Any = jnp.float32) -> Any:
        """Random parameters of the given type."""
        plain = nnx.to_pure_dict(nnx.split(Llama(self.config, dtype, nnx.Rngs(key)))[1])
        return copied(plain, self.config, self.kv_copies)

    def abstract(self, dtype: Any = jnp.float32) -> Any:
        """The params pytree as `jax.ShapeDtypeStruct`s."""
        return nnx.to_pure_dict(_abstract(self.laid_out, dtype, self.attention, self.reduce_dtype)[1])

    def bind(self, params: Any) -> Llama:
        """The nnx module that holds these parameters; layers without any (`specjax.models.load(layers=False)`) have shapes."""
        graph, shapes = _abstract(self.laid_out, jnp.float32, self.attention, self.reduce_dtype)
        return nnx.merge(graph, params if "layers" in params else nnx.to_pure_dict(shapes) | params)

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
            lo, h, early = 0, inputs(self, params, block), ((), (), ())
        else:
            lo, h, early = partial.lo, partial.h, (partial.delta.key, partial.delta.value, partial.delta.query)
        hidden = {}
        keys, values, queries = map(list, early)
        stops = sorted({layer + 1 for layer in wants.hidden} | {self.num_layers})
        for stop in stops:
            if stop > lo:
                below = KVDelta(tuple(keys), tuple(values), block.positions)
                h, delta = self.layers(params, h, lo, stop, block, cache, past, below=below)
                keys.extend(delta.key)
                values.extend(delta.value)
                queries.extend(delta.query)
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
            delta=KVDelta(tuple(keys), tuple(values), block.positions, tuple(queries)),
            logits=logits if wants.logits else None,
            topk=topk,
            draw=drawn,
            hidden=hidden if wants.hidden else None,
            final=final if wants.final else None,
        )

    def embed(self, params: Any, tokens: Array) -> Array:
        """Ids `[B, T]` to `[B, T, E]` in float32; ids outside the vocabulary are read as token 0."""
        table = params["embed"]["embedding"]
        scale = jnp.asarray(self.config.embedding_scale, jnp.float32 if self.layer_cast else table.dtype)
        return embedded(table, tokens, self.vocab_size) * scale.astype(jnp.float32)

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
        below: KVDelta | None = None,
    ) -> tuple[Array, KVDelta]:
        """Runs layers `[lo, hi)` on `h` `[B, T, E]`; see `specjax.lm.LM.layers`.

        Raises:
          ValueError: where one of them reads keys of a layer below `lo`, and there is no `below`.
        """
        model = self.bind(params)
        kinds = [self.laid_out.at(i) for i in range(lo, hi)]
        ropes = {kind: rope_tables(kind, block.positions) for kind in dict.fromkeys(kinds)}
        positions = block.positions
        if past is not None:
            positions = jnp.concatenate([past.positions, positions], axis=1)
        inputs = None
        if self.config.hidden_size_per_layer_input:
            inputs = model.layer_inputs(block.tokens, self.embed(params, block.tokens))
        own: dict[int, Any] = {} if below is None else dict(enumerate(zip(below.key, below.value, strict=True)))
        made = []
        for i in range(lo, hi):
            source = self.config.source(i)  # layers with keys of their own come first, so it is an index of caches too
            if source < i and source not in own:
                raise ValueError(f"layer {i} reads the keys of layer {source}: give layers() what that made as `below`")
            with jax.named_scope(f"layer_{i}"), self._precisely():
                layer_cache = None if cache is None else cache.layer(source, block.length)
                layer_past = None if past is None else (past.key[source], past.value[source])
                left_out = None if skip is None else skip[i]
                h = split_tokens(h) if block.split else h
                h, own[i] = model.layers[i](
                    h, ropes[kinds[i - lo]], block, layer_cache, layer_past, positions, left_out,
                    None if source == i else own[source], None if inputs is None else inputs[:, :, i],
                )  # fmt: skip
            if source == i:
                made.append(own[i])
        keys, values, *queries = tuple(zip(*made, strict=True)) or ((), ())
        return h, KVDelta(keys, values, block.positions, *queries)

    def values(self, params: Any, h: Array, layer: int) -> Array:
        """The values `[B, T, K, H]` of a layer, from the residual stream `[B, T, E]` that enters it."""
        entered = self.bind(params).layers[layer]
        return entered.attention.values(entered.entered(h))

    def join(self, below: KVDelta, above: KVDelta) -> KVDelta:
        """See `specjax.lm.LM.join`."""
        return KVDelta(below.key + above.key, below.value + above.value, below.positions, below.query + above.query)

    def norm(self, params: Any, h: Array) -> Array:
        """The final norm."""
        return self.bind(params).norm(h)

    def unembed(self, params: Any, h: Array) -> Array:
        """Normed features `[B, T, E]` to logits `[B, T, V]` in float32."""
        with jax.named_scope("head"), self._precisely():
            tied = self.config.tie_word_embeddings
            table = params["embed"]["embedding"]
            if tied and not is_quantised(table):
                last = (((1,), (2,)), ((), ()))
                by_table = lambda h: jax.lax.dot_general(table, h, last, preferred_element_type=jnp.float32)
                logits = padded_rows(lambda h: jnp.moveaxis(by_table(h), 0, 2), h)
            else:
                logits = scores(h, table.T if tied else params["head"]["kernel"])
            logits = logits if self.config.logits_scaling == 1 else logits / self.config.logits_scaling
            cap = self.config.final_logit_softcapping
            return logits if cap is None else cap * jnp.tanh(logits / cap)

    def init_cache(self, batch: int, capacity: int, dtype: Any = jnp.float32) -> KVCache | OldCache:
        """An empty cache of `capacity` slots a row."""
        kind = self.cache_dtype or (jnp.float32 if self.layer_cast else dtype)
        if self.old is not None:
            return OldCache.empty(self.old, self.laid_out, batch, capacity, kind, self.ahead)
        return init_kv(self.laid_out, batch, capacity, kind, self.ahead)

    def begin(self, params: Any, cache: Any, lengths: Array) -> Any:
        """See `specjax.lm.LM.begin`: the cache as it is; one that forgets as the first step would leave it.

        Rows beside a longer prompt were read on, and folded there what they have none of alone.
        """
        return cache.begun(lengths - 1) if isinstance(cache, OldCache) else cache

    def commit(self, cache: Any, delta: KVDelta, src: Array | None, dst: Array) -> Any:
        """See `specjax.lm.LM.commit`."""
        return cache.commit(delta, src, dst) if isinstance(cache, OldCache) else commit_kv(cache, delta, src, dst)

    def axes(self, params: Any) -> Any:
        """Logical axes of every parameter, by the name of the module that holds it."""
        return param_axes(params)

    def axis_counts(self) -> dict[str, int]:
        """How many units an axis splits into, where that is not its size (whole heads), and the sizes of experts."""
        shared = math.gcd(*(kv_heads for kv_heads, _ in self.laid_out.head_sizes))
        experts = self.config.experts.axis_counts if self.config.experts else {}
        return {"heads": self.config.num_attention_heads, "kv_heads": shared} | experts

    def cache_axes(self, cache: Any) -> Any:
        return cache.axes() if isinstance(cache, OldCache) else kv_axes(cache)
