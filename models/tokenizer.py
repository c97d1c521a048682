"""Tokenizers: transformers' own, or an equivalent (`specjax.models.plain_tokenizer`). A folder without one works with ids.

`specjax.models.ranked_tokenizer` reads folders that have other files than transformers' `tokenizer.json`.
"""

import contextlib
import functools
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from specjax.models import ranked_tokenizer
from specjax.models.errors import ModelError
from specjax.models.json_file import read_json
from specjax.models.plain_tokenizer import plain

PIECES = ("spiece.model", "sentencepiece.bpe.model", "source.spm")
"""Files of SentencePiece of T5, mBART and Marian, which transformers reads with the package sentencepiece."""


def load(folder: Path) -> Any:
    """The folder's tokenizer, with the methods of transformers', or None if it has no vocabulary file.

    Code in a folder is never run, and there is no option to allow it.

    Raises:
      ModelError: if the files cannot be read, or if the tokenizer is code in the folder.
    """
    if any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model")):
        found = plain(folder, functools.partial(_transformers, folder))
        return _transformers(folder) if found is None else found
    if any((folder / name).is_file() for name in PIECES):
        return _transformers(folder)
    file = ranked_tokenizer.found(folder)
    if file is None:
        return _transformers(folder) if (folder / ranked_tokenizer.VOCAB).is_file() else None
    with _no_advice():
        import transformers  # noqa: F401
    if file.name == ranked_tokenizer.VOCAB:
        _check_code(folder)
    with _unbothered_by_config():
        return ranked_tokenizer.load(file)


def _transformers(folder: Path) -> Any:
    """Transformers' own tokenizer."""
    with _no_advice():
        from transformers import AutoTokenizer

    _check_code(folder)
    try:
        with _unbothered_by_config():
            return AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False, **_stand_in(folder))
    except Exception as error:  # the tokenizers library raises bare Exception on a malformed file
        _check_config(folder)
        reason = " ".join(str(error).split())
        raise ModelError(f"{folder}: the tokenizer files cannot be read ({reason}); fetch or remove them") from error


def _check_code(folder: Path) -> None:
    """Raises ModelError if `tokenizer_config.json` asks for a class that only the folder's code defines."""
    import transformers

    file = folder / "tokenizer_config.json"
    config = read_json(file) if file.is_file() else {}
    asked, name = config.get("auto_map"), config.get("tokenizer_class")
    asked = asked.get("AutoTokenizer") if isinstance(asked, dict) else asked
    if asked and not (isinstance(name, str) and hasattr(transformers, name)):
        raise ModelError(
            f"{file} asks for code of the folder's own (auto_map), and specjax never runs such code: give a tokenizer.json "
            "that splits text as that code does, and take auto_map and tokenizer_class out of that file"
        )


def _stand_in(folder: Path) -> dict[str, Any]:
    """A bare config for a model type that transformers does not know. Transformers would still read the folder's config
    field by field, and fail on some fields (scaled rope)."""
    from transformers import CONFIG_MAPPING, PretrainedConfig

    file = folder / "config.json"
    raw = read_json(file) if file.is_file() else {}
    kind = raw.get("model_type")
    if not isinstance(kind, str) or kind in CONFIG_MAPPING:
        return {}
    return {"config": PretrainedConfig.from_dict({"tokenizer_class": raw.get("tokenizer_class")})}


def _check_config(folder: Path) -> None:
    """Raises ModelError if transformers rejects a field of `config.json`, which it reads to choose a tokenizer."""
    from transformers import AutoConfig

    try:
        with _unbothered_by_config():
            AutoConfig.from_pretrained(str(folder), trust_remote_code=False)
    except (ValueError, OSError):  # a model type unknown to transformers, or no config.json: not an error here
        return
    except Exception as error:  # the type depends on transformers' own checks
        reason = " ".join(str(error).split())
        raise ModelError(f"{folder / 'config.json'} has a field that transformers does not accept: {reason}") from error


@contextlib.contextmanager
def _no_advice() -> Iterator[None]:
    """Silences transformers' message at import that only tokenizers work without torch; nothing else is used here."""
    quiet = lambda record: False
    logger = logging.getLogger("transformers")
    logger.addFilter(quiet)
    try:
        yield
    finally:
        logger.removeFilter(quiet)


@contextlib.contextmanager
def _unbothered_by_config() -> Iterator[None]:
    """Silences transformers' warning about unknown model types: it reads config.json beside the tokenizer's own
    files."""
    from transformers.utils import logging as talk

    before = talk.get_verbosity()
    talk.set_verbosity_error()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            yield
    finally:
        talk.set_verbosity(before)
