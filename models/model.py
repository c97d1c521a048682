"""A model as it was loaded, and conversions of its parameters, caches or sums to other types."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from specjax.models import formats, keeping
from specjax.models import masked as masked_config
from specjax.models.diffusion_gemma import DiffusionGemmaLM
from specjax.models.errors import ModelError
from specjax.models.few_bits import is_quantised
from specjax.models.kv_bits import CACHE_DTYPES
from specjax.models.llama import LlamaLM

NO_LIMIT = 2**31 - 1
_DTYPES = ("float32", "bfloat16", "float16")
LAYER_CAST = "layercast"
"""The type of parameters that are stored in bfloat16 and computed with in float32 (`LlamaLM.layer_cast`)."""


@dataclasses.dataclass(frozen=True)
class Model:
    """A model: what `load` returns, or your own, for which only the first two fields are required.

    Attributes:
      lm: the model as functions of `params`, a `specjax.lm.LM`.
      params: a pytree of arrays. `load` returns nested dicts, all in `dtype` except the biases of routers, which are
        float32.
      tokenizer: a transformers tokenizer, or None if the folder has none (ids still work).
      eos_ids: the ids that end a text, from `generation_config.json`, otherwise `config.json`, otherwise the tokenizer;
        may be empty.
      name: the name given to `load`, or the folder's name.
      path: the folder that was read.
      dtype: the type of the parameters.
      masked: its settings for diffusion, a `Canvas` if it has no mask token, `Gaps` for an any-subset model; None for an
        autoregressive model.
      dual: its settings for diffusion if it is a model of both kinds, autoregressive and diffusion
        (`Masked.causal_context`); otherwise None. Such a model has no `masked`, so it decodes autoregressively;
        `diffusing` is the same model for diffusion.
      longest: how many positions it was made for; None: as `lm.config` says, or unbounded.
      adapter: the folders of the LoRA adapters merged into its parameters, in their order.
      weights: the format of matrices kept in few bits, a line such as `"int4:group=32"`, or `"packed"`; None: all are
        plain.
      generation: the fields of `generation_config.json` about drawing texts (`specjax.models.generation`): defaults of
        a prompt's options, such as `repetition_penalty`, and fields that are not applied.
      starts: the ids with which the text of a decoder begins that has an encoder (`LM.encodes`); a user's prompt is
        then the encoder's source.
    """

    lm: Any
    params: Any
    tokenizer: Any = None
    eos_ids: tuple[int, ...] = ()
    name: str = "your model"
    path: Path | None = None
    dtype: Any = None
    masked: masked_config.Masked | None = None
    longest: int | None = None
    adapter: tuple[Path, ...] = ()
    weights: str | None = None
    generation: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    starts: tuple[int, ...] = ()
    dual: masked_config.Masked | None = None

    def __repr__(self) -> str:
        millions = sum(leaf.size for leaf in jax.tree.leaves(self.params, is_leaf=is_quantised)) / 1e6
        kind = "" if self.dtype is None else f", {self.dtype_name}"
        added = "" if self.weights is None else f", weights in {self.weights}"
        added += "" if self.cache_dtype is None else f", cache in {self.cache_dtype}"
        added += "".join(f", adapter {str(folder)!r}" for folder in self.adapter)
        return f"Model({self.name!r}, {type(self.lm).__name__}, {millions:.2f} M parameters{kind}{added})"

    @property
    def dtype_name(self) -> str:
        """The type that it computes with, by `load`'s name for it."""
        return LAYER_CAST if getattr(self.lm, "layer_cast", False) else jnp.dtype(self.dtype).name

    @property
    def cache_dtype(self) -> str | None:
        """The type of its caches, see `load`; None: the type of its parameters."""
        return getattr(self.lm, "cache_dtype", None)

    @property
    def reduce_dtype(self) -> str | None:
        """The type in which its products are summed over a mesh; see `load`. None: float32."""
        return getattr(self.lm, "reduce_dtype", None)

    @property
    def max_length(self) -> int:
        """The length of the longest text (prompt and output) in tokens."""
        config = getattr(self.lm, "config", None)
        return self.longest or getattr(config, "max_position_embeddings", NO_LIMIT)

    @property
    def abstract(self) -> bool:
        """Whether its parameters are shapes only (see `specjax.models.abstract`)."""
        return isinstance(jax.tree.leaves(self.params)[0], jax.ShapeDtypeStruct)

    @property
    def diffusing(self) -> "Model":
        """The model for diffusion: a model of both kinds in its diffusion mode, any other model as it is."""
        return self if self.dual is None else dataclasses.replace(self, masked=self.dual, dual=None)

    @property
    def canvas(self) -> masked_config.Canvas | None:
        """Its settings for diffusion if it has canvases of random tokens and no mask; otherwise None."""
        return self.masked if isinstance(self.masked, masked_config.Canvas) else None

    @property
    def any_subset(self) -> bool:
        """Whether it gives the distribution of every position given any others (`specjax.diffusion.AnySubset`)."""
        return isinstance(self.masked, masked_config.Gaps)

    @property
    def kind(self) -> str:
        """What an error calls it."""
        if self.masked is None:
            return "an autoregressive model"
        return "an any-subset model" if self.any_subset else "a diffusion model"


