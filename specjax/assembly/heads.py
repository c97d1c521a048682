"""A trained head by itself: its folder's contents, the drafter that a line with it builds, and writing the head anew."""

import os
from pathlib import Path
from typing import Any

from specjax.about import abouts
from specjax.assembly.companions import Stored, asked_of
from specjax.assembly.line import spelt
from specjax.assembly.registry import DRAFTERS, parse
from specjax.draft.heads import published
from specjax.draft.heads.files import config_file, torch_files
from specjax.draft.heads.folder import Head, read_head, shipped_heads
from specjax.models import hub
from specjax.models.json_file import read_json

_NORMS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


def named_head(line: str, target: Any) -> tuple[str, Head]:
    """The head that a drafter's line names, loaded as `--drafter` loads it; the target may be without weights.

    Args:
      line: such as `eagle3:model=FOLDER`.
      target: from `specjax.models.load` or `abstract`.

    Returns:
      The drafter's name, and the head.

    Raises:
      ValueError: for a line of another kind of drafter, or if the head cannot be loaded for this target.
    """
    stored = parse("drafter", DRAFTERS, line)
    if not isinstance(stored, Stored) or abouts(stored.kind)[0].loads not in ("head", "own_head"):
        raise ValueError(f"{line!r} is not a drafter with a trained head, such as eagle3:model=FOLDER")
    return _name(line), read_head(
        asked_of(stored, target), stored.name, stored.kind, target, published=stored.published, **stored.fields
    )


def head_line(asked: str) -> str:
    """The drafter's line for a head: itself, or `NAME:model=FOLDER` for a folder, a shipped name or a hub id.

    Raises:
      ValueError: if there is no such head, or it does not say for which drafter it is.
    """
    if _name(asked) in DRAFTERS and not Path(asked).exists():
        return asked
    return f"{published.drafter_of(_folder(asked))}:model={spelt(asked)}"


def _name(line: str) -> str:
    return line.partition(":")[0].strip()


def _folder(asked: str) -> Path:
    stems = published.stems_of(*published.layouts().values())
    return hub.find(asked, shipped_heads(), "head", stems, torch_files(stems))[1]


def target_of(asked: str) -> str | None:
    """The target's name in a head's folder; None if `specjax.models.load` could not find it by that.

    Args:
      asked: see `head_line`.

    Raises:
      ValueError: if there is no such head.
    """
    line = head_line(asked)
    stored = parse("drafter", DRAFTERS, line)
    named = isinstance(stored, Stored) and read_json(config_file(_folder(stored.found()))).get("target")
    return named.get("name") if isinstance(named, dict) else None


def check_format(asked: str, layout: str) -> None:
    """Raises ValueError if there is no such head, or the format is unknown or cannot hold it; see `write`."""
    published.writer(layout, _name(head_line(asked)))


def write(asked: str, folder: str | os.PathLike[str], layout: str, target: Any, dtype: Any = None) -> tuple[str, ...]:
    """Writes a head in a published format, one of those in its drafter's layout (`specjax.draft.heads.layout`).

    Args:
      asked: see `head_line`.
      folder: created if needed.
      layout: the format.
      target: from `specjax.models.load`.
      dtype: the type to write; None is the target's.

    Returns:
      What other engines may not do with it, one sentence each.

    Raises:
      ValueError: if the head cannot be loaded for this target, or the format cannot hold it.
    """
    line = head_line(asked)
    written = published.writer(layout, _name(line))
    _, head = named_head(line, target)
    return written(folder, layout, head.drafter, head.params, target, dtype)


def record(name: str, head: Head) -> dict[str, Any]:
    """What was read, as JSON: the drafter, the file's format, the target's layers whose outputs it reads, and its vocabulary.

    Taps are the drafter's own. They do not include the final hidden state, which most heads read.

    Args:
      name: the drafter's.
      head: what was loaded.
    """
    ids = head.params.get("ids") if isinstance(head.params, dict) else None
    target = head.drafter.target
    return {
        "drafter": name,
        "format": head.format,
        "taps": list(getattr(head.drafter, "taps", ())),
        "vocabulary": target.vocab_size if ids is None else len(ids),
        "target": {"layers": target.num_layers, "vocabulary": target.vocab_size},
        "norms": {flag: getattr(head.drafter, flag) for flag in _NORMS if hasattr(head.drafter, flag)},
        "tree": {"nodes": head.drafter.nodes, "depth": head.drafter.depth},
        "notes": list(head.notes),
    }
