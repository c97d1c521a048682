"""Checks of the settings that several processes must share to train or to capture together."""

from collections.abc import Sequence
from typing import Any

from specjax.jobs import hosts
from specjax.sharding.mesh import axis_sizes


def check(options: Any, own: Sequence[str], rows: int, which: str) -> None:
    """Raises ValueError on options that several processes cannot use together.

    Args:
      options: of `train` or `capture`.
      own: names of options that may differ between processes.
      rows: the number of rows of a pass.
      which: the flags that set this number.
    """
    hosts.check_same(hosts.shared(options, own))
    if options.prompts is not None:
        raise ValueError(
            "--prompts is for one process: have them answered by `specjax generate`, and give its --output as --data"
        )
    parts = axis_sizes(str(options.mesh))["data"]
    if rows % parts:
        raise ValueError(
            f"many processes share the rows of a batch: --mesh {options.mesh} does not split {rows} rows ({which}) into "
            f"{parts} equal parts"
        )
