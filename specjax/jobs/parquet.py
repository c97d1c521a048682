"""Prompts and records as Parquet tables (extra `parquet`). A job writes JSON lines first, and converts them at its
end."""

import json
import os
from collections.abc import Iterator
from typing import Any

from specjax.jobs import jsonl
from specjax.jobs.shards import of_rows
from specjax.models.on_disk import replace


def _pyarrow() -> Any:
    try:
        import pyarrow.parquet

        return pyarrow
    except ImportError as error:
        raise ValueError("Parquet files need pyarrow: pip install 'specjax[parquet]'") from error


def check() -> None:
    """Raises ValueError if pyarrow is not installed."""
    _pyarrow()


def read(path: str | os.PathLike[str], form: jsonl.Form | None = None) -> Iterator[jsonl.Line]:
    """Yields the rows of a table as lines of an input file: columns are fields, and nulls are left out; see `jsonl.read`.

    Raises:
      ValueError: if the file is missing or is not a table.
    """
    pyarrow = _pyarrow()
    try:
        with pyarrow.parquet.ParquetFile(path) as table:
            rows = (row for batch in table.iter_batches() for row in batch.to_pylist())
            yield from of_rows(rows, form or jsonl.from_object)
    except (OSError, pyarrow.ArrowException) as error:
        raise ValueError(f"cannot read the input file {str(path)!r}: {error}") from error


def write(path: str | os.PathLike[str], journal: str | os.PathLike[str]) -> None:
    """Writes the records of a file of JSON lines as one table, atomically.

    A column whose values have no common type holds them as JSON.

    Raises:
      OSError: if that fails.
    """
    pyarrow = _pyarrow()
    with open(journal, encoding="utf-8") as lines:
        records = [json.loads(line) for line in lines]
    names = dict.fromkeys(name for record in records for name in record)

    def column(name):
        values = [record.get(name) for record in records]
        try:
            return pyarrow.array(values)
        except (pyarrow.ArrowException, ValueError, OverflowError):
            return as_json(values)

    def as_json(values):
        return pyarrow.array([None if value is None else json.dumps(value) for value in values])

    table = pyarrow.table({name: column(name) for name in names})
    empty = [field.name for field in table.schema if "struct<>" in str(field.type)]  # the format cannot hold these
    for name in empty:
        at = table.schema.get_field_index(name)
        table = table.set_column(at, name, as_json([record.get(name) for record in records]))
    sink = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(table, sink)
    replace(path, [sink.getvalue().to_pybytes()])
