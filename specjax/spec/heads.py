"""A trained head by itself: what its folder says, and the drafter that a line with it builds."""

from typing import Any

from specjax.about import abouts
from specjax.draft.heads.folder import Head, read_head
from specjax.spec.companions import Stored
from specjax.spec.registry import DRAFTERS, parse


def named_head(line: str, target: Any) -> tuple[str, Head]:
    """The head that a drafter's line names, loaded as `--drafter` loads it; the target may be one without weights.

    Args:
      line: such as `eagle3:model=FOLDER`.
      target: what `specjax.models.load` or `abstract` returned.

    Returns:
      The drafter's name, and the head.

    Raises:
      ValueError: on a line of another kind of drafter, and where the head cannot be loaded for this target.
    """
    stored = parse("drafter", DRAFTERS, line)
    if not isinstance(stored, Stored) or abouts(stored.kind)[0].loads != "head":
        raise ValueError(f"{line!r} is no drafter with a trained head, such as eagle3:model=FOLDER")
    return line.partition(":")[0].strip(), read_head(stored.asked, stored.name, stored.kind, target, **stored.fields)


def record(name: str, head: Head) -> dict[str, Any]:
    """What was read, as JSON: the drafter, the file's format, the target's layers whose outputs it reads, and its vocabulary.

    Taps are the drafter's own. The final hidden state, which most heads read, is none of them.

    Args:
      name: the drafter's.
      head: what was loaded.
    """
    ids = head.params.get("ids") if isinstance(head.params, dict) else None
    tokens = head.drafter.target.vocab_size
    return {
        "drafter": name,
        "format": head.format,
        "taps": list(getattr(head.drafter, "taps", ())),
        "vocabulary": {"draft": tokens if ids is None else len(ids), "target": tokens},
        "tree": {"nodes": head.drafter.nodes, "depth": head.drafter.depth},
        "notes": list(head.notes),
    }
