"""Decoder-only transformers under the LM contract: Llama, Mistral, Qwen, Gemma and the others of docs/models.md.

A model is made of parts, which its `ModelConfig` lists layer by layer. A pass calls each part and knows no family. Each
family's differences are described in `specjax.models.families`.

Shapes: `B` rows, `T` block tokens, `S` cache slots, `E` width, `R` width of all residual streams (E if there is one), `K`
kv-heads, `H` head width, `V` vocabulary.
"""

import contextlib
import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from specjax.kernels.precision import by_tensor_cores
from specjax.kernels.tree_attention import Implementation
from specjax.lm import Block, Draw, Output, Partial, Source, Wants, inputs
from specjax.models.attention import AttentionConfig
from specjax.models.caches.base import Old, OldCache
from specjax.models.caches.prompt import PromptCache
from specjax.models.embedding import EmbeddingConfig, entered, positions_of
from specjax.models.encoder import EncoderConfig
from specjax.models.few_bits import dot, embedded, is_quantised, padded_rows, scores
from specjax.models.kept import Kept
from specjax.models.kv import KVCache, KVDelta, commit_kv, init_kv, kv_axes, seen_at, source_at
from specjax.models.kv_heads import copied
from specjax.models.layer_inputs import LayerInputs
from specjax.models.linear import Linear
from specjax.models.mixers import MixerConfig, SlotMixerConfig, committed
from specjax.models.model_config import ModelConfig
from specjax.models.param_axes import param_axes
from specjax.models.stack import abstract_stack
from specjax.models.streams import Streams
from specjax.sharding.ambient import split_tokens

Array = jax.Array


class Llama(nnx.Module):
    """The whole stack or, with `bare`, everything except its layers. `LlamaLM` splits it into a static graph and a
    params pytree."""

    def __init__(
        self, config: ModelConfig, dtype: Any, rngs: nnx.Rngs, kernel: Implementation | None = None, bare: bool = False
    ):
        c, size, inputs = config, config.hidden_size, config.embedding.layer_inputs
        table_width = c.embedding.width or size
        linear = functools.partial(Linear, param_dtype=dtype, dtype=dtype, rngs=rngs)
        self.embed = nnx.Embed(c.vocab_size, table_width, param_dtype=dtype, dtype=dtype, rngs=rngs)
        if table_width != size:
            self.project_in = linear(table_width, size, use_bias=False)
            self.project_out = linear(size, table_width, use_bias=False)
        if (table := positions_of(c.embedding, size, dtype, rngs)) is not None:
            self.positions = table
        if c.embedding.norm is not None:
            self.embed_norm = c.embedding.norm.build(size, dtype)
        self.layers = nnx.List([layer.build(size, dtype, rngs, kernel) for layer in (() if bare else c.layers)])
        if c.head.normed:
            self.norm = c.norm.build(size, dtype)
        if inputs is not None:
            self.layer_inputs = LayerInputs(inputs, c.num_hidden_layers, size, c.norm, dtype, rngs)
        if c.embedding.streams:
            self.streams = Streams(c.embedding.streams, size, dtype, rngs)
        if c.head.transform is not None:
            self.transform = c.head.transform.build(size, dtype, rngs)
        if c.encoder is not None:
            self.encoder = c.encoder.build(size, dtype, rngs, kernel)
        if c.distances is not None:
            self.distances = c.distances.build(dtype)
        if not c.head.tied:
            self.head = linear(table_width, c.vocab_size, use_bias=c.head.bias)
        elif c.head.bias:
            self.head = Bias(c.vocab_size, dtype)

    def entered(self, config: EmbeddingConfig, h: Array, positions: Array) -> Array:
        """The first layer's input `[B, T, R]`, from embeddings `h` `[B, T, E]` of tokens at `positions` `[B, T]`."""
        h = entered(self, config, h, positions)
        return self.streams.split(h) if config.streams else h

    def tables(self, mixer: MixerConfig, positions: Array, longest: int) -> Any:
        """What the layers of a mixer share in a pass: its own tables or, for scores by distance, the stack's."""
        by_distance = isinstance(mixer, AttentionConfig) and mixer.distances
        return self.distances() if by_distance else mixer.tables(positions, longest)


class Bias(nnx.Module):
    """The bias of a head whose matrix is the table of embeddings."""

    def __init__(self, size: int, dtype: Any):
        self.bias = nnx.Param(jnp.zeros((size,), dtype))


