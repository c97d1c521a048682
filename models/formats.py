"""Formats that keep a model's matrices in few bits, and the conversion of matrices into them.

The numbers of an output, or of a group of its inputs, share a scale. Their greatest magnitude decides it, as in qwix
(github.com/google/qwix): `scale = max|w| / most`, rounded to the type of the parameters. The stored values are
`round(w / scale)`.

For integers, `most` is the largest integer plus a half, so that the bucket of the largest is as wide as the others. For
float8 it is the largest number. DFloat11 is bfloat16 without loss.

A file may name a format for each matrix (`PerMatrix`), as EvoPress does (arXiv:2410.14649).
"""

import abc
import dataclasses
import functools
import hashlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from specjax.models import dfloat11, quantising
from specjax.models.byte_ranges import Source, Stack, place_one
from specjax.models.errors import ModelError
from specjax.models.few_bits import Quantised, is_quantised
from specjax.models.hobbit import hosted
from specjax.models.hobbit.tiers import Tiered, Tiers
from specjax.models.weights import hf_name, listed

USUAL, SHORTEST = 128, 16
"""Inputs of a group where none are asked for: at most, and at least."""
_LEAST = float(np.sqrt(np.finfo(np.float32).tiny))  # numbers with a smaller scale count as zeros
_FP8 = np.dtype(ml_dtypes.float8_e4m3fn)


class Formats(abc.ABC):
    """Which format each matrix of a model has."""

    @abc.abstractmethod
    def of(self, path: tuple[Any, ...]) -> "tuple[Format, int] | None":
        """The format of the parameter at this path, and the axis of its inputs, counted from the end; None: it stays
        plain."""

    @property
    @abc.abstractmethod
    def of_vocab(self) -> bool:
        """Whether the table of embeddings or the output head has a format too."""

    def check(self, shapes: Any) -> None:
        """Checks that the formats can hold all matrices.

        Raises:
          ModelError: naming matrices whose inputs the groups do not divide, and a group size that does.
        """
        held: dict[Format, list[tuple[str, int]]] = {}
        for path, leaf in jax.tree_util.tree_leaves_with_path(shapes):
            if (own := self.of(path)) is not None:
                held.setdefault(own[0], []).append((_name(path), leaf.shape[own[1]]))
        for form, inputs in held.items():
            form.check_groups(inputs)

    @property
    def one_device(self) -> bool:
        """Whether no mesh can hold matrices in these formats."""
        return False

    def check_mesh(self, mesh: Any) -> None:
        """Raises ModelError if a mesh (None: there is none) cannot hold matrices in these formats."""
        if mesh is not None and self.one_device:
            raise ModelError(f"weights {str(self)!r} are for one device: leave the mesh out")

    def shapes(self, shapes: Any) -> Any:
        """A params pytree of `ShapeDtypeStruct`s, converted to these formats.

        Raises:
          ModelError: see `check`.
        """
        self.check(shapes)
        return self._each(lambda form, leaf, axis: form.shape(leaf, axis), shapes)

    def params(self, params: Any) -> Any:
        """Plain parameters converted to these formats, on the devices that hold them.

        Raises:
          ModelError: see `check` and `Format.leaf`.
        """
        self.check(params)
        return self._each(lambda form, leaf, axis: form.leaf(leaf, axis), params)

    def sources(self, sources: Any) -> Any:
        """Where parameters are stored, with those that are converted as they are read; see
        `specjax.models.byte_ranges.read`."""
        return self._each(lambda form, source, axis: form.source(source, axis), sources)

    def _each(self, change: "Callable[[Format, Any, int], Any]", tree: Any) -> Any:
        """A pytree like the parameters, with `change(format, leaf, axis)` for those that have a format."""

        def one(path, leaf):
            own = self.of(path)
            return leaf if own is None else change(own[0], leaf, own[1])

        return jax.tree_util.tree_map_with_path(one, tree)


