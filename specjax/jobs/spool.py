"""A list that lies in a temporary file: the lines and items of a job, of which memory holds little whatever their number."""

import array
import contextlib
import dataclasses
import functools
import pickle
import tempfile
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar, overload

Value = TypeVar("Value")

IN_MEMORY = 1 << 22
"""Bytes that a spool holds in memory before it moves to a file."""
_PLAIN = frozenset((str, int, float, bool, type(None), tuple, list, dict))
_NONE = object()


class Spool(Sequence[Value]):
    """A list of dataclass objects that grows at its end.

    Memory holds 8 bytes for each of them. An object is made anew whenever it is asked for. Field values of other types
    than JSON's, such as a constraint's table, stay in memory and are shared.

    Args:
      values: what it holds at first.
    """

    def __init__(self, values: Iterable[Value] = ()):
        self._file = tempfile.SpooledTemporaryFile(max_size=IN_MEMORY)
        weakref.finalize(self, self._file.close)
        self._starts = array.array("Q")
        self._at = self._end = 0  # where the file stands, and where the next value begins
        self._shared: list[Any] = []
        self._place: dict[int, int] = {}
        for value in values:
            self.append(value)

    def append(self, value: Value) -> None:
        """Adds an object at the end.

        Raises:
          OSError: if the temporary file cannot be written.
        """
        kind = type(value)
        usual = _usual(kind)
        own = {name: given for name, given in vars(value).items() if given is not usual.get(name, _NONE)}
        shared = {name: self._kept(given) for name, given in own.items() if not _plain(given)}
        plain = {name: given for name, given in own.items() if name not in shared}
        content = pickle.dumps((kind, plain, shared), pickle.HIGHEST_PROTOCOL)
        with _said():
            self._go(self._end)
            self._file.write(content)
        self._starts.append(self._end)
        self._at = self._end = self._end + len(content)

    def __len__(self) -> int:
        return len(self._starts)

    @overload
    def __getitem__(self, index: int) -> Value: ...
    @overload
    def __getitem__(self, index: slice) -> list[Value]: ...
    def __getitem__(self, index: int | slice) -> Value | list[Value]:
        if isinstance(index, slice):
            return [self._read(at) for at in range(*index.indices(len(self)))]
        return self._read(range(len(self))[index])

    def __iter__(self) -> Iterator[Value]:
        return map(self._read, range(len(self)))

    def __reduce__(self) -> tuple[Any, ...]:
        return Spool, (list(self),)

    def _read(self, index: int) -> Value:
        start = self._starts[index]
        end = self._starts[index + 1] if index + 1 < len(self._starts) else self._end
        with _said():
            self._go(start)  # which writes what a file still holds in memory
            kind, plain, shared = pickle.loads(self._file.read(end - start))
        self._at = end
        return kind(**plain, **{name: self._shared[at] for name, at in shared.items()})

    def _go(self, place: int) -> None:
        if self._at != place:
            self._file.seek(place)
            self._at = place

    def _kept(self, given: Any) -> int:
        """The number of an object that stays in memory."""
        place = self._place.setdefault(id(given), len(self._shared))
        if place == len(self._shared):
            self._shared.append(given)
        return place


@contextlib.contextmanager
def _said() -> Iterator[None]:
    """Says of an error of the temporary file where that file is."""
    try:
        yield
    except OSError as error:
        why = f"a temporary file in {tempfile.gettempdir()} cannot be used ({error.strerror}): set TMPDIR to a folder with room"
        raise OSError(error.errno, why) from error


@functools.cache
def _usual(kind: type) -> dict[str, Any]:
    """The defaults of a dataclass; fields without one are left out."""
    missing = dataclasses.MISSING
    return {field.name: field.default for field in dataclasses.fields(kind) if field.default is not missing}


def _plain(value: Any) -> bool:
    """Whether a value is of JSON's types, as far as its first level."""
    kind = type(value)
    return kind in _PLAIN and (kind not in (tuple, list) or _PLAIN.issuperset(map(type, value)))
