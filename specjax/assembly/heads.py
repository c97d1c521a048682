"""A trained head by itself: what its folder says, the drafter that a line with it builds, and the head written anew."""

import os
from pathlib import Path
from typing import Any

from specjax.about import abouts
from specjax.assembly.companions import Stored, asked_of
from specjax.assembly.line import spelt
from specjax.assembly.registry import DRAFTERS, parse
from specjax.draft.heads.files import STEMS, TORCH_FILES, config_file, read_tensors
from specjax.draft.heads.folder import Head, read_head, shipped_heads
from specjax.draft.heads.taps import IDS
from specjax.models import hub
from specjax.models.errors import ModelError
from specjax.models.fields import an_object, is_size
from specjax.models.json_file import read_json

_NORMS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


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
    if not isinstance(stored, Stored) or abouts(stored.kind)[0].loads not in ("head", "own_head"):
        raise ValueError(f"{line!r} is no drafter with a trained head, such as eagle3:model=FOLDER")
    return _name(line), read_head(
        asked_of(stored, target), stored.name, stored.kind, target, published=stored.published, **stored.fields
    )


def head_line(asked: str) -> str:
    """The drafter's line for a head: itself, or `NAME:model=FOLDER` for a folder, a shipped name or a hub id.

    Raises:
      ValueError: where there is no such head, or it does not say for which drafter it is.
    """
    if _name(asked) in DRAFTERS and not Path(asked).exists():
        return asked
    return f"{drafter_of(_folder(asked))}:model={spelt(asked)}"


def _name(line: str) -> str:
    return line.partition(":")[0].strip()


def _folder(asked: str) -> Path:
    return hub.find(asked, shipped_heads(), "head", STEMS, TORCH_FILES)[1]


def target_of(asked: str) -> str | None:
    """What a head's folder calls its target; None where it does not say it as `specjax.models.load` could find it.

    Args:
      asked: see `head_line`.

    Raises:
      ValueError: where there is no such head.
    """
    line = head_line(asked)
    stored = parse("drafter", DRAFTERS, line)
    named = isinstance(stored, Stored) and read_json(config_file(_folder(stored.found()))).get("target")
    return named.get("name") if isinstance(named, dict) else None


def check_format(asked: str, layout: str) -> None:
    """Raises ValueError where there is no such head, or the format is unknown or has no place for it; see `write`."""
    from specjax.draft.heads.writing import check_format

    check_format(layout, _name(head_line(asked)))


def write(asked: str, folder: str | os.PathLike[str], layout: str, target: Any, dtype: Any = None) -> tuple[str, ...]:
    """Writes a head in a published format, one of `specjax.draft.heads.writing.FORMATS`.

    Args:
      asked: see `head_line`.
      folder: created where needed.
      layout: the format.
      target: what `specjax.models.load` returned.
      dtype: the type to write; None is the target's.

    Returns:
      What other engines may not do with it, a sentence each.

    Raises:
      ValueError: where the head cannot be loaded for this target, or the format has no place for it.
    """
    from specjax.draft.heads.writing import write_head

    check_format(asked, layout)
    _, head = named_head(head_line(asked), target)
    return write_head(folder, layout, head.drafter, head.params, target, dtype)


def drafter_of(folder: Path) -> str:
    """Which drafter a head's folder is for, by its `config.json` and, where that says nothing, by the names of its tensors.

    Raises:
      ModelError: where neither says it.
    """
    config = read_json(config_file(folder))
    if "drafter" in config:
        return str(config["drafter"])
    for name in ("medusa", "hydra"):
        if f"{name}_num_heads" in config:
            return name
    if "num_special_tokens" in config:
        return "ppd"
    kind, named = config.get("speculators_model_type"), str(config.get("architectures")).lower()
    nested = an_object("dflash_config", config.get("dflash_config"))
    if "dflash_config" in config or "num_anchors" in config:
        return "dspark" if nested.get("markov_rank", config.get("markov_rank")) else "dflash"
    if "gemma4assistant" in named or config.get("model_type") == "gemma4_assistant":
        return "gemma4_assistant"
    for name in ("mtp", "peagle", "dspark", "dflash"):
        if kind == name or name in named:
            return name
    if "eagle3" in named or config.keys() & {"speculators_model_type", "draft_vocab_size", "eagle_config", IDS}:
        return "eagle3"
    if is_size(config.get("num_nextn_predict_layers", config.get("num_mtp_layers"))):
        return "mtp"
    names = read_tensors(folder)
    if "clover_norm.weight" in names:
        return "clover2"
    if any(name.endswith("hidden_norm.weight") for name in names):
        return "eagle3"
    if "fc.weight" in names:
        return "eagle1"
    if "0.0.linear.weight" in names or "medusa_head.0.0.linear.weight" in names:
        return "medusa"
    if "layers.0.self_attn.q_proj.weight" in names and not any(".mlp." in name for name in names):
        return "kangaroo"
    raise ModelError(
        f"{folder / 'config.json'} does not say which drafter it is for: give a line, such as eagle3:model=FOLDER"
    )


def record(name: str, head: Head) -> dict[str, Any]:
    """What was read, as JSON: the drafter, the file's format, the target's layers whose outputs it reads, and its vocabulary.

    Taps are the drafter's own. The final hidden state, which most heads read, is none of them.

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
