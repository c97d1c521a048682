"""Parameters kept as their file packs them: the words of `load`'s argument `weights`, and where the parts are
stored."""

import dataclasses
from typing import Any

import jax

from specjax.models.byte_ranges import Room, Source, Stack
from specjax.models.few_bits import is_quantised, plain
from specjax.models.formats import inputs_axis
from specjax.models.packed_matrix import Packed

PACKED, PLAIN = "packed", "plain"
"""The words for matrices as the file packs them, and for unpacked matrices."""
_CPU = (
    "packed weights take less memory, but on a CPU each matrix is widened before it is multiplied: a step is several times "
    "slower than with weights='plain'"
)
_SPLIT = (
    "a mesh of GPUs splits the packed matrices, and no kernel multiplies parts of them: each is widened in memory first; "
    "weights='plain' is faster where it fits"
)


def cost(backend: str, chips: int) -> str | None:
    """A warning if no kernel multiplies codes; None if one does, or if the compiler widens them during the product.

    Args:
      backend: JAX's backend.
      chips: the number of chips of the mesh.
    """
    return _CPU if backend == "cpu" else _SPLIT if backend == "gpu" and chips > 1 else None


@dataclasses.dataclass(frozen=True)
class LikeSource:
    """The source of `Packed.like`, a number that no file holds.

    Attributes:
      shape: of the array, all ones except for experts.
      dtype: its type; None: as the caller says.
    """

    shape: tuple[int, ...]
    dtype: Any = None

    def placed(self, dtype: Any, place: jax.sharding.Sharding | None) -> jax.Array:
        """The array; see `specjax.models.byte_ranges.place_one`."""
        room = Room(self.shape, dtype if self.dtype is None else self.dtype, place)
        for buffer in room.buffers.values():
            buffer[...] = 0
        return room.array()


def kept(sources: Any) -> Any:
    """Where parameters are stored, packed ones by their parts.

    Kernels of layers, the table of embeddings and the output head stay packed. Matrices of experts stay packed only if
    all experts are packed alike.

    Args:
      sources: what `specjax.models.weights.match` returned.
    """
    return jax.tree_util.tree_map_with_path(
        lambda path, one: one if inputs_axis(path, True) is None else _kept(one), sources
    )


def _kept(source: Source | Stack) -> Any:
    parts = source.parts if isinstance(source, Stack) else (source,)
    own = [
        jax.tree.map(lambda x, part=part: dataclasses.replace(x, transposed=part.transposed), part.tensor.packed)
        for part in parts
    ]
    if any(one is None for one in own) or len({_layout(one) for one in own}) > 1:
        return source
    like = LikeSource((*source.shape[:-2], 1, 1), source.dtype)
    if isinstance(source, Source):
        return dataclasses.replace(own[0], like=like)
    stacked = jax.tree.map(lambda *every: Stack(every, every[0].dtype), *own)
    return dataclasses.replace(stacked, like=like)


def _layout(packed: Packed) -> Any:
    """The properties that packed matrices must share for their parts to go into the same arrays."""
    leaves, tree = jax.tree.flatten(packed)
    return tree, tuple((leaf.shape, leaf.dtype) for leaf in leaves)


def any_packed(tree: Any) -> bool:
    """Whether a pytree like the parameters has a packed matrix."""
    return any(isinstance(x, Packed) for x in jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, Packed)))


def shapes(sources: Any, dtype: Any) -> Any:
    """The parameters as `ShapeDtypeStruct`s, from where they are stored."""
    one = lambda source: jax.ShapeDtypeStruct(source.shape, dtype if source.dtype is None else source.dtype)
    return jax.tree.map(one, sources)


def unpacked(params: Any) -> Any:
    """Parameters with packed matrices unpacked."""
    own = lambda x: plain(x) if isinstance(x, Packed) else x
    return jax.tree.map(own, params, is_leaf=is_quantised)
