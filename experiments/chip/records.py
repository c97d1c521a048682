"""What a run leaves: a file of records that grows by a line a case, and one JSON and one page that are made of it.

Every line is one write at the end of the file, so that several processes may share it, and one that is killed costs the line
that it was about to write.
"""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

FILE = "records.jsonl"

Record = dict[str, Any]


def append(folder: Path, record: Record) -> None:
    """Adds a record."""
    line = (json.dumps(record) + "\n").encode()
    file = os.open(folder / FILE, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    try:
        os.write(file, line)
    finally:
        os.close(file)


def close_line(folder: Path) -> None:
    """Ends a line that was cut off, so that the next record has one of its own."""
    file = folder / FILE
    if file.exists() and (text := file.read_bytes()) and not text.endswith(b"\n"):
        file.write_bytes(text + b"\n")


def read(folder: Path) -> list[Record]:
    """All records; a line that was cut off is none."""
    file, found = folder / FILE, []
    for line in file.read_text().splitlines() if file.exists() else []:
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return found


def about(records: Sequence[Record]) -> Record | None:
    """What the run's processes say of the device; None before one did."""
    return next((record["device"] for record in records if "device" in record), None)


def of_part(records: Sequence[Record], name: str) -> list[Record]:
    """The cases of a part that have a result, or an error for one."""
    return [record for record in records if record.get("part") == name]


def write(file: Path, text: str) -> None:
    """Replaces a file whole, so that whoever reads it finds the old or the new one."""
    beside = file.with_name(f".{file.name}")
    beside.write_text(text)
    beside.replace(file)
