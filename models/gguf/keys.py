"""The keys of a GGUF file's architecture."""

import math
from typing import Any

from specjax.models.errors import ModelError
from specjax.models.fields import is_size, shown
from specjax.models.gguf.header import Header


class Fields:
    """The keys of one architecture.

    Args:
      header: the file's header.
    """

    def __init__(self, header: Header):
        self.header, self._prefix = header, f"{header.architecture}."

    def get(self, key: str, usual: Any = None) -> Any:
        """A value; `usual` if the file lacks it."""
        return self.header.metadata.get(self._prefix + key, usual)

    def size(self, key: str, usual: int | None = None) -> int:
        """A positive integer; an array over layers must have one value.

        Raises:
          ModelError: if it is not one, if it is missing without a default, or if layers differ.
        """
        found = self.get(key, usual)
        if isinstance(found, list) and len(set(found)) == 1:
            found = found[0]
        if not is_size(found):
            what = (
                "is different in each layer"
                if isinstance(found, list)
                else f"must be a positive number, not {shown(found)}"
            )
            raise ModelError(f"{self.header.file}: {self._prefix}{key} {what}")
        return found

    def number(self, key: str, usual: float | None = None) -> float:
        """A number.

        Raises:
          ModelError: if it is not one, or if it is missing without a default.
        """
        found = self.get(key, usual)
        if isinstance(found, bool) or not isinstance(found, int | float) or not math.isfinite(found):
            raise ModelError(f"{self.header.file}: {self._prefix}{key} must be a number, not {shown(found)}")
        return float(found)

    def has(self, tensor: str) -> bool:
        """Whether the file has a tensor of that name."""
        return tensor in self.header.tensors