def resolve_dtype(dtype: Any = None) -> Any:
    """A parameter type; None is float32 on a CPU and bfloat16 elsewhere.

    Raises:
      ModelError: on any type except float32, bfloat16 and float16.
    """
    if dtype is None:
        return jnp.dtype("float32" if jax.default_backend() == "cpu" else "bfloat16")
    try:
        name = jnp.dtype(dtype).name
    except TypeError:
        name = None
    if name not in _DTYPES:
        raise ModelError(f"unknown dtype {dtype!r}; choose {', '.join(_DTYPES)}")
    return jnp.dtype(name)


def typed(lm: Any, dtype: Any) -> tuple[Any, Any]:
    """A model's functions and the type of its parameters, for a `dtype` of `load`."""
    if dtype == LAYER_CAST and not isinstance(lm, LlamaLM):
        raise ModelError(f"{LAYER_CAST} is for models of the Llama family, not for {type(lm).__name__}: choose float32")
    cast = dataclasses.replace(lm, layer_cast=dtype == LAYER_CAST) if isinstance(lm, LlamaLM) else lm
    return cast, resolve_dtype("bfloat16" if dtype == LAYER_CAST else dtype)


def retyped(model: Model, dtype: Any) -> Model:
    """A model with its parameters in another type.

    Args:
      model: with its parameters.
      dtype: see `load`.

    Raises:
      ModelError: see `load`.
    """
    lm, kind = typed(model.lm, dtype)
    cast = lambda x: x.astype(kind) if jnp.issubdtype(x.dtype, jnp.floating) else x
    params = model.params if kind == model.dtype else jax.tree.map(cast, model.params, is_leaf=is_quantised)
    return dataclasses.replace(model, lm=lm, params=params, dtype=kind)


def quantised(model: Model, weights: str | formats.Formats) -> Model:
    """A loaded model with its matrices converted to few bits; `load` does the same while it reads a folder.

    Args:
      model: with its parameters, plain.
      weights: see `load`.

    Raises:
      ModelError: see `load`; and if its matrices have few bits already.
    """
    if weights == keeping.PLAIN and model.weights in (None, keeping.PACKED):
        return dataclasses.replace(model, params=keeping.unpacked(model.params), weights=None)
    if weights == keeping.PACKED and model.weights == keeping.PACKED:
        return model
    if weights == keeping.PACKED:
        raise ModelError("weights='packed' is for a file: give load() the model's folder, not a loaded model")
    formats.check_plain(model.params, "are not put into another format")
    form = checked_format(weights, model.lm)
    assert form is not None, "a format was asked for"
    return dataclasses.replace(model, params=form.params(model.params), weights=str(form))


def cached(model: Model, cache_dtype: Any) -> Model:
    """A model with caches of another type; None: the type of its parameters.

    Args:
      model: with its parameters, or without.
      cache_dtype: see `load`.

    Raises:
      ModelError: see `load`.
    """
    if cache_dtype is None and model.cache_dtype is None:
        return model
    name = _cache_type(cache_dtype)
    if model.masked is not None or not isinstance(model.lm, LlamaLM):
        raise ModelError(
            f"cache_dtype {name!r} is for autoregressive models that load() reads, not for {model.name}, "
            f"{'a diffusion model' if model.masked else f'a {type(model.lm).__name__}'}: leave it out"
        )
    return dataclasses.replace(model, lm=dataclasses.replace(model.lm, cache_dtype=name))


def reduced(model: Model, reduce_dtype: Any) -> Model:
    """A model whose products are summed over a mesh in another type; None: float32.

    Args:
      model: with its parameters, or without.
      reduce_dtype: see `load`.

    Raises:
      ModelError: see `load`.
    """
    if reduce_dtype is None and model.reduce_dtype is None:
        return model
    try:
        name = None if reduce_dtype is None else resolve_dtype(reduce_dtype).name
    except ModelError as error:
        raise ModelError(str(error).replace("dtype", "reduce_dtype", 1)) from None
    if not isinstance(model.lm, LlamaLM):
        raise ModelError(
            f"reduce_dtype {name!r} is for models of the Llama family, not for {model.name}, a {type(model.lm).__name__}: "
            "leave it out"
        )
    return dataclasses.replace(model, lm=dataclasses.replace(model.lm, reduce_dtype=name))


def _cache_type(dtype: Any) -> str | None:
    try:
        name = None if dtype is None else jnp.dtype(dtype).name
    except TypeError:
        name = ""
    if name is not None and name not in CACHE_DTYPES:
        raise ModelError(f"unknown cache_dtype {dtype!r}; choose {', '.join(CACHE_DTYPES)}")
    return name


def checked_format(weights: Any, lm: Any) -> formats.Formats | None:
    """The format that a line names.

    Raises:
      ModelError: if the model cannot have it.
    """
    form = formats.read_format(weights)
    if form is not None and form.of_vocab and isinstance(lm, DiffusionGemmaLM):
        raise ModelError(
            "DiffusionGemma mixes the rows of its table, which stays plain: leave vocab=true out of weights"
        )
    if form is not None and not isinstance(lm, LlamaLM | DiffusionGemmaLM):
        raise ModelError(f"weights {str(form)!r} are for models that load() reads, not for {type(lm).__name__}")
    return form


def remade(model: Model, dtype: Any, weights: Any, cache_dtype: Any, reduce_dtype: Any) -> Model:
    """A model with parameters, caches and sums of other types."""
    model = model if dtype is None else retyped(model, dtype)
    model = model if weights is None else quantised(model, weights)
    model = model if cache_dtype is None else cached(model, cache_dtype)
    return model if reduce_dtype is None else reduced(model, reduce_dtype)
