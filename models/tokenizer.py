"""Tokenizers come from transformers; a folder without one works with ids."""

import contextlib
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from specjax.models.errors import ModelError

_VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json")


def load(folder: Path) -> Any:
    """The folder's tokenizer, or None when it has no vocabulary file.

    Raises:
      ModelError: when transformers cannot read the files.
    """
    if not any((folder / name).is_file() for name in _VOCABULARIES):
        return None
    with _no_advice():
        from transformers import AutoTokenizer

    try:
        with _unbothered_by_config():
            return AutoTokenizer.from_pretrained(str(folder))
    except Exception as error:  # the tokenizers library raises bare Exception on a malformed file
        raise ModelError(f"{folder}: the tokenizer files cannot be read ({error}); fetch or remove them") from error


@contextlib.contextmanager
def _no_advice() -> Iterator[None]:
    """At its import transformers says that without torch there are only tokenizers, and nothing else is used here."""
    quiet = lambda record: False
    logger = logging.getLogger("transformers")
    logger.addFilter(quiet)
    try:
        yield
    finally:
        logger.removeFilter(quiet)


@contextlib.contextmanager
def _unbothered_by_config() -> Iterator[None]:
    """transformers reads config.json beside the tokenizer's own files, and warns of model types that it does not know."""
    from transformers.utils import logging as talk

    before = talk.get_verbosity()
    talk.set_verbosity_error()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            yield
    finally:
        talk.set_verbosity(before)
