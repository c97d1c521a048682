"""Draft models before training: new ones, from the `config.json` of `--draft-config`, and what earlier ones must be."""

from pathlib import Path
from typing import Any

from specjax.draft import ModelDrafter
from specjax.draft.compact import CompactLM
from specjax.draft.heads.compact_folder import compact_folder
from specjax.models.json_file import parsed


def new_draft(file: str, target: Any, kept: int = 0) -> Any:
    """The model of a config.json; by default, its vocabulary and positions are the target's.

    If tokens are `kept`, it has no others.

    Raises:
      ValueError: on a file that is no such config, or a model that cannot draft for the target.
    """
    from specjax.models import LlamaLM, hf_config

    given = given_config(file)
    config = target.lm.config
    shared = {"vocab_size": config.vocab_size, "max_position_embeddings": config.max_position_embeddings}
    if kept and "vocab_size" in given:
        raise ValueError(
            f"--draft-config {file!r} has a vocab_size, and --draft-vocabulary says another: leave one out"
        )
    few = {"vocab_size": kept + 1} if kept else {}
    lm: Any = LlamaLM(hf_config.from_hf({"model_type": "llama", "hidden_act": "silu"} | shared | given | few))
    if kept:
        lm = CompactLM(lm, vocab_size=config.vocab_size)
    return ModelDrafter(lm).bind(target.lm).lm


def given_config(file: str) -> dict[str, Any]:
    """What the file of `--draft-config` holds.

    Raises:
      ValueError: on a file that is no JSON object.
    """
    try:
        given = parsed(Path(file).read_bytes())
    except OSError as error:
        raise ValueError(f"--draft-config {file!r}: {error.strerror or error}") from error
    except ValueError as error:
        raise ValueError(f"--draft-config {file!r} is not valid JSON: {error}") from error
    if not isinstance(given, dict):
        raise ValueError(f"--draft-config {file!r} must hold a JSON object")
    return given


def check_all_tokens(*names: str | None) -> None:
    """Raises ValueError if one of these folders, of an earlier draft model, has only a part of the target's tokens."""
    for name in names:
        if name is not None and compact_folder(name) is not None:
            raise ValueError(
                f"{name!r} is a draft model of few tokens, which starts from --draft-config, not from another one"
            )
