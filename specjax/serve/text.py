"""A prompt as a turn of a chat, and where a stop string ends a text."""

from collections.abc import Sequence
from typing import Any

from specjax.models.text import new_text


def user_turn(prompt: Any, chat: bool) -> Any:
    """A prompt, as chat messages where it is a text and `chat` is set.

    >>> user_turn("Sort it.", chat=True)
    [{'role': 'user', 'content': 'Sort it.'}]
    """
    return [{"role": "user", "content": prompt}] if chat and isinstance(prompt, str) else prompt


def find_stop(text: str | None, stop: Sequence[str]) -> int | None:
    """Where the first of the stop strings begins, or None."""
    if text is None:
        return None
    found = [at for at in (text.find(s) for s in stop if s) if at >= 0]
    return min(found, default=None)


def cut_at_stop(
    tokenizer: Any, prompt: Sequence[int], tokens: Sequence[int], stop: Sequence[str]
) -> tuple[Any, int | None]:
    """The new text up to a stop string, and how many tokens wrote that string.

    The one definition, of a text as it comes and of a record's: tokens are read one by one, and the first of them that
    completes a stop string ends the text, where the earliest string that is then complete begins. So a longer stop string that
    only a later token would complete does not matter, though it may begin before.

    Args:
      tokenizer: a transformers tokenizer, or None.
      prompt: ids before the text.
      tokens: its ids.
      stop: the stop strings.

    Returns:
      The text and None where there is no stop string; None for the text without a tokenizer.
    """
    text = new_text(tokenizer, prompt, tokens)
    if find_stop(text, stop) is None:
        return text, None
    for count in range(1, len(tokens)):
        early = new_text(tokenizer, prompt, tokens[:count]) or ""
        at = find_stop(early, stop)
        if at is not None:
            return early[:at], count
    return (text or "")[: find_stop(text, stop)], len(tokens)


def settled(text: str, stop: Sequence[str]) -> str:
    """What no later token can take back of a text without a stop string: neither half a character nor half a stop string."""
    whole = text.rstrip("\ufffd")
    return whole[: max(0, len(whole) - max((len(s) - 1 for s in stop), default=0))]