@dataclasses.dataclass(frozen=True)
class Format(Formats):
    """A format, which all matrices have.

    Attributes:
      name: the format's name.
      group: how many inputs of an output share a scale, or form one run of codes; 0: all of them; None: 128, or the most below
        that divide a matrix's inputs.
      vocab: whether the table of embeddings and the output head have the format too.
    """

    name: str
    group: int | None = 0
    vocab: bool = False

    def __str__(self) -> str:
        usual, fields = FORMATS[self.name], {field: getattr(self, field) for field in self.settings}
        changed = (f"{field}={value}".lower() for field, value in fields.items() if value != getattr(usual, field))
        return ":".join(part for part in (self.name, ",".join(changed)) if part)

    @property
    def settings(self) -> dict[str, Callable[[str], Any]]:
        """What a line may say after the name, with the reader of each word; readers raise KeyError or ValueError."""
        return {"group": _count, "vocab": _SWITCH.__getitem__}

    def of(self, path: tuple[Any, ...]) -> "tuple[Format, int] | None":
        """See `Formats.of` and `inputs_axis`."""
        axis = inputs_axis(path, self.vocab)
        return None if axis is None else (self, axis)

    @property
    def of_vocab(self) -> bool:
        return self.vocab

    def size(self, inputs: int) -> int:
        """How many of so many inputs form a group."""
        if self.group is None:
            return max(size for size in range(1, min(USUAL, inputs) + 1) if inputs % size == 0)
        return self.group or inputs

    def groups(self, inputs: int) -> int:
        """The number of groups of so many inputs."""
        return inputs // self.size(inputs)

    def grouped(self, shape: tuple[int, ...], axis: int) -> tuple[int, ...]:
        """A matrix's shape with the number of groups in place of the inputs."""
        at = len(shape) + axis
        return (*shape[:at], self.groups(shape[at]), *shape[at + 1 :])

    @abc.abstractmethod
    def shape(self, leaf: jax.ShapeDtypeStruct, axis: int) -> Any:
        """The leaf for a matrix in this format, as `ShapeDtypeStruct`s."""

    @abc.abstractmethod
    def leaf(self, x: Any, axis: int) -> Any:
        """The leaf for a given matrix in this format.

        Raises:
          ModelError: if the format cannot hold it.
        """

    @abc.abstractmethod
    def source(self, source: Source | Stack, axis: int) -> Any:
        """The source that reads a matrix into its leaf; see `specjax.models.byte_ranges.read`."""

    def check_groups(self, inputs: list[tuple[str, int]]) -> None:
        """Checks matrices, by their names and how many inputs they have; see `check`."""
        sizes: dict[int, list[str]] = {}
        for name, count in inputs:
            sizes.setdefault(count, []).append(name)
        least = min([SHORTEST, *sizes]) if self.group is None else 1
        odd = [inputs for inputs in sizes if inputs % self.size(inputs) or self.size(inputs) < least]
        if odd:
            which = listed([f"{len(sizes[inputs])} with {inputs} inputs, such as {sizes[inputs][0]}" for inputs in odd])
            what = f"{self.group} inputs" if self.group else f"{SHORTEST} to {USUAL} inputs"
            fits = max(size for size in range(1, self.group or USUAL) if not any(inputs % size for inputs in sizes))
            fits = fits if fits >= SHORTEST or self.group else 0
            raise ModelError(f"groups of {what} do not divide every matrix ({which}): give {self.name}:group={fits}")


