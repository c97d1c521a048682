"""JSON files from elsewhere: any defect becomes a one-line error."""

import json
from pathlib import Path
from typing import Any

from specjax.models.errors import ModelError


def parsed(text: str | bytes) -> Any:
    """The value of a JSON text.

    Raises:
      ValueError: if it is not JSON, or nested too deeply.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def read_json(file: Path) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
      ModelError: if there is none.
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
