"""A model that reads parameters of another library where they are: in that library's tree, names and layouts.

Every pass views the other tree as ours inside its program: arrays under other names, with axes merged, exchanged or
indexed. So training's arrays are those that are read, and new ones need neither a conversion nor another program.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax

from specjax.models.errors import ModelError
from specjax.models.jax_folders.part import Part
from specjax.models.jax_folders.recognised import NAMES, problems_of, recognised
from specjax.models.llama import LlamaLM
from specjax.models.model_config import ModelConfig
from specjax.models.weights import listed

PyTree = Any


@dataclasses.dataclass(frozen=True)
class Mapped:
    """An LM whose parameters are another tree, and which decodes as `lm` does with `of(params)`.

    Gradients with respect to the parameters are those of the other tree. On a mesh of specjax, its arrays lie whole on
    every device; without one, they stay where they are.

    Attributes:
      lm: the model that computes.
      of: a pure function from the other tree to the parameters of `lm`, as nested dicts or lists by the names of
        `lm.abstract()`, or as one dict with the names' parts joined by dots. Axes that are one in `lm`, such as heads and
        their channels, may be several beside each other. Pass the same function again, since programs are kept by it.

    Raises:
      ModelError: in the first pass, if a parameter is missing, misshapen or unknown.

    >>> from specjax.models import llama_config
    >>> own = LlamaLM(llama_config(24, 16, 24, 1, 2, 1, 8, tie_word_embeddings=True))
    >>> lm = Mapped(own, lambda theirs: {**theirs["rest"], "embed": {"embedding": theirs["table"].T}})
    >>> params = own.init(jax.random.key(0))
    >>> tokens = jax.numpy.asarray([[1, 2]])
    >>> lm.embed({"table": params.pop("embed")["embedding"].T, "rest": params}, tokens).shape
    (1, 2, 16)
    """

    lm: LlamaLM
    of: Callable[[PyTree], PyTree]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "init":  # whose parameters would be of the wrong tree
            raise AttributeError(f"Mapped has no {name}: its parameters are the other library's, and are made there")
        return getattr(self.lm, name)

    def ours(self, params: PyTree) -> PyTree:
        """The parameters of `lm`: views inside a program. Under `jax.jit` by itself it is a conversion, which copies what
        lies otherwise."""
        found = {name.replace("/", "."): x for name, x in named(self.of(params)).items()}
        leaves, tree = jax.tree_util.tree_flatten_with_path(self.lm.abstract())
        wanted = {".".join(str(key.key) for key in path): leaf.shape for path, leaf in leaves}
        problems = [f"missing {name} {list(shape)}" for name, shape in wanted.items() if name not in found]
        problems += [f"unknown {name} {list(x.shape)}" for name, x in found.items() if name not in wanted]
        problems += [
            f"{name} has shape {list(found[name].shape)}, the model says {list(shape)}"
            for name, shape in wanted.items()
            if name in found and not _merges(found[name].shape, shape)
        ]
        if problems:
            raise ModelError(f"the mapped parameters do not fit the model: {listed(problems)}")
        return jax.tree.unflatten(tree, [found[name].reshape(shape) for name, shape in wanted.items()])

    def __call__(self, params, block, cache, *, wants, draw=None, past=None, partial=None):
        return self.lm(self.ours(params), block, cache, wants=wants, draw=draw, past=past, partial=partial)

    def bind(self, params):
        """See `LlamaLM.bind`."""
        return self.lm.bind(self.ours(params))

    def embed(self, params, tokens):
        return self.lm.embed(self.ours(params), tokens)

    def layers(self, params, h, lo, hi, block, cache, past=None, skip=None, below=None, stale=None):
        return self.lm.layers(self.ours(params), h, lo, hi, block, cache, past, skip, below, stale)

    def values(self, params, h, layer):
        """See `LlamaLM.values`."""
        return self.lm.values(self.ours(params), h, layer)

    def norm(self, params, h):
        return self.lm.norm(self.ours(params), h)

    def unembed(self, params, h):
        return self.lm.unembed(self.ours(params), h)

    def encode(self, params, cache, source):
        return self.lm.encode(self.ours(params), cache, source)

    def reading(self, cache, capacity):
        return self.lm.reading(cache, capacity)

    def begin(self, params, cache, lengths):
        return self.lm.begin(params, cache, lengths)  # which reads no parameters

    def axes(self, params):
        """See `specjax.lm.LM.axes`: nothing is split."""
        return jax.tree.map(lambda leaf: (None,) * leaf.ndim, params)


@dataclasses.dataclass(frozen=True)
class View:
    """`Mapped.of` for a library whose names are known.

    Attributes:
      layout: the module of `specjax.models.jax_folders` that describes it.
      lm: the model that reads the view.
    """

    layout: Any
    lm: LlamaLM

    def __call__(self, params: PyTree) -> dict[str, Any]:
        found = recognised(named(params))
        if found is None or found[0] is not self.layout:
            raise ModelError(f"these are no parameters of {self.layout.NAME}: {listed(sorted(named(params))[:3])}")
        arrays = found[1]
        shapes = tuple((name, tuple(x.shape)) for name, x in arrays.items())
        return {name: part.take(arrays[part.name]) for name, part in _parts(self.layout, self.lm, shapes).items()}


def of_library(params: PyTree, config: ModelConfig) -> Mapped:
    """The LM that reads parameters of MaxText, Tunix or the library `gemma`.

    It goes with `params` and with all that have their shapes. Llama, Mistral, Mixtral, Qwen 2 and 3, and Gemma 1 to 3 are
    known, as each library has them.

    Args:
      params: the library's tree of parameters, such as `nnx.state(model, nnx.Param)` of Tunix. It may lie inside `params`, as
        in a training state of MaxText. Arrays may be of type `jax.ShapeDtypeStruct`.
      config: the model's, by a `config.json` of its family (`specjax.models.abstract(folder).lm.config`).

    Raises:
      ModelError: if the names are those of no library; and naming every array that is missing, misshapen or unknown.
    """
    found = recognised(named(params))
    if found is None:
        raise ModelError(
            f"these are parameters of no library of {NAMES} ({listed(sorted(named(params))[:3])}): write a function for "
            "`specjax.models.Mapped`"
        )
    lm = LlamaLM(found[0].as_stored(config))
    mapped = Mapped(lm, View(found[0], lm))
    jax.eval_shape(mapped.ours, params)
    return mapped


def named(tree: PyTree) -> dict[str, Any]:
    """The arrays of a tree by their paths, with parts joined by `/`; the box of an nnx variable is no part."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {"/".join(map(_part, path)).removesuffix("/value"): leaf for path, leaf in leaves}


