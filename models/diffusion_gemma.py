"""DiffusionGemma's text model: one stack of layers that encodes final text and decodes a canvas.

The encoder's pass is causal, and its keys and values are stored. The decoder's pass sees the stored ones and its whole
canvas, and stores nothing. Both share all weights except one scalar per layer. The decoder's inputs are the canvas'
embeddings mixed with a soft embedding of its previous prediction (self-conditioning, Chen et al. 2022,
arXiv:2208.04202). Images are not read.

Shapes: `B` rows, `T` block tokens, `S` cache slots, `K` kv-heads, `H` head width, `E` width, `V` vocabulary.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from specjax.kernels.precision import by_tensor_cores
from specjax.lm import Block, Draw, Output, Partial, Wants
from specjax.models.few_bits import embedded
from specjax.models.gemma_config import DiffusionGemmaConfig
from specjax.models.gemma_layers import Layer, RMSNorm, SelfConditioning, View, rope_tables
from specjax.models.kv import KVCache, KVDelta, commit_kv, kv_axes
from specjax.models.param_axes import param_axes
from specjax.models.stack import abstract_stack

Array = jax.Array


class DiffusionGemma(nnx.Module):
    """The whole stack. `DiffusionGemmaLM` splits it into a static graph and a params pytree."""

    def __init__(self, config: DiffusionGemmaConfig, dtype: Any, rngs: nnx.Rngs):
        self.embed = nnx.Embed(config.vocab_size, config.hidden_size, param_dtype=dtype, dtype=dtype, rngs=rngs)
        self.layers = nnx.List([Layer(config, i, dtype, rngs) for i in range(config.num_hidden_layers)])
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.self_conditioning = SelfConditioning(config, dtype, rngs)


@functools.lru_cache(maxsize=64)
def _abstract(config: DiffusionGemmaConfig, dtype: Any):
    """The graph of the stack, and its parameters as `ShapeDtypeStruct`s."""
    bare = dataclasses.replace(config, num_hidden_layers=0)
    alike = [config.sliding_layers.index(kind) for kind in config.sliding_layers]  # the first layer of each kind
    shell = lambda: DiffusionGemma(bare, dtype, nnx.Rngs(0))
    return nnx.split(abstract_stack(shell, lambda i: Layer(config, i, dtype, nnx.Rngs(0)), alike))


@dataclasses.dataclass(frozen=True)
class DiffusionGemmaLM:
    """DiffusionGemma: its encoder is a `specjax.lm.LM`, its decoder a `specjax.diffusion.canvas.CanvasLM`.

    The encoder reads no uncommitted tokens (`past`), starts at its first layer (no `partial`), and skips no layer.
    """

    config: DiffusionGemmaConfig

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @property
    def num_layers(self) -> int:
        return self.config.num_hidden_layers

    @property
    def reads_mixtures(self) -> bool:
        return False

    def init(self, key: Array, dtype: Any = jnp.float32) -> Any:
        """Random parameters of the given type."""
        return nnx.to_pure_dict(nnx.split(DiffusionGemma(self.config, dtype, nnx.Rngs(key)))[1])

    def abstract(self, dtype: Any = jnp.float32) -> Any:
        """The params pytree, each leaf a `jax.ShapeDtypeStruct`."""
        return nnx.to_pure_dict(_abstract(self.config, dtype)[1])

    def bind(self, params: Any) -> DiffusionGemma:
        """The nnx module that holds these parameters."""
        return nnx.merge(_abstract(self.config, jnp.float32)[0], params)

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
        """The encoder's pass.

        Raises:
          ValueError: on unsupported arguments: `past`, `partial`, `block.unseen`, `block.embeddings` or
            `block.mixture`.
        """
        if any(x is not None for x in (past, partial, block.unseen, block.embeddings, block.mixture)):
            raise ValueError("DiffusionGemma reads nothing but whole blocks of tokens after a cache without holes")
        h, hidden, lo = self.embed(params, block.tokens), {}, 0
        deltas = []
        for stop in sorted({layer + 1 for layer in wants.hidden} | {self.num_layers}):
            h, delta = self.layers(params, h, lo, stop, block, cache)
            deltas.append(delta)
            if stop - 1 in wants.hidden:
                hidden[stop - 1] = h
            lo = stop
        final = self.norm(params, h) if wants.final or wants.head else h
        logits = self.unembed(params, final) if wants.head else None
        return Output(
            delta=functools.reduce(self.join, deltas),
            logits=logits if wants.logits else None,
            topk=None if logits is None or not wants.topk else jax.lax.top_k(logits, wants.topk),
            draw=None if logits is None or not wants.draw or draw is None else draw(logits),
            hidden=hidden if wants.hidden else None,
            final=final if wants.final else None,
        )

    def layers(self, params, h, lo, hi, block: Block, cache, past=None, skip=None, below=None) -> tuple[Array, KVDelta]:
        """The encoder's layers `[lo, hi)` on `h` `[B, T, E]`; see `specjax.lm.LM.layers`.

        Raises:
          ValueError: on `past` or `skip`, which are not supported.
        """
        if past is not None or skip is not None:
            raise ValueError(
                "DiffusionGemma's layers take no `past` or `skip`: no uncommitted tokens, no layer left out"
            )
        everyone = jnp.ones((h.shape[0], 1, 1), bool)
        view = View(self._ropes(block.positions), block.length, block.visible, block.positions, everyone, block.causal)
        return self._layers(params, h, lo, hi, view, cache, block.positions)

    def read(self, params: Any, tokens: Array, positions: Array, cache: KVCache, soft: Array, settled: Array) -> Output:
        """See `specjax.diffusion.canvas.CanvasLM.read`."""
        model = self.bind(params)
        own = self.embed(params, tokens)
        one = settled[:, None, None]
        with jax.named_scope("self_conditioning"):
            h = jnp.where(one, own, model.self_conditioning.join(own, soft))
        start = positions[:, 0]
        view = View(
            self._ropes(positions),
            start,
            jnp.tril(jnp.ones((tokens.shape[1],) * 2, bool))[None] | ~one,
            jnp.where(settled[:, None], positions, start[:, None]),
            one,
        )
        h, delta = self._layers(params, h, 0, self.num_layers, view, cache, positions)
        return Output(delta=delta, final=self.norm(params, h))

    def _ropes(self, positions):
        return rope_tables(self.config.sliding, positions), rope_tables(self.config.full, positions)

    def _layers(self, params, h, lo, hi, view, cache, positions):
        model = self.bind(params)
        keys, values = [], []
        for i in range(lo, hi):
            with jax.named_scope(f"layer_{i}"):
                h, (k, v) = model.layers[i](h, view, None if cache is None else (cache.key[i], cache.value[i]))
            keys.append(k)
            values.append(v)
        return h, KVDelta(tuple(keys), tuple(values), positions)

    def join(self, below: KVDelta, above: KVDelta) -> KVDelta:
        """See `specjax.lm.LM.join`."""
        return KVDelta(below.key + above.key, below.value + above.value, below.positions)

    def embed(self, params: Any, tokens: Array) -> Array:
        """Scaled embeddings `[B, T, E]` of ids `[B, T]`, in float32. Ids outside the vocabulary are read as token 0."""
        table = params["embed"]["embedding"]
        return self._scaled(embedded(table, tokens, self.vocab_size), table.dtype)

    def soften(self, params: Any, log_probs: Array) -> Array:
        """See `specjax.diffusion.canvas.CanvasLM.soften`."""
        table = params["embed"]["embedding"]
        dist = jnp.exp(log_probs).astype(table.dtype)
        return self._scaled(jnp.einsum("btv,ve->bte", dist, table, preferred_element_type=jnp.float32), table.dtype)

    def _scaled(self, x, dtype):
        return x * jnp.asarray(self.config.hidden_size**0.5, dtype).astype(jnp.float32)

    def norm(self, params: Any, h: Array) -> Array:
        """The final norm."""
        return self.bind(params).norm(h)

    def unembed(self, params: Any, h: Array) -> Array:
        """Normed features `[B, T, E]` to soft-capped logits `[B, T, V]` in float32."""
        with jax.named_scope("head"):
            table, cap = params["embed"]["embedding"], self.config.final_logit_softcapping
            last = (((1,), (2,)), ((), ()))
            product = lambda h: jax.lax.dot_general(table, h, last, preferred_element_type=jnp.float32)
            logits = by_tensor_cores(product, h, table.dtype)
            return cap * jnp.tanh(jnp.moveaxis(logits, 0, 2) / cap)

    def init_cache(self, batch: int, capacity: int, dtype: Any = jnp.float32) -> KVCache:
        """An empty cache of `capacity` slots per row: `[B, K, S, H]` per layer, with that layer's K and H."""
        of = [self.config.heads(i) for i in range(self.num_layers)]
        make = lambda: tuple(jnp.zeros((batch, h.num_key_value_heads, capacity, h.head_dim), dtype) for h in of)
        return KVCache(make(), make())

    def states(self, cache: KVCache) -> tuple[()]:
        """See `specjax.lm.LM.states`: there are none."""
        return ()

    def with_states(self, cache: KVCache, states: Any) -> KVCache:
        """See `specjax.lm.LM.with_states`."""
        return cache

    def commit(
        self, cache: KVCache, delta: KVDelta, src: Array | None, dst: Array, counts: Array | None = None
    ) -> KVCache:
        """See `specjax.lm.LM.commit`."""
        return commit_kv(cache, delta, src, dst)

    def axes(self, params: Any) -> Any:
        """Logical axes of every parameter, by the name of the module that holds it."""
        return param_axes(params)

    def axis_counts(self) -> dict[str, int]:
        """The units into which an axis can be split, where they are not its size (whole heads), and the sizes of
        experts."""
        shared = math.gcd(self.config.sliding.num_key_value_heads, self.config.full.num_key_value_heads)
        return {"heads": self.config.num_attention_heads, "kv_heads": shared} | self.config.experts.axis_counts

    def cache_axes(self, cache: KVCache) -> KVCache:
        return kv_axes(cache)
