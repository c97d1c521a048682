"""JSON files that others wrote: whatever is wrong with one is one clear line."""

import json
from pathlib import Path
from typing import Any

from specjax.models.errors import ModelError


def parsed(text: str | bytes) -> Any:
    """What a JSON text says.

    Raises:
      ValueError: where it is no JSON, or nested too deeply to be read.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def read_json(file: Path) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
      ModelError: where there is none.
    """
    try:
        content = parsed(file.read_bytes())
    except OSError as error:
        raise ModelError(f"{file}: {error.strerror or error}") from error
    except ValueError as error:
        raise ModelError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{file} must hold a JSON object")
    return content
