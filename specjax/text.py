"""From token ids to new text, and where a stop string ends it."""

import functools
from collections.abc import Sequence
from typing import Any


def new_text(tokenizer: Any, prompt: Sequence[int], tokens: Sequence[int]) -> str | None:
    """The text that `tokens` add to `prompt`; None without a tokenizer.

    Decoded together with the prompt, since some tokenizers drop a space at the start of a text.
    """
    if tokenizer is None:
        return None
    decode = functools.partial(tokenizer.decode, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    before, both = decode(list(prompt)), decode([*prompt, *tokens])
    return both[len(before) :] if both.startswith(before) else decode(list(tokens))


def find_stop(text: str | None, stop: Sequence[str]) -> int | None:
    """Where the first of the stop strings begins, or None."""
    if text is None:
        return None
    found = [at for at in (text.find(s) for s in stop if s) if at >= 0]
    return min(found, default=None)