def _part(key: Any) -> str:
    return str(next(getattr(key, kind) for kind in ("key", "idx", "name") if hasattr(key, kind)))


def _merges(theirs: tuple[int, ...], ours: tuple[int, ...]) -> bool:
    """Whether our axes are theirs, of which some that lie beside each other are merged.

    >>> _merges((16, 2, 8), (16, 16)), _merges((2, 16, 8), (16, 16)), _merges((16,), (16,))
    (True, False, True)
    """
    left = list(theirs)
    for size in ours:
        merged = 1
        while left and merged < size:
            merged *= left.pop(0)
        if merged != size:
            return False
    return all(size == 1 for size in left)


@functools.lru_cache(maxsize=64)
def _parts(layout: Any, lm: LlamaLM, shapes: tuple[tuple[str, tuple[int, ...]], ...]) -> dict[str, Part]:
    """Where each parameter of `lm` is among arrays of these shapes."""
    found, leaves = dict(shapes), jax.tree_util.tree_leaves_with_path(lm.abstract())
    wanted = {".".join(str(key.key) for key in path): leaf.shape for path, leaf in leaves}
    parts = layout.parts(found, wanted, lm.config)
    if problems := problems_of(layout, found, parts):
        raise ModelError(f"the parameters do not fit the config: {listed(problems)}")
    return parts