@dataclasses.dataclass(frozen=True)
class Scaled(Format):
    """A format of values with few bits, groups of which share a scale.

    Attributes:
      kind: the type of the values.
      most: what the greatest magnitude becomes before it is rounded.
    """

    kind: Any = None
    most: float = 0.0

    def quantise(self, numbers: Any, axis: int, dtype: Any, xp: Any = np) -> tuple[Any, Any]:
        """Scales and values of a matrix.

        Args:
          numbers: `[..., E, F]` or `[V, E]`, in float32.
          axis: of the inputs, counted from the end.
          dtype: of the scales.
          xp: `numpy`, or `jax.numpy`.
        """
        shape, at = numbers.shape, numbers.ndim + axis
        split = numbers.reshape(*shape[:at], self.groups(shape[at]), -1, *shape[at + 1 :])
        greatest = xp.max(xp.abs(split), axis=at + 1, keepdims=True)
        scale = greatest / xp.full_like(greatest, self.most)
        scale = xp.where(scale < _LEAST, np.float32(1), scale).astype(dtype)
        whole = xp.where(scale == 0, np.float32(1), scale.astype(np.float32))  # may underflow in a narrow type
        values = split / xp.broadcast_to(whole, split.shape)
        if jnp.issubdtype(self.kind, jnp.integer):
            values = xp.clip(xp.round(values), np.float32(-self.most - 0.5), np.float32(self.most - 0.5))
        else:
            values = xp.clip(values, np.float32(-self.most), np.float32(self.most))
        return xp.squeeze(scale, at + 1), values.reshape(shape).astype(self.kind)

    def shape(self, leaf: jax.ShapeDtypeStruct, axis: int) -> Quantised:
        """See `Format.shape`."""
        scale = jax.ShapeDtypeStruct(self.grouped(leaf.shape, axis), leaf.dtype)
        return Quantised(scale, jax.ShapeDtypeStruct(leaf.shape, self.kind))

    def leaf(self, x: Any, axis: int) -> Quantised:
        """See `Format.leaf`."""
        # not jitted, and divided by whole arrays: a compiler would multiply by reciprocals where numpy divides
        return Quantised(*self.quantise(x.astype(jnp.float32), axis, x.dtype, jnp))

    def source(self, source: Source | Stack, axis: int) -> quantising.QuantisedSource:
        """See `Format.source`."""
        return quantising.QuantisedSource(self, source, axis)


