"""Completions of batches of rows, as Ray Data's `map_batches` maps them. Nothing here imports Ray."""

import dataclasses
import logging
from collections.abc import Mapping
from typing import Any

import numpy as np

from specjax.decode import Decode
from specjax.draft import Drafter
from specjax.jobs import jsonl
from specjax.jobs.shards import of_rows
from specjax.names import check_keywords
from specjax.serve.engine import Engine
from specjax.serve.fields import is_known
from specjax.serve.request import Record, Request
from specjax.serve.sampling import Sampling
from specjax.serve.text import user_turn

COLUMNS = ("text", "tokens", "finish_reason", "error")
"""The columns that a batch gets: fields of a record."""
_OWN = ("model", "decode", "drafter", "sampling", "chat", "dtype", "mesh", "batch_size")
_LOG = logging.getLogger("specjax")


class Generate:
    """Completes the rows of batches. Each process makes one, which holds the model.

    A batch's columns are the fields of a line of `specjax generate --input`: `prompt` or `messages`, and optionally `id`,
    `stop`, `seed` and the other options. Values that are None or NaN count as absent. A row that cannot be used gets the finish
    reason `error`, and the reason in `error`.

    A row's noise follows from its seed and from its `id`, or without one from its prompt, and from nothing else. So its text is
    the same however rows are split into batches, and equals the text of `specjax.generate`. Rows with the same prompt and seed
    and without ids have the same noise, where `generate` tells them apart by their order.

    Args:
      model: see `specjax.generate`; a name, a folder or a hub id, which each process loads.
      decode: see `specjax.generate`.
      drafter: see `specjax.generate`.
      sampling: options for rows that do not set them.
      chat: whether a text is a user's turn in the model's chat template.
      dtype: see `specjax.generate`.
      mesh: see `specjax.generate`.
      batch_size: rows decoded together, whatever the size of the batches; changes speed, never text.
      **options: fields of `specjax.Sampling`; they take precedence over `sampling`.

    Raises:
      ValueError: one line that says what cannot be used.

    >>> complete = Generate("tiny", chat=True)
    >>> batch = complete({"prompt": np.array(["Repeat the list. [ hen, dog, deer ]"]), "number": np.array([7])})
    >>> batch["text"][0], batch["finish_reason"][0], batch["number"][0].item()
    (' [ hen, dog, deer ]', 'eos', 7)
    """

    def __init__(
        self,
        model: Any = None,
        *,
        decode: str | Decode | None = None,
        drafter: str | Drafter | tuple[Drafter, Any] | None = None,
        sampling: Sampling | None = None,
        chat: bool = False,
        dtype: Any = None,
        mesh: Any = None,
        batch_size: int = 8,
        **options: Any,
    ):
        check_keywords("Generate", options, (*_OWN, *(field.name for field in dataclasses.fields(Sampling))))
        if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
            raise ValueError(f"batch_size must be an integer of at least 1, got {batch_size!r}")
        self.options = (Sampling() if sampling is None else sampling).replace(**options).given
        self.chat, self.batch_size = chat, batch_size
        self.engine = Engine(model, decode, drafter=drafter, dtype=dtype, mesh=mesh, rows=batch_size)
        self.engine.check_stop(self.options.get("stop", ()))
        if line := self.engine.left_out(self.options, []):
            _LOG.warning(line)

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """The batch with the columns `text`, `tokens`, `finish_reason` and `error`; see `specjax.serve.request.Record`.

        Args:
          batch: columns of equal length.

        Raises:
          ValueError: if no column holds prompts, if columns differ in length, or if one has a name of those above.
        """
        items = self._items(batch)
        at = [index for index, item in enumerate(items) if isinstance(item, Request)]
        requests = [item for item in items if isinstance(item, Request)]
        records = dict(enumerate(items))
        if requests:
            keys = np.concatenate(
                [self.engine.keys([request]) for request in requests]
            )  # one by one: order decides nothing
            for turn in self.engine.turns(requests, slots=self.batch_size, keys=keys):
                records |= {at[index]: record for index, record in turn.finished}
        return {**batch, **{name: _column([getattr(records[i], name) for i in range(len(items))]) for name in COLUMNS}}

    def _items(self, batch: Mapping[str, Any]) -> list[Request | Record]:
        if not isinstance(batch, Mapping) or any(isinstance(column, str) for column in batch.values()):
            raise ValueError(
                "a batch is a dict of columns: leave map_batches' batch_format as it is, and give arrays or lists"
            )
        if not {"prompt", "messages"} & set(batch):
            raise ValueError(f"a batch needs a column prompt or messages; its columns are {', '.join(batch) or 'none'}")
        if taken := [name for name in COLUMNS if name in batch]:
            raise ValueError(
                f"the batch has a column {taken[0]!r}, which the completions would replace: rename or drop it"
            )
        if len({len(column) for column in batch.values()}) > 1:
            raise ValueError(f"columns differ in length: { ({name: len(column) for name, column in batch.items()}) }")
        read = {name: column for name, column in batch.items() if _is_read(name, column)}
        columns = [[_plain(value) for value in column] for column in read.values()]
        rows = (dict(zip(read, map(_whole, read, values), strict=True)) for values in zip(*columns, strict=True))
        lines = [
            dataclasses.replace(line, prompt=user_turn(line.prompt, self.chat))
            for line in of_rows(rows, jsonl.from_object)
        ]
        return list(jsonl.to_requests(lines, self.engine, self.options))


def _is_read(name: str, column: Any) -> bool:
    """Whether a column belongs to a line. Numbers of other names are read too, since they may be misspelt options."""
    numbers = getattr(column, "ndim", 0) == 1 and column.dtype.kind in "iuf"
    return name in jsonl.FIELDS or is_known(name) or numbers


def _whole(name: str, value: Any) -> Any:
    """An id that a table holds as a float, as it does where another id is absent, as the number that it was."""
    return int(value) if name == "id" and isinstance(value, float) and value.is_integer() else value


def _plain(value: Any) -> Any:
    """A value of a column as JSON has it; NaN, with which tables of numbers mark what is absent, as None."""
    if isinstance(value, np.ndarray):
        return [_plain(item) for item in value] if value.dtype == object else value.tolist()
    value = value.item() if isinstance(value, np.generic) else value
    if isinstance(value, dict):  # tables give every object the fields of all
        return {key: plain for key, item in value.items() if (plain := _plain(item)) is not None}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and value != value else value


def _column(values: list[Any]) -> np.ndarray:
    """A column of objects, also if they are lists of one length."""
    column = np.empty(len(values), object)
    for index, value in enumerate(values):
        column[index] = value
    return column
