"""XLNet (arXiv:1906.08237) under the any-subset contract: one pass of two streams gives distributions of positions,
given any others.

The content stream knows the token at a position. The query stream knows only the position, so a position's distribution
never sees its own token. Such a model, trained for any order, is an AS-ARM, with which ASSD drafts and verifies
(arXiv:2504.20456). In the shape descriptions `B` denotes rows, `L` positions, `K` positions that are asked, `E` the
width, `N` heads, `H` a head's width, `V` the vocabulary.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.models.byte_ranges import equal
from specjax.models.errors import ModelError
from specjax.models.fields import check_depth, check_fixed, is_id, is_size, positive, shown
from specjax.models.masked import Gaps
from specjax.models.tensors import Tensor

Array = jax.Array
PyTree = Any

UNSEEN = 1e30
"""The amount subtracted from the score of a token that a position does not see."""
_SIZES = ("vocab_size", "d_model", "n_layer", "n_head", "d_inner", "d_head")
_DEFAULTS = {"vocab_size": 32000, "d_model": 1024, "n_layer": 24, "n_head": 16, "d_inner": 4096}
_OTHERS = {"hidden_size": "d_model", "num_attention_heads": "n_head", "num_hidden_layers": "n_layer"}
_FIXED = {"attn_type": ("bi",), "bi_data": (False,), "ff_activation": ("gelu",)}
_SEGMENTS = ("r_s_bias", "seg_embed")
"""Tensors for two texts in one input. They are not read, since there is only one text."""
_HEAD, _TABLE = "lm_loss.weight", "transformer.word_embedding.weight"
_SPREAD = 0.02
"""The standard deviation of new weights, `initializer_range` of transformers."""


@dataclasses.dataclass(frozen=True)
class XlnetConfig:
    """Names follow `config.json`.

    Attributes:
      clamp_len: the bound at which distances are cut; 0: none.
      tied: whether the head is the table of embeddings.
    """

    vocab_size: int
    d_model: int
    n_layer: int
    n_head: int
    d_inner: int
    d_head: int
    layer_norm_eps: float = 1e-12
    clamp_len: int = 0
    tied: bool = True

    @property
    def max_position_embeddings(self) -> int:
        """Positions are distances, so there is no bound."""
        return 2**31 - 1


@dataclasses.dataclass(frozen=True)
class XlnetLM:
    """An any-subset model (`specjax.diffusion.assd.AnySubset`). Static and hashable.

    A position must see everything that the positions it sees can see; otherwise its distribution depends on other
    tokens too. ASSD's orders fulfil this. As in `transformers`, a position that sees nothing has no proper
    distribution.
    """

    config: XlnetConfig

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @property
    def num_layers(self) -> int:
        return self.config.n_layer

    def shapes(self) -> dict[str, Any]:
        """The parameters' shapes, under the names that a pass uses."""
        c = self.config
        heads = (c.d_model, c.n_head, c.d_head)
        norm = {"weight": (c.d_model,), "bias": (c.d_model,)}
        layer = {
            **dict.fromkeys(("q", "k", "v", "o", "r"), heads),
            **dict.fromkeys(("r_r_bias", "r_w_bias"), heads[1:]),
            "norm": norm,
            "up": {"weight": (c.d_inner, c.d_model), "bias": (c.d_inner,)},
            "down": {"weight": (c.d_model, c.d_inner), "bias": (c.d_model,)},
            "ff_norm": norm,
        }
        table = (c.vocab_size, c.d_model)
        head = {"bias": table[:1]} if c.tied else {"weight": table, "bias": table[:1]}
        own = {"embed": table, "query": (1, 1, c.d_model), "head": head}
        return own | {"layers": dict.fromkeys(range(c.n_layer), layer)}

    def abstract(self, dtype: Any = jnp.float32) -> PyTree:
        """The parameters' shapes and types."""
        return _over(lambda path, shape: jax.ShapeDtypeStruct(shape, dtype), self.shapes())

    def init(self, key: Array, dtype: Any = jnp.float32) -> PyTree:
        """New parameters, as `transformers` draws them."""
        count = iter(range(len(jax.tree.leaves(self.abstract()))))

        def drawn(path, shape):
            own = jax.random.fold_in(key, next(count))
            module, name = path[-2] if len(path) > 1 else "", path[-1]
            if name in ("weight", "bias") and (name == "bias" or module in ("norm", "ff_norm")):
                return jnp.full(shape, float(name == "weight"), dtype)
            return (_SPREAD * jax.random.normal(own, shape)).astype(dtype)

        return _over(drawn, self.shapes())

    def axes(self, params: PyTree) -> PyTree:
        """Logical axis names of every parameter; none is split."""
        return jax.tree.map(lambda x: (None,) * len(x.shape), params)

    def axis_counts(self) -> dict[str, int]:
        """See `specjax.sharding.rules.shardings`; there are no heads to keep whole."""
        return {}

    def __call__(self, params: PyTree, tokens: Array, sees: Array, at: Array) -> Array:
        """Logits `[B, K, V]` in float32; see `AnySubset`."""
        return self.unembed(params, self.read(params, tokens, sees, at))

    def read(self, params: PyTree, tokens: Array, sees: Array, at: Array) -> Array:
        """The query stream `[B, K, E]` after all layers; see `AnySubset`."""
        size = tokens.shape[1]
        content = params["embed"].at[tokens].get(mode="clip")
        query = jnp.broadcast_to(params["query"], (*at.shape, self.config.d_model)).astype(content.dtype)
        places = jnp.broadcast_to(jnp.arange(size)[None], tokens.shape)
        itself = sees | jnp.eye(size, dtype=bool)[None]
        asked = jnp.take_along_axis(sees, at[:, :, None], axis=1)
        waves = self._waves(size).astype(content.dtype)
        for i in range(self.config.n_layer):
            layer = params["layers"][i]
            with jax.named_scope(f"layer_{i}"):
                query, before = self._layer(layer, query, content, at, asked, waves), content
                if i + 1 < self.config.n_layer:  # nothing reads the last layer's content
                    content = self._layer(layer, before, before, places, itself, waves)
        return query

    def unembed(self, params: PyTree, h: Array) -> Array:
        """Logits `[..., V]` in float32 of vectors `[..., E]`."""
        with jax.named_scope("head"):
            table = params["embed"] if self.config.tied else params["head"]["weight"]
            logits = jnp.einsum("...e,ve->...v", h, table, preferred_element_type=jnp.float32)
            return logits + params["head"]["bias"].astype(jnp.float32).reshape((1,) * (h.ndim - 1) + (-1,))

    def _layer(self, own, h, content, at, sees, waves):
        """One stream `[B, Q, E]` at the positions `at` `[B, Q]`, over the content that they see `[B, Q, L]`."""
        heads = lambda x, name: jnp.einsum("...e,enh->...nh", x, own[name])
        q, k, v, r = heads(h, "q"), heads(content, "k"), heads(content, "v"), heads(waves, "r")
        size = content.shape[1]
        near = jnp.einsum("bqnh,lnh->bnql", q + own["r_r_bias"][None, None], r)
        distance = at[:, :, None] - jnp.arange(size)[None, None] + size - 1  # of the first of the waves: 1 - size
        near = jnp.take_along_axis(near, distance[:, None], axis=3)
        scores = jnp.einsum("bqnh,blnh->bnql", q + own["r_w_bias"][None, None], k) + near
        scores = scores.astype(jnp.float32) / math.sqrt(self.config.d_head)
        weights = jax.nn.softmax(jnp.where(sees[:, None], scores, scores - UNSEEN), axis=-1).astype(v.dtype)
        mixed = jnp.einsum("bnql,blnh->bqnh", weights, v)
        h = self._norm(h + jnp.einsum("bqnh,enh->bqe", mixed, own["o"]), own["norm"])
        inner = jax.nn.gelu(h @ own["up"]["weight"].T + own["up"]["bias"][None, None], approximate=False)
        return self._norm(h + inner @ own["down"]["weight"].T + own["down"]["bias"][None, None], own["ff_norm"])

    def _norm(self, x, own):
        wide = x.astype(jnp.float32)
        wide = wide - wide.mean(axis=-1, keepdims=True)
        wide = wide * jax.lax.rsqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + self.config.layer_norm_eps)
        return wide.astype(x.dtype) * own["weight"][None, None] + own["bias"][None, None]

    def _waves(self, size):
        """Sines and cosines `[2L - 1, E]` of the distances from 1 - L to L - 1."""
        width, most = self.config.d_model, self.config.clamp_len or size
        distance = np.clip(np.arange(1 - size, size), -most, most)
        angles = distance[:, None] / 10000 ** (np.arange(0, width, 2) / width)
        return jnp.asarray(np.concatenate([np.sin(angles), np.cos(angles)], axis=1), jnp.float32)


