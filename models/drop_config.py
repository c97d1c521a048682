"""Lists of left-out sublayers on disk, in EvoPress' format: one line per layer, `none`, `attn`, `mlp` or `attn+mlp`."""

import os
from collections.abc import Sequence
from pathlib import Path

from specjax.models.errors import ModelError
from specjax.models.on_disk import replace

FILE = "layer_drop_config.txt"
"""EvoPress' name of such a file."""
Drops = tuple[tuple[bool, bool], ...]
"""For each layer, whether its token mixer and whether its feed-forward are left out."""
_WORDS = {"none": (False, False), "attn": (True, False), "mlp": (False, True), "attn+mlp": (True, True)}


def read_drops(path: str | os.PathLike[str]) -> Drops:
    """The list in a file, or in a folder's `layer_drop_config.txt`.

    Raises:
      ModelError: if there is no such file, or a line is no such word; names the line.
    """
    file = Path(path) / FILE if Path(path).is_dir() else Path(path)
    if not file.is_file():
        raise ModelError(
            f"there is no list of sublayers at {str(file)!r}: `specjax train evopress drops` makes one for a model"
        )
    try:
        lines = [line.strip() for line in file.read_text().splitlines()]
    except UnicodeDecodeError:
        raise ModelError(f"{file} is no text: give a {FILE}") from None
    lines = lines[: next((i for i, _ in enumerate(lines) if not any(lines[i:])), None)]  # blank lines at the end
    for number, line in enumerate(lines, 1):
        if line not in _WORDS:
            raise ModelError(f"{file}, line {number}: {line[:40]!r} is none of {', '.join(_WORDS)}")
    return tuple(_WORDS[line] for line in lines)


def write_drops(path: str | os.PathLike[str], drops: Sequence[tuple[bool, bool]]) -> None:
    """Writes a list, which `read_drops` reads, in place of an older one."""
    words = {drop: word for word, drop in _WORDS.items()}
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    replace(path, [f"{words[drop]}\n".encode() for drop in drops])
