"""XLNet (arXiv:1906.08237) under the any-subset contract: one pass of two streams gives distributions of positions,
given any others.

The content stream knows the token at a position. The query stream knows only the position, so a position's distribution
never sees its own token. Such a model, trained for any order, is an AS-ARM, with which ASSD drafts and verifies
(arXiv:2504.20456). In the shape descriptions `B` denotes rows, `L` positions, `K` positions that are asked, `E` the
width, `N` heads, `H` a head's width, `V` the vocabulary.
"""

import dataclasses
import math
import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.models import byte_ranges
from specjax.models.errors import ModelError
from specjax.models.fields import check_depth, check_fixed, is_id, is_size, positive, shown
from specjax.models.json_file import read_json
from specjax.models.tensors import Tensor, read_folder
from specjax.models.weights import listed

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


@dataclasses.dataclass(frozen=True)
class XlnetConfig:
    """Names follow `config.json`.

    Attributes:
      clamp_len: the bound at which distances are cut; 0: none.
    """

    vocab_size: int
    d_model: int
    n_layer: int
    n_head: int
    d_inner: int
    d_head: int
    layer_norm_eps: float = 1e-12
    clamp_len: int = 0


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

    def shapes(self) -> dict[str, Any]:
        """The parameters' shapes, under the names that `__call__` uses."""
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
        own = {"embed": table, "query": (1, 1, c.d_model), "head": {"weight": table, "bias": table[:1]}}
        return own | {"layers": [layer] * c.n_layer}

    def __call__(self, params: PyTree, tokens: Array, sees: Array, at: Array) -> Array:
        """Logits `[B, K, V]` in float32; see `AnySubset`."""
        size = tokens.shape[1]
        content = params["embed"].at[tokens].get(mode="clip")
        query = jnp.broadcast_to(params["query"], (*at.shape, self.config.d_model)).astype(content.dtype)
        places = jnp.broadcast_to(jnp.arange(size)[None], tokens.shape)
        itself = sees | jnp.eye(size, dtype=bool)[None]
        asked = jnp.take_along_axis(sees, at[:, :, None], axis=1)
        waves = self._waves(size).astype(content.dtype)
        for i, layer in enumerate(params["layers"]):
            with jax.named_scope(f"layer_{i}"):
                query, before = self._layer(layer, query, content, at, asked, waves), content
                if i + 1 < self.config.n_layer:  # nothing reads the last layer's content
                    content = self._layer(layer, before, before, places, itself, waves)
        with jax.named_scope("head"):
            logits = jnp.einsum("bke,ve->bkv", query, params["head"]["weight"], preferred_element_type=jnp.float32)
            return logits + params["head"]["bias"].astype(jnp.float32)[None, None]

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


def load(folder: str | os.PathLike[str], dtype: Any = jnp.float32) -> tuple[XlnetLM, PyTree]:
    """Reads a Hugging Face folder of `XLNetLMHeadModel`; the model and its parameters.

    Raises:
      ModelError: if it is not one, the folder is incomplete, or weights and `config.json` disagree.
    """
    folder = Path(folder)
    if not (folder / "config.json").is_file():
        raise ModelError(f"{folder} has no config.json; give a folder of an XLNetLMHeadModel")
    lm = XlnetLM(config_of(read_json(folder / "config.json")))
    return lm, byte_ranges.read(_sources(lm, read_folder(folder), jnp.dtype(dtype)), dtype)


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
    return XlnetConfig(**{name: fields[name] for name in _SIZES}, layer_norm_eps=eps, clamp_len=max(clamp, 0))


def _sources(lm: XlnetLM, tensors: dict[str, Tensor], dtype: Any) -> PyTree:
    """Where every parameter is stored; the head is the table if the folder stores only one."""
    tied = "lm_loss.weight" not in tensors
    problems, used = [], set()

    def source(path, shape):
        name = _stored_as(tuple(getattr(key, "key", getattr(key, "idx", None)) for key in path))
        name = "transformer.word_embedding.weight" if tied and name == "lm_loss.weight" else name
        used.add(name)
        if name not in tensors:
            problems.append(f"missing {name} {list(shape)}")
        elif tensors[name].shape != shape:
            problems.append(f"{name} has shape {list(tensors[name].shape)}, config.json says {list(shape)}")
        else:
            return byte_ranges.Source(tensors[name], False, dtype)
        return None

    is_shape = lambda node: isinstance(node, tuple)
    sources = jax.tree_util.tree_map_with_path(source, lm.shapes(), is_leaf=is_shape)
    spare = [name for name in tensors if name not in used and name.rpartition(".")[2] not in _SEGMENTS]
    problems += [f"unused {name} {list(tensors[name].shape)}" for name in spare]
    if problems:
        raise ModelError(f"the weights do not fit config.json: {listed(problems)}")
    return sources


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