@functools.lru_cache(maxsize=64)
def _abstract(config: ModelConfig, dtype: Any, kernel: Implementation | None, reduce_dtype: str | None):
    """The graph of the stack, and its parameters as `ShapeDtypeStruct`s."""
    shell = lambda: Llama(config, dtype, nnx.Rngs(0), kernel, bare=True)

    def layer(kind):
        made = kind.build(config.hidden_size, dtype, nnx.Rngs(0), kernel)
        for product in () if reduce_dtype is None else made.split_products():
            product.reduce_dtype = reduce_dtype
        return made

    return nnx.split(abstract_stack(shell, layer, config.layers))


@dataclasses.dataclass(frozen=True)
class LlamaLM:
    """A transformer as a `specjax.lm.LM`: functions of a params pytree (nested dicts of arrays).

    Attributes:
      config: the model's parts.
      attention: the way to compute attention, see `implementation` of `specjax.kernels.tree_attention`.
      kv_copies: the number of copies of every kv-head, side by side in parameters and cache
        (`specjax.models.kv_heads`).
      layer_cast: whether everything except the stored parameters is float32 (LayerCast, Yuan et al. 2025,
        arXiv:2506.09501). Each weight is widened where it is used, inputs and cache are float32, and products have full
        precision.
      ahead: if given, layers with a window keep the window plus `ahead` tokens, in a ring
        (`specjax.models.kv.KVCache`). Callers may then write at most `ahead` tokens beyond the next one to be read, and
        never go back further. None: every layer keeps all tokens.
      cache_dtype: if given, the type of its caches, whatever type `init_cache` is asked for; one of
        `specjax.models.kv_bits.CACHE_DTYPES`.
      reduce_dtype: the type in which parts of the products of attention and MLPs (not experts) are summed over a mesh.
        `bfloat16` halves the exchange. None: float32.
      old: if given, how its caches keep older tokens (`specjax.models.caches`). It needs `ahead`, and plain
        attention; layers with a window keep that.
    """

    config: ModelConfig
    attention: Implementation | None = None
    kv_copies: int = 1
    layer_cast: bool = False
    ahead: int | None = None
    cache_dtype: str | None = None
    reduce_dtype: str | None = None
    old: Old | None = None

    def __post_init__(self):
        own, states = self.config.attentions, self.config.state_mixers
        reasons = {
            "no layer that sees the whole text": all(self.config.window(i) is not None for i in range(self.num_layers)),
            f"layers with {states[0].called if states else ''}": states,
            "layers without plain attention": len(own) < self.num_layers,
            "attention over a source": self.config.encoder is not None,
            "values of another width than keys": any(one.value_dim != one.head_dim for one in own),
        }
        what = next((reason for reason, has in reasons.items() if has), None)
        if self.old is not None and what is not None:
            raise ValueError(
                f"the cache {type(self.old).__name__} forgets, so what sees the whole text must do so by plain attention, and "
                f"this model has {what}: leave the cache out"
            )
        if self.old is not None:
            self.old.check(self.config)

    def _precisely(self) -> Any:
        return jax.default_matmul_precision("highest") if self.layer_cast else contextlib.nullcontext()

    @property
    def laid_out(self) -> ModelConfig:
        """The config with the copies of its kv-heads."""
        return _laid_out(self.config, self.kv_copies)

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
    def whole_blocks(self) -> int:
        """The number of tokens of which a pass must hold aligned whole blocks, since they choose experts together; 1: any."""
        experts = (layer.experts for layer in self.config.layers)
        return math.lcm(*(one.block_size for one in experts if one is not None and one.capacity))

    @property
    def reads_mixtures(self) -> bool:
        return self.config.embedding.layer_inputs is None  # those depend on tokens

    @property
    def reads_stale(self) -> bool:
        """Whether `layers` takes `stale`: the layers add their branches to one stream."""
        return not any(layer.streams or layer.normed_stream for layer in self.config.layers)

    def init(self, key: Array, dtype: Any = jnp.float32) -> Any:
        """Random parameters of the given type."""
        plain = nnx.to_pure_dict(nnx.split(Llama(self.config, dtype, nnx.Rngs(key)))[1])
        return copied(plain, self.config, self.kv_copies)

    def abstract(self, dtype: Any = jnp.float32) -> Any:
        """The params pytree, each leaf a `jax.ShapeDtypeStruct`."""
        return nnx.to_pure_dict(_abstract(self.laid_out, dtype, self.attention, self.reduce_dtype)[1])

    def bind(self, params: Any) -> Llama:
        """The nnx module that holds these parameters. Layers without parameters (`specjax.models.load(layers=False)`)
        hold shapes."""
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
            lo, h, delta = 0, inputs(self, params, block), KVDelta((), (), block.positions)
        else:
            lo, h, delta = partial.lo, partial.h, dataclasses.replace(partial.delta, positions=block.positions)
        hidden = {}
        stops = sorted({layer + 1 for layer in wants.hidden} | {self.num_layers})
        for stop in stops:
            if stop > lo:
                h, above = self.layers(params, h, lo, stop, block, cache, past, below=delta)
                delta, lo = self.join(delta, above), stop
            if stop - 1 in wants.hidden:
                hidden[stop - 1] = h[..., : self.config.hidden_size]
        logits = topk = drawn = None
        final = self.norm(params, h) if wants.final or wants.head else h
        if wants.head:
            logits = self.unembed(params, final)
            topk = jax.lax.top_k(logits, wants.topk) if wants.topk else None
            drawn = draw(logits) if wants.draw and draw is not None else None
        return Output(
            delta=delta,
            logits=logits if wants.logits else None,
            topk=topk,
            draw=drawn,
            hidden=hidden if wants.hidden else None,
            final=final if wants.final else None,
        )

    def embed(self, params: Any, tokens: Array) -> Array:
        """Embeddings `[B, T, E]` of ids `[B, T]`, in float32. Ids outside the vocabulary are read as token 0."""
        table = params["embed"]["embedding"]
        exact = self.layer_cast or self.config.embedding.exact
        scale = jnp.asarray(self.config.embedding.scale, jnp.float32 if exact else table.dtype)
        h = embedded(table, tokens, self.vocab_size) * scale.astype(jnp.float32)
        if self.config.embedding.width is None:
            return h
        with self._precisely():
            return dot(h, params["project_in"]["kernel"])

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
        stale: Array | None = None,
    ) -> tuple[Array, KVDelta]:
        """Runs layers `[lo, hi)` on `h` `[B, T, R]`; see `specjax.lm.LM.layers`.

        The input of layer 0 is that of `embed`, `[B, T, E]`. Learned positions and the norm of embeddings are applied here,
        and several residual streams are made here.

        `stale` `[B, T, R]` is a stream that the mixers of all these layers read, instead of each its own. Then no mixer waits
        for another layer. Branches are added to the true stream, layer by layer.

        Raises:
          ValueError: if one of them reads keys of a layer below `lo` and `below` is not given; or for `stale` if a
            layer has several residual streams, or adds its branches to their own inputs.
        """
        model, config = self.bind(params), self.laid_out
        if stale is not None and not self.reads_stale:
            raise ValueError(
                "layers of several residual streams, or whose inputs are their residual, read no stale stream"
            )
        if lo == 0:
            with self._precisely():
                h = model.entered(config.embedding, h, block.positions)
        tables: dict[Any, Any] = {}
        kinds = {layer.mixer: (type(layer.mixer), layer.mixer.reads) for layer in config.layers[lo:hi] if layer.mixer}
        for mixer, key in kinds.items():
            if key not in tables:
                tables[key] = model.tables(mixer, block.positions, config.max_position_embeddings)
        positions = block.positions
        if past is not None:
            positions = jnp.concatenate([past.positions, positions], axis=1)
        inputs = None
        if config.embedding.layer_inputs is not None:
            with self._precisely():
                inputs = model.layer_inputs(block.tokens, self.embed(params, block.tokens))
        own: dict[int, Any] = {} if below is None else self._by_layer(below)
        for i in range(lo, hi):
            layer, source, place = config.layers[i], config.source(i), config.places[i]
            if source < i and source not in own:
                raise ValueError(
                    f"layer {i} reads the keys of layer {source}: pass layers() the delta of the layers below as `below`"
                )
            with jax.named_scope(f"layer_{i}"), self._precisely():
                layer_cache = None if cache is None else layer.given(seen_at(cache, place, block.length))
                layer_past = None if past is None else layer.given(past.at(place))
                left_out = None if skip is None else skip[i]
                h = split_tokens(h) if block.split else h
                h, delta = model.layers[i](
                    h, None if layer.mixer is None else tables[kinds[layer.mixer]], block, layer_cache, layer_past, positions,
                    left_out, None if source == i else layer.given(own[source]), None if inputs is None else inputs[:, :, i],
                    source_at(cache, place), stale,
                )  # fmt: skip
                own[i] = layer.kept(delta)
        slots = [own[i].slots for i in config.owners if lo <= i < hi]
        keys, values, *queries = tuple(zip(*slots, strict=True)) or ((), ())
        asked = queries[0] if queries else ()
        states = tuple(own[i].state for i in range(lo, hi) if config.places[i].state is not None)
        return h, KVDelta(keys, values, block.positions, asked, states)

    def _by_layer(self, delta: KVDelta) -> dict[int, Kept]:
        """The keys and values of a delta by layer, from the first; layers that read another layer's are left out."""
        pairs = zip(delta.key, delta.value, strict=True)
        return {i: Kept(pair) for i, pair in zip(self.config.owners, pairs, strict=False)}

    def values(self, params: Any, h: Array, layer: int) -> Array:
        """The values `[B, T, K, H]` of a layer, from the residual stream `[B, T, E]` that enters it.

        Raises:
          ValueError: if there are several streams, of which a layer predicts the one that it reads.
        """
        if self.config.embedding.streams:
            raise ValueError(
                "a layer of several residual streams (AltUp) is not read by its values: take another cache"
            )
        entered = self.bind(params).layers[layer]
        return entered.mixer.values(entered.entered(h))

    def join(self, below: KVDelta, above: KVDelta) -> KVDelta:
        """See `specjax.lm.LM.join`."""
        both = {name: getattr(below, name) + getattr(above, name) for name in ("key", "value", "query", "states")}
        return dataclasses.replace(below, **both)

    def norm(self, params: Any, h: Array) -> Array:
        """The final norm `[B, T, E]` of the residual stream `[B, T, R]`, and what the head has before its matrix."""
        model, head = self.bind(params), self.config.head
        with self._precisely():
            h = model.streams.joined(h) if self.config.embedding.streams else h
            h = model.norm(h) if head.normed else h
            return h if head.transform is None else model.transform(h)

    def unembed(self, params: Any, h: Array) -> Array:
        """Normed features `[B, T, E]` to logits `[B, T, V]` in float32."""
        with jax.named_scope("head"), self._precisely():
            head, tied = self.config.head, self.config.head.tied
            table = params["embed"]["embedding"]
            h = h if self.config.embedding.width is None else dot(h, params["project_out"]["kernel"])
            if tied and not is_quantised(table):
                last = (((1,), (2,)), ((), ()))
                product = lambda h: jax.lax.dot_general(table, h, last, preferred_element_type=jnp.float32)
                by_table = lambda h: jnp.moveaxis(by_tensor_cores(product, h, table.dtype), 0, 2)
                logits = padded_rows(by_table, h)
            else:
                logits = scores(h, table.T if tied else params["head"]["kernel"])
            logits = logits if head.logits_scaling == 1 else logits / head.logits_scaling
            if head.bias:
                logits = logits + params["head"]["bias"].astype(jnp.float32)[None, None]
            return logits if head.soft_cap is None else head.soft_cap * jnp.tanh(logits / head.soft_cap)

    def init_cache(self, batch: int, capacity: int, dtype: Any = jnp.float32) -> KVCache | OldCache:
        """An empty cache of `capacity` slots per row."""
        kind = self.cache_dtype or (jnp.float32 if self.layer_cast else dtype)
        if self.old is not None:
            return OldCache.empty(self.old, self.laid_out, batch, capacity, kind, self.ahead)
        return init_kv(self.laid_out, batch, capacity, kind, self.ahead)

    @property
    def encodes(self) -> bool:
        return self.config.encoder is not None

    @property
    def source_vocab_size(self) -> int:
        """The number of tokens that its encoder knows; 0: it has none, or reads frames."""
        encoder = self.config.encoder
        return 0 if encoder is None or encoder.frames is not None else encoder.embedding.vocab_size

    @property
    def source_features(self) -> int:
        """How many features a frame of its sources has; 0: it reads no frames."""
        encoder = self.config.encoder
        return 0 if encoder is None or encoder.frames is None else encoder.frames.features

    @property
    def source_frames(self) -> int:
        """How many frames a source has; 0: it reads no frames."""
        encoder = self.config.encoder
        return 0 if encoder is None or encoder.frames is None else 2 * encoder.frames.slots

    @property
    def source_longest(self) -> int:
        """The most tokens of a source; 0: any number."""
        return 0 if self.config.encoder is None else self.config.encoder.longest or 0

    def encode(self, params: Any, cache: KVCache, source: Source) -> KVCache:
        """See `specjax.lm.LM.encode`.

        Raises:
          ValueError: if there is no encoder, or the source has more slots than the cache has for it.
        """
        encoder, kept = self.config.encoder, cache.source
        if encoder is None or kept is None:
            raise ValueError("this model has no encoder: leave the source out")
        model, slots = self.bind(params), kept.key[0].shape[2]
        with jax.named_scope("encoder"), self._precisely():
            states, lengths = model.encoder(source, functools.partial(self._embed_source, encoder, params))
            if states.shape[1] > slots:
                raise ValueError(f"the source has {states.shape[1]} slots, and the cache has room for {slots}")
            pairs = [layer.cross.slots(states) for layer in model.layers if layer.config.cross is not None]
        tokens = source.inputs if encoder.frames is None else None
        return dataclasses.replace(cache, source=kept.filled(pairs, lengths, tokens))

    def source(self, cache: KVCache) -> Array | None:
        """See `specjax.lm.LM.source`."""
        return None if cache.source is None else cache.source.tokens

    def _embed_source(self, encoder: EncoderConfig, params: Any, tokens: Array) -> Array:
        own = encoder.embedding
        table = params["embed"] if encoder.shared else params["encoder"]["embed"]
        h = embedded(table["embedding"], tokens, own.vocab_size)
        return h * jnp.asarray(own.scale, jnp.float32)

    def reading(self, cache: Any, capacity: int) -> Any:
        """See `specjax.lm.LM.reading`."""
        return PromptCache.empty(cache, capacity) if isinstance(cache, OldCache) else cache

    def begin(self, params: Any, cache: Any, lengths: Array) -> Any:
        """See `specjax.lm.LM.begin`. The cache is returned unchanged, unless it forgets; then older tokens of the prompt
        are folded."""
        return cache.folded(lengths - 1) if isinstance(cache, PromptCache) else cache

    def commit(self, cache: Any, delta: KVDelta, src: Array | None, dst: Array, counts: Array | None = None) -> Any:
        """See `specjax.lm.LM.commit`."""
        if isinstance(cache, OldCache):
            return cache.commit(delta, src, dst)
        if isinstance(cache, PromptCache):
            return cache.commit(delta, src, dst, counts)
        of_each = zip(self.config.state_mixers, cache.states, delta.states, strict=True)
        states = tuple(committed(mixer, state, own, src, dst, counts) for mixer, state, own in of_each)
        return dataclasses.replace(commit_kv(cache, delta, src, dst), states=states)

    def states(self, cache: Any) -> tuple[Any, ...]:
        """See `specjax.lm.LM.states`."""
        return cache.states if isinstance(cache, KVCache) else ()

    def with_states(self, cache: Any, states: tuple[Any, ...]) -> Any:
        """See `specjax.lm.LM.with_states`."""
        return dataclasses.replace(cache, states=states) if isinstance(cache, KVCache) else cache

    def axes(self, params: Any) -> Any:
        """Logical axes of every parameter, by the name of the module that holds it."""
        return param_axes(params)

    def axis_counts(self) -> dict[str, int]:
        """The units into which an axis can be split, where they are not its size (whole heads), and the sizes of
        experts."""
        counts = self.laid_out.head_counts
        heads, shared = math.gcd(*(one for one, _ in counts)), math.gcd(*(own for _, own in counts))
        experts = self.config.experts.axis_counts if self.config.experts else {}
        states = math.gcd(*(one.heads for one in self.config.state_mixers))
        return {"heads": heads, "kv_heads": shared, "state_heads": states} | experts

    def cache_axes(self, cache: Any) -> Any:
        return cache.axes() if isinstance(cache, (OldCache, PromptCache)) else kv_axes(cache, self.config)


@functools.lru_cache(maxsize=64)
def _laid_out(config: ModelConfig, copies: int) -> ModelConfig:
    wide = lambda one: dataclasses.replace(one, num_key_value_heads=one.num_key_value_heads * copies)
    return config if copies == 1 else config.mapped(SlotMixerConfig, wide)