def describes(raw: dict[str, Any]) -> bool:
    """Whether a parsed `config.json` is of an XLNet model."""
    return raw.get("model_type") == "xlnet"


def config_of(raw: dict[str, Any]) -> XlnetConfig:
    """The config of a parsed `config.json`.

    Raises:
      ModelError: on another model's config, and on fields that are missing, wrong or unsupported.
    """
    if raw.get("model_type") != "xlnet":
        raise ModelError(f"config.json is of a model {shown(raw.get('model_type'))}, not xlnet")
    check_fixed(raw, _FIXED, "XLNet")
    fields = _DEFAULTS | {_OTHERS.get(name, name): value for name, value in raw.items() if value is not None}
    if is_size(fields["d_model"]) and is_size(fields["n_head"]):
        fields.setdefault("d_head", fields["d_model"] // fields["n_head"])
    if wrong := [name for name in _SIZES if not is_size(fields.get(name))]:
        raise ModelError(f"config.json needs positive integers for: {', '.join(wrong)}")
    check_depth(fields["n_layer"])
    if fields["d_model"] % 2:
        raise ModelError(f"config.json: d_model must be even, got {fields['d_model']}")
    clamp = fields.get("clamp_len", -1)
    if clamp != -1 and not is_id(clamp):
        raise ModelError(f"config.json: clamp_len must be an integer of at least -1, not {shown(clamp)}")
    eps = positive("layer_norm_eps", fields.get("layer_norm_eps", 1e-12))
    tied = fields.get("tie_word_embeddings", True)
    if not isinstance(tied, bool):
        raise ModelError(f"config.json: tie_word_embeddings must be true or false, not {shown(tied)}")
    sizes = {name: fields[name] for name in _SIZES}
    return XlnetConfig(**sizes, layer_norm_eps=eps, clamp_len=max(clamp, 0), tied=tied)


def gaps_of(raw: dict[str, Any], own_mask: Callable[[], int | None]) -> Gaps:
    """How open positions are written in its prompts: by the token that `config.json` or the tokenizer calls the mask.

    Raises:
      ModelError: for a mask outside the vocabulary.
    """
    mask = raw.get("mask_token_id")
    mask = own_mask() if mask is None else mask
    if mask is not None and not (is_id(mask) and mask < config_of(raw).vocab_size):
        raise ModelError(f"config.json: mask_token_id must be a token of the vocabulary, not {shown(mask)}")
    return Gaps(-1 if mask is None else mask, False)


def to_hf(config: XlnetConfig, gaps: Gaps) -> dict[str, Any]:
    """The `config.json` of a model; `transformers` reads it too."""
    sizes = {name: getattr(config, name) for name in _SIZES}
    fixed = {name: allowed[0] for name, allowed in _FIXED.items()}
    own = {"architectures": ["XLNetLMHeadModel"], "model_type": "xlnet", "untie_r": True}
    more = {"layer_norm_eps": config.layer_norm_eps, "clamp_len": config.clamp_len or -1}
    mask = {} if gaps.mask_id < 0 else {"mask_token_id": gaps.mask_id}
    return own | sizes | fixed | more | {"tie_word_embeddings": config.tied} | mask


def with_own_head(lm: XlnetLM, tensors: dict[str, Tensor]) -> XlnetLM:
    """The model, untied if its folder stores a head that differs from the table, and tied if it stores none."""
    same = _HEAD not in tensors or (_TABLE in tensors and equal(tensors[_HEAD], tensors[_TABLE]))
    return dataclasses.replace(lm, config=dataclasses.replace(lm.config, tied=same))


def read_tensors(lm: XlnetLM, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors that a pass reads: without the segments', and without the second copy of a tied table."""
    twice = (_HEAD,) if lm.config.tied else ()
    return {name: x for name, x in tensors.items() if name not in twice and name.rpartition(".")[2] not in _SEGMENTS}


def hf_name(path: tuple[Any, ...]) -> tuple[str, bool]:
    """The Hugging Face name of a parameter, and whether it is stored transposed, which none is."""
    return _stored_as(tuple(getattr(key, "key", key) for key in path)), False


def _stored_as(path: tuple[Any, ...]) -> str:
    """The name in a Hugging Face folder.

    >>> _stored_as(("layers", 3, "norm", "bias"))
    'transformer.layer.3.rel_attn.layer_norm.bias'
    """
    if path[0] != "layers":
        first = {"embed": "transformer.word_embedding.weight", "query": "transformer.mask_emb", "head": "lm_loss"}
        return ".".join((first[path[0]], *path[1:]))
    parts = {"norm": "rel_attn.layer_norm", "up": "ff.layer_1", "down": "ff.layer_2", "ff_norm": "ff.layer_norm"}
    own = parts.get(path[2], f"rel_attn.{path[2]}")
    return ".".join((f"transformer.layer.{path[1]}", own, *path[3:]))


def _over(make: Callable[[tuple[Any, ...], tuple[int, ...]], Any], shapes: PyTree) -> PyTree:
    """A tree like `shapes`, made from every path and shape."""
    keys = lambda path: tuple(key.key for key in path)
    is_shape = lambda node: isinstance(node, tuple)
    return jax.tree_util.tree_map_with_path(lambda path, shape: make(keys(path), shape), shapes, is_leaf=is_shape)
