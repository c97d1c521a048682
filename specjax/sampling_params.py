"""Sampling parameters, made from the table of warpers: the options of one prompt, and their columns for a batch of rows."""

import dataclasses
import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.names import check_keywords
from specjax.warpers import WARPERS, Warper
from specjax.warpers.lists import rounded

LISTED = sorted(WARPERS, key=lambda each: (not each.usual, each.usual and each.of_logits))
"""The warpers, the usual ones first and temperature before all: the order of options."""

FIELDS: dict[str, dataclasses.Field] = {field.name: field for each in LISTED for field in dataclasses.fields(each)}
"""Every parameter of every warper."""

Form = tuple[tuple[str, tuple[int, ...]], ...]
"""The columns of a batch by name, and their widths: `()` for numbers, some sizes for lists."""

USUAL: Form = tuple((field.name, ()) for each in LISTED if each.usual for field in dataclasses.fields(each))
"""The columns that every batch has."""


def _options() -> Any:
    """A class with a field for every parameter."""
    copies = [(f.name, f.type, dataclasses.field(default=f.default, metadata=f.metadata)) for f in FIELDS.values()]
    about = "How one row draws its tokens: the parameters of all warpers (`specjax.warpers`), where they are explained."
    return dataclasses.make_dataclass(
        "SamplingOptions", copies, frozen=True, kw_only=True, namespace={"__doc__": about, "__module__": __name__}
    )


SamplingOptions: Any = _options()


def in_use(warper: Warper, options: Any) -> bool:
    """Whether options, or any object with their fields, turn a warper on; for greedy options, only a warper of logits
    counts.
    """
    if not warper.of_logits and not options.temperature:
        return False
    return any(is_set(name, getattr(options, name)) for name in warper.switches)


def is_set(name: str, value: Any) -> bool:
    """Whether a parameter differs from its default; a list whose default is empty counts if it is not empty."""
    listed = "shape" in FIELDS[name].metadata and FIELDS[name].default is not None
    return bool(len(value)) if listed else value != FIELDS[name].default


def check_walked(options: Any, how: str, obeys: bool, aligns: bool = False) -> None:
    """Raises ValueError if options turn on a warper that removes tokens along the text, and these might be written.

    It also does if both a warper and the way to decode bring texts nearer to a constraint's distribution.

    Args:
      options: see `in_use`.
      how: the way to decode, in words.
      obeys: whether that way writes only what the warpers leave.
      aligns: whether that way brings texts nearer to the model's distribution given a constraint.
    """
    strict = [each.switches[0] for each in WARPERS if each.walks and each.removes and in_use(each, options)]
    if not strict:
        return
    if not obeys:
        raise ValueError(
            f"{how} may write tokens that a {strict[0]} forbids: leave {strict[0]} out, or decode otherwise"
        )
    if aligns and (guides := [each.switches[0] for each in WARPERS if each.aligns and in_use(each, options)]):
        raise ValueError(f"{how} weighs the texts of a constraint itself: leave {guides[0]} out, or decode otherwise")
    forcing = [name for each in WARPERS for name in each.forces if is_set(name, getattr(options, name))]
    if forcing:
        raise ValueError(
            f"{forcing[0]} forces a token that a {strict[0]} may forbid: set it to -1, or leave {strict[0]} out"
        )


def worded(options: Any, tokenizer: Any) -> dict[str, Any]:
    """The lists that options leave to a tokenizer (`specjax.warpers.lists.listing`), for the warpers that they turn on.

    Args:
      options: anything with the fields of `SamplingOptions`.
      tokenizer: if None, there are no lists.
    """
    used = [each for each in WARPERS if tokenizer is not None and in_use(each, options)]
    fields = [field for each in used for field in dataclasses.fields(each) if field.metadata.get("words")]
    return {own.name: _lasts(tokenizer, own.metadata["words"]) for own in fields if getattr(options, own.name) is None}


@functools.lru_cache(maxsize=64)
def _lasts(tokenizer: Any, texts: tuple[str, ...]) -> tuple[int, ...]:
    """The last token of each text."""
    return tuple(token for text in texts for token in tokenizer.encode(text, add_special_tokens=False)[-1:])