@dataclasses.dataclass(frozen=True)
class Lossless(Format):
    """bfloat16 with coded exponents; see `specjax.models.dfloat11`. A group is the run of a lane."""

    def shape(self, leaf: jax.ShapeDtypeStruct, axis: int) -> dfloat11.Coded:
        """See `Format.shape`. The number of words per run depends on the numbers; this is the count for random numbers
        of one scale."""
        runs, at = self.grouped(leaf.shape, axis), len(leaf.shape) - 2
        words = dfloat11.usual_words(leaf.shape[axis] // runs[axis])
        lead = leaf.shape[:at]
        return dfloat11.Coded(
            jax.ShapeDtypeStruct((*lead, 1, 1), leaf.dtype), jax.ShapeDtypeStruct(leaf.shape, np.uint8),
            jax.ShapeDtypeStruct((*lead, words, *runs[at:]), np.uint32),
            jax.ShapeDtypeStruct((*lead, 256, 1, 1), np.uint16),
        )  # fmt: skip

    def leaf(self, x: Any, axis: int) -> dfloat11.Coded:
        """See `Format.leaf`. Runs on the host, which must hold the whole matrix."""
        if isinstance(x, jax.Array) and not x.is_fully_addressable:
            raise ModelError(f"several processes hold the parameters: for {self.name}, load a folder of safetensors")
        own = np.asarray(x)
        if own.dtype != dfloat11.BFLOAT16 and not dfloat11.is_exact(own):
            raise ModelError(quantising.NOT_EXACT)
        return jax.tree.map(
            jnp.asarray, dfloat11.encoded(own.astype(dfloat11.BFLOAT16), axis, self.size(own.shape[axis]), own.dtype)
        )

    def source(self, source: Source | Stack, axis: int) -> quantising.CodedSource:
        """See `Format.source`."""
        return quantising.CodedSource(self.size(source.shape[axis]), source, axis)


@dataclasses.dataclass(frozen=True)
class TwoPrecisions(Format):
    """Experts as they are and in few bits, of which each token takes one or none (`specjax.models.hobbit.tiers`).

    Everything else stays plain. A group is one of the format in few bits; 0: as that format has it.

    Attributes:
      high: see `Tiers`.
      low: see `Tiers`.
      renormalised: see `Tiers`.
      bits: the format in few bits.
      host: whether experts lie in the host's memory; see `Tiered`.
    """

    high: float = Tiers.high
    low: float = Tiers.low
    renormalised: bool = Tiers.renormalised
    bits: str = "int4"
    host: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.high <= self.low <= 1:
            raise ModelError(
                f"{self.name}: thresholds are 0 <= high <= low <= 1, got high={self.high:g} and low={self.low:g}"
            )
        if self.host:
            hosted.check()

    @property
    def settings(self) -> dict[str, Callable[[str], Any]]:
        """See `Format.settings`."""
        few = {name: name for name, form in FORMATS.items() if isinstance(form, Scaled)}
        switch = _SWITCH.__getitem__
        own = {"high": float, "low": float, "renormalised": switch, "bits": few.__getitem__, "host": switch}
        return {**own, "group": _count}

    @property
    def few(self) -> Format:
        """The format in few bits."""
        own = FORMATS[self.bits]
        return dataclasses.replace(own, group=self.group) if self.group else own

    def of(self, path: tuple[Any, ...]) -> tuple[Format, int] | None:
        """See `Formats.of`."""
        axis = inputs_axis(path, False)
        of_experts = any(getattr(key, "key", None) == "experts" for key in path)
        return (self, axis) if axis is not None and of_experts else None

    def check(self, shapes: Any) -> None:
        """See `Formats.check`.

        Raises:
          ModelError: also for a model without experts.
        """
        if all(self.of(path) is None for path, _ in jax.tree_util.tree_leaves_with_path(shapes)):
            raise ModelError(f"weights {str(self)!r} keep experts in two precisions, and this model has none")
        super().check(shapes)

    def check_groups(self, inputs: list[tuple[str, int]]) -> None:
        """See `Format.check_groups`."""
        self.few.check_groups(inputs)

    @property
    def one_device(self) -> bool:
        return True

    def made(self, many: Any, few: Any) -> Tiered:
        """A leaf from both precisions, moved to where they belong."""
        tiers = Tiers(self.high, self.low, self.renormalised)
        many, few = hosted.moved((many, few)) if self.host else (many, few)
        return Tiered(many, few, tiers, self.host)

    def shape(self, leaf: jax.ShapeDtypeStruct, axis: int) -> Tiered:
        """See `Format.shape`."""
        return Tiered(
            leaf, self.few.shape(leaf, axis), Tiers(self.high, self.low, self.renormalised), on_host=self.host
        )

    def leaf(self, x: Any, axis: int) -> Tiered:
        """See `Format.leaf`."""
        return self.made(x, self.few.leaf(x, axis))

    def source(self, source: Source | Stack, axis: int) -> "TieredSource":
        """See `Format.source`."""
        return TieredSource(self, source, axis)


@dataclasses.dataclass(frozen=True)
class TieredSource:
    """The source of experts in two precisions. They are read twice, one matrix of each expert of a layer at a time.

    Attributes:
      format: of the result.
      source: of the plain numbers.
      axis: of the inputs, counted from the end.
    """

    format: TwoPrecisions
    source: Source | Stack
    axis: int

    def placed(self, dtype: Any, place: None) -> Tiered:
        """See `quantising.QuantisedSource.placed`; on the default device, or in its host's memory."""
        few = self.format.few.source(self.source, self.axis).placed(dtype, place)
        return self.format.made(place_one(self.source, dtype, place), few)


def _count(word: str) -> int:
    if not word.isdecimal():
        raise ValueError
    return int(word)


_SWITCH = {"true": True, "false": False}

FORMATS = {
    kind.name: kind
    for kind in (
        Scaled("int8", kind=np.dtype(np.int8), most=127.5),
        Scaled("int4", None, kind=np.dtype(ml_dtypes.int4), most=7.5),
        Scaled("fp8", kind=_FP8, most=float(ml_dtypes.finfo(_FP8).max)),
        Lossless("dfloat11", None),
        TwoPrecisions("hobbit"),
    )
}
"""The formats by name."""


BITS: dict[int, str | None] = {4: "int4", 8: "int8", 16: None}
"""The formats of numbers of bits, as files of EvoPress name them; None: as the model is loaded."""


@dataclasses.dataclass(frozen=True)
class PerMatrix(Formats):
    """A format for each matrix that a file names; the others stay plain.

    Attributes:
      file: the file.
      digest: of what it says.
      lines: names of matrices, as Llama's tensors are called, without `.weight`; and their formats, None for plain.
    """

    file: str
    digest: str
    lines: "tuple[tuple[str, Format | None], ...]"

    @classmethod
    def read(cls, file: str) -> "PerMatrix":
        """What a file says, line by line: `model.layers.0.self_attn.q_proj: 4`; bits (see `BITS`) or a format's line.

        Raises:
          ModelError: on another line; names it.
        """
        content = Path(file).read_bytes()
        lines: dict[str, Format | None] = {}
        for number, line in enumerate(content.decode(errors="replace").splitlines(), 1):
            name, _, word = (part.strip() for part in line.partition(":"))
            if not line.strip():
                continue
            if not word or name in lines or (word.isdecimal() and int(word) not in BITS):
                what = (
                    f"{name} is there already" if name in lines else f"{line.strip()[:60]!r} is no matrix with a format"
                )
                raise ModelError(
                    f"{file}, line {number}: {what}; a line is NAME: BITS, such as model.layers.0.mlp.up_proj: 4, with "
                    f"{', '.join(map(str, BITS))} or one of {', '.join(FORMATS)}"
                )
            try:
                own = _one_format(BITS[int(word)] if word.isdecimal() else word)
                if isinstance(own, TwoPrecisions):
                    raise ModelError(f"{own.name} is for all experts at once: give it as weights, not for a matrix")
                lines[name] = own
            except ModelError as error:
                raise ModelError(f"{file}, line {number}: {error}") from None
        return cls(file, hashlib.sha256(content).hexdigest()[:12], tuple(lines.items()))

    def __str__(self) -> str:
        return f"{self.file}{_DIGEST}{self.digest}"

    @functools.cached_property
    def _formats(self) -> "dict[str, set[Format | None]]":
        """By name, with `{}` for the number of an expert."""
        found: dict[str, set[Format | None]] = {}
        for name, form in self.lines:
            found.setdefault(_of_experts(name), set()).add(form)
        return found

    def of(self, path: tuple[Any, ...]) -> tuple[Format, int] | None:
        """See `Formats.of`."""
        axis, name = inputs_axis(path, True), matrix_name(path)
        form = next(iter(self._formats.get(name or "", ())), None)
        return None if axis is None or form is None else (form, axis)

    @property
    def of_vocab(self) -> bool:
        return any(self._formats.get(name, {None}) != {None} for name in ("model.embed_tokens", "lm_head"))

    def check(self, shapes: Any) -> None:
        """See `Formats.check`.

        Raises:
          ModelError: also if the file names a matrix that the model lacks, or only some experts' matrices, or
            gives these different formats.
        """
        own = {name: leaf for name, leaf in matrices(shapes).items()}
        named = [name for name, _ in self.lines]
        if lacking := [name for name in named if _of_experts(name) not in own]:
            raise ModelError(
                f"{self.file} names {len(lacking)} matrices that the model lacks, such as {lacking[0]}: it is for another "
                f"model, whose matrices are called as {next(iter(own), 'none')}"
            )
        for name, leaf in own.items():
            each = {name.format(i) for i in range(leaf.shape[0])} if "{}" in name else {name}
            forms = self._formats.get(name, {None})
            if len(forms) > 1 or (name in self._formats and not each <= {*named}):
                raise ModelError(f"{self.file}: name all of {name.format('0')} to {len(each) - 1}, in one format")
        super().check(shapes)


_DIGEST = ":digest="
"""Stands between a file's name and the digest of what it said."""


def matrices(params: Any) -> dict[str, Any]:
    """The matrices that may have few bits, by name (see `PerMatrix.lines`), with `{}` for the number of an expert."""
    found = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(params, is_leaf=is_quantised):
        if inputs_axis(path, True) is not None and (name := matrix_name(path)) is not None:
            found[name] = leaf
    return found


def matrix_name(path: tuple[Any, ...]) -> str | None:
    """The name of the matrix at a path, as Llama's tensors are called; None for one that Llama's layout lacks."""
    try:
        return hf_name(path)[0].removesuffix(".weight")
    except ModelError:
        return None


def _of_experts(name: str) -> str:
    return re.sub(r"\.experts\.\d+\.", ".experts.{}.", name)


def inputs_axis(path: tuple[Any, ...], vocab: bool) -> int | None:
    """The axis of a parameter's inputs, along which numbers form groups; None for a parameter that stays plain.

    Kernels of linear layers and experts get few bits. Routers, gates and the coefficients of streams stay plain: they are
    small, and they choose.

    Args:
      path: the parameter's path.
      vocab: whether the table of embeddings and the output head get few bits too.
    """
    keys = [key.key for key in path if hasattr(key, "key")]
    if keys == ["embed", "embedding"]:
        return -1 if vocab else None
    inside = keys[-1] == "kernel" and not {"router", "shared_gate", "altup"} & {*keys} and (vocab or keys[0] != "head")
    return -2 if inside else None


def read_format(line: str | Formats | None) -> Formats | None:
    """A format from its line, `NAME` or `NAME:group=32,vocab=true`, or formats from a file (`PerMatrix`); None gives None.

    >>> str(read_format("int4:group=32"))
    'int4:group=32'

    Raises:
      ModelError: on any other line; or if a file no longer says what it said.
    """
    if line is None or isinstance(line, Formats):
        return line
    file, _, digest = str(line).partition(_DIGEST)
    if file.partition(":")[0].strip() in FORMATS or not Path(file).is_file():
        return _one_format(str(line))
    found = PerMatrix.read(file)
    if digest not in ("", found.digest):
        raise ModelError(f"{file} has changed: its digest is {found.digest}, and weights={line!r} were asked for")
    return found


def _one_format(line: str | None) -> Format | None:
    """The format that a line names; see `read_format`."""
    if line is None:
        return None
    name, _, rest = (part.strip() for part in line.partition(":"))
    known = (
        f"give {', '.join(FORMATS)}, with group=N inputs of an output (0: all) or vocab=true after a colon; packed, as the "
        "file has them; plain; or a file with a format for each matrix"
    )
    if name not in FORMATS:
        raise ModelError(f"unknown weights {line!r}; {known}")
    form = FORMATS[name]
    settings, fields = form.settings, dict[str, Any]()
    for item in rest.split(",") if rest else ():
        field, _, value = (part.strip().lower() for part in item.partition("="))
        try:
            fields[field] = settings[field](value)
        except (KeyError, ValueError):
            own = known if "vocab" in settings else f"{name} takes {', '.join(settings)}"
            raise ModelError(f"weights {line!r}: {item.strip()!r} is not a setting; {own}") from None
    return dataclasses.replace(form, **fields)


def check_plain(params: Any, what: str, but: tuple[type, ...] = ()) -> None:
    """Raises ModelError, saying that `what` is impossible, if matrices have few bits in a form that is not in `but`."""
    if any(is_quantised(x) and not isinstance(x, but) for x in jax.tree.leaves(params, is_leaf=is_quantised)):
        raise ModelError(f"the model's weights are kept in few bits, and {what}: load it with weights='plain'")


def _name(path: tuple[Any, ...]) -> str:
    return ".".join(str(key.key) for key in path[:-1])
