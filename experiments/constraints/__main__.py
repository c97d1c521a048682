"""`python -m experiments.constraints FOLDER` writes 60 JSON Schemas of growing size for `specjax bench schema`."""

import sys
from pathlib import Path
from typing import Any

from specjax.jobs import jsonl

COUNT = 60
NAMES = ("name", "age", "city", "member", "score", "tags", "since", "colour", "items", "note", "level", "owner")
PARTS: tuple[dict[str, Any], ...] = (
    {"type": "string", "maxLength": 12},
    {"type": "integer", "minimum": 0, "maximum": 130},
    {"enum": ["Lagos", "Lima", "Oslo", "Perth"]},
    {"type": "boolean"},
    {"type": "number"},
    {"type": "array", "items": {"type": "string", "maxLength": 8}, "minItems": 1, "maxItems": 3},
    {"type": "string", "format": "date"},
    {"enum": ["red", "green", "blue"]},
    {"type": "array", "items": {"type": "integer", "minimum": 1, "maximum": 9}, "maxItems": 4},
    {"anyOf": [{"type": "string", "maxLength": 16}, {"type": "null"}]},
    {"const": 1},
    {"type": "object", "properties": {"id": {"type": "integer", "minimum": 1}}, "required": ["id"]},
)


def schema(number: int) -> dict[str, Any]:
    """An object with 1 property more for every five schemas; which ones it has shifts from one to the next."""
    taken = [(number + at) % len(NAMES) for at in range(1 + number // 5)]
    properties = {NAMES[at]: PARTS[at] for at in taken}
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


def main(words: list[str]) -> int:
    """Writes the schemas; returns the exit status."""
    if len(words) != 1:
        sys.stderr.write("python -m experiments.constraints FOLDER: give one folder\n")
        return 2
    folder = Path(words[0])
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(COUNT):
        (folder / f"{number:02}.json").write_text(jsonl.dumps(schema(number)) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
