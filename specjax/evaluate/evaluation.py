"""The results of a whole run."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from specjax.evaluate.results import Comparison, Row
from specjax.evaluate.trust import Trust


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """The results of a whole run.

    Attributes:
      rows: one per decoder; the first is the one that was asked for.
      comparisons: of the others with the first, or of all with the answers of another run.
      about: the setting in words.
      trust: a row per decoder, if it was asked for (`specjax.evaluate.trust`).
    """

    rows: list[Row]
    comparisons: list[Comparison]
    about: str
    trust: Sequence[Trust] = ()

    def to_json(self) -> dict[str, Any]:
        """One JSON object: the first row, and the others and comparisons if there are any."""
        more: dict[str, Any] = {"about": self.about}
        if self.rows[1:]:
            more["decoders"] = [row.to_json() for row in self.rows[1:]]
        if self.comparisons:
            more["comparisons"] = [comparison.to_json() for comparison in self.comparisons]
        if self.trust:
            more["trust"] = [row.to_json() for row in self.trust]
        return self.rows[0].to_json() | more