def made(options: Any, vocabulary: Any, room: int) -> dict[str, Any]:
    """The parameters that a model's vocabulary turns into tables (`specjax.warpers.lists.listing`), of those that are set.

    Args:
      options: anything with the fields of `SamplingOptions`.
      vocabulary: a `specjax.constrain.Vocabulary`.
      room: the most new tokens.

    Raises:
      ValueError: one line that says what cannot be made.
    """
    found: dict[str, Any] = {}
    for name, field in FIELDS.items():
        if (make := field.metadata.get("make")) and is_set(name, value := getattr(options, name)):
            found[name] = make(value, vocabulary, room, found)
    return found


def form_of(options: Iterable[Any]) -> Form:
    """The columns that rows with these options need. The options are read once, and only lists that are set are kept."""
    wanted = {at for at, each in enumerate(LISTED) if each.usual}
    lists: dict[str, list[Any]] = {name: [] for name, field in FIELDS.items() if "shape" in field.metadata}
    for own in options:
        wanted |= {at for at, each in enumerate(LISTED) if at not in wanted and in_use(each, own)}
        for name, values in lists.items():
            if (value := getattr(own, name)) is not FIELDS[name].default:
                values.append(value)
    fields = [field for at, each in enumerate(LISTED) if at in wanted for field in dataclasses.fields(each)]
    return tuple((field.name, _widths(field, lists.get(field.name, ()))) for field in fields)


def _widths(field: dataclasses.Field, values: Sequence[Any]) -> tuple[int, ...]:
    """The width of a column that holds these values; at least 1 for lists."""
    shape = field.metadata.get("shape")
    if shape is None:
        return ()
    found = [shape.widths(read(field, value)) for value in (*values, ())]
    return tuple(rounded(max(1, *sizes)) for sizes in zip(*found, strict=True))


def read(field: dataclasses.Field, value: Any) -> Any:
    """The canonical value of a list parameter; None stands for its default, the empty list.

    Raises:
      ValueError: for anything else.
    """
    value = () if value is None and field.default is None else value
    try:
        return field.metadata["shape"].read(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{field.name} must be {field.metadata['valid']}, got {value!r:.40}") from error


def check_value(field: dataclasses.Field, value: Any) -> None:
    """Checks a parameter of one prompt.

    Raises:
      ValueError: it names the parameter and its range.
    """
    if "shape" in field.metadata:
        read(field, value)
        return
    large = 2**31 if field.type is int else 1e38
    if isinstance(value, bool) or not isinstance(value, (int, float, np.number)) or not abs(value) < large:
        raise ValueError(f"{field.name} must be {field.metadata['valid']}, got {value!r:.40}")
    column(field, value)


def listed_ids(options: Mapping[str, Any]) -> dict[str, list[int]]:
    """The token ids in each of the options that are lists, or one token."""
    found = {}
    for name, value in options.items():
        shape = FIELDS[name].metadata.get("shape") if name in FIELDS else None
        if shape is not None and shape.of_ids:
            arrays = jax.tree.leaves(_filled(FIELDS[name], [value], _widths(FIELDS[name], [value])))
            found[name] = [token for array in arrays if array.dtype == np.int32 for token in array.ravel().tolist()]
        elif shape is None and name in FIELDS and FIELDS[name].metadata.get("is_token"):
            found[name] = [value]
    return found


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SamplingArrays:
    """The sampling options of each row. Names and meanings are those of `transformers`' generation options.

    Rows may differ, and changing their values never recompiles. The set of columns is static: a program contains no
    warper without columns.

    Attributes:
      columns: by the parameter's name, `[B]` each, or `[B, ...]` for lists; a warper's columns come together.
    """

    columns: dict[str, Any]

    @classmethod
    def make(cls, batch: int, temperature: Any = 0.0, **others: Any) -> "SamplingArrays":
        """Checks and broadcasts scalars, or sequences of `batch` values. Names and defaults are those of `SamplingOptions`.

        A parameter that is itself a list takes a sequence of `batch` lists. The result has columns for the usual
        warpers, and for every warper with a given value.

        Raises:
          ValueError: it names the option that is out of range, and its range.
        """
        check_keywords("SamplingArrays.make", others, ["batch", *FIELDS])
        given = {"temperature": temperature, **others}
        values = SamplingOptions(**given)
        wanted = [each for each in LISTED if each.usual or given.keys() & {f.name for f in dataclasses.fields(each)}]
        columns = {}
        for field in (field for each in wanted for field in dataclasses.fields(each)):
            value = getattr(values, field.name)
            if "shape" not in field.metadata:
                columns[field.name] = np.broadcast_to(column(field, value), (batch,))
                continue
            rows = value if field.name in given else [()] * batch
            if not isinstance(rows, (list, tuple)) or len(rows) != batch:
                raise ValueError(f"{field.name} of {batch} rows needs as many values, each {field.metadata['valid']}")
            columns[field.name] = _filled(field, rows, _widths(field, rows))
        return cls(jax.device_put(columns))

    @classmethod
    def blank(cls, batch: int, form: Form = USUAL) -> "SamplingArrays":
        """Rows that use no warper, with the columns of a form. Every array is a buffer of its own."""
        columns = {name: _filled(FIELDS[name], [FIELDS[name].default] * batch, widths) for name, widths in form}
        return cls(jax.tree.map(jnp.array, columns))

    @classmethod
    def of_rows(cls, rows: Sequence[Any], form: Form) -> "SamplingArrays":
        """The columns of a form, on the host, from one set of options per row.

        Raises:
          ValueError: if an option is out of range, or needs a column that the form lacks.
        """
        room = dict(form)
        for name, widths in form_of(rows):
            if name not in room or any(a > b for a, b in zip(widths, room[name], strict=True)):
                raise ValueError(f"there is no column that holds {name} of these rows: start with a form that has one")
        return cls({name: _filled(FIELDS[name], [getattr(row, name) for row in rows], widths) for name, widths in form})

    def replace(self, **columns: Any) -> "SamplingArrays":
        """The same rows, with other arrays in some columns."""
        return SamplingArrays({**self.columns, **columns})

    def __getitem__(self, name: str) -> Any:
        return self.columns[name]

    @property
    def temperature(self) -> jax.Array:
        """`[B]` float32; 0 is greedy."""
        return self.columns["temperature"]

    @property
    def form(self) -> Form:
        """The names and widths of the columns."""
        there = [name for name in FIELDS if name in self.columns]
        return tuple((name, _sizes(FIELDS[name], self.columns[name])) for name in there)

    def own(self, warper: Warper) -> Mapping[str, Any] | None:
        """A warper's columns; None if it has none."""
        names = [field.name for field in dataclasses.fields(warper)]
        return {name: self.columns[name] for name in names} if names[0] in self.columns else None


def begun(sampling: SamplingArrays) -> dict[str, Any]:
    """The sums and states of texts without new tokens, for warpers with columns that carry or walk."""
    batch, owns = sampling.temperature.shape[0], [(each, sampling.own(each)) for each in WARPERS]
    kept = [(each, own) for each, own in owns if own is not None and (each.carries or each.walks)]
    return {each.switches[0]: each.start(own, batch) for each, own in kept}


def _sizes(field: dataclasses.Field, column: Any) -> tuple[int, ...]:
    """The widths of a column."""
    shape = field.metadata.get("shape")
    own = None if shape is None else shape.sizes
    return tuple(jax.tree.leaves(column)[0].shape[1:] if own is None else own(column))


def _filled(field: dataclasses.Field, values: Sequence[Any], widths: tuple[int, ...]) -> Any:
    """A column of values, one per row, on the host."""
    shape = field.metadata.get("shape")
    if shape is None:
        return column(field, list(values))
    return shape.array([read(field, value) for value in values], widths)


def column(field: dataclasses.Field, value: Any) -> np.ndarray:
    """A value of `SamplingOptions`, or a sequence of them, in the 32 bits that it is computed with.

    Raises:
      ValueError: if it is out of range, or traced.
    """
    dtype, said = np.int32 if field.type is int else np.float32, f"{field.name} must be {field.metadata['valid']}"
    try:
        array = np.asarray(value)
        if dtype is np.int32 and not np.array_equal(array, array.astype(np.int64)):
            raise ValueError("not a whole number")
        array = array.astype(dtype)
    except jax.errors.TracerArrayConversionError as error:
        raise ValueError(
            f"{field.name} is traced, so its range cannot be checked: leave it out here, and set an array [B] with "
            f"SamplingArrays.replace({field.name}=...)"
        ) from error
    except (TypeError, ValueError) as error:
        raise ValueError(f"{said}, got {value!r}") from error
    if not np.all(field.metadata["holds"](array)):
        raise ValueError(f"{said}, got {value!r}")
    return array
