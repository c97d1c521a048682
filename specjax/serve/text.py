"""From prompts to token ids, from token ids to new text, and where a stop string ends it."""

import functools
from collections.abc import Sequence
from typing import Any


def encode_text(tokenizer: Any, prompt: str | Sequence[dict[str, Any]], model: str) -> list[int]:
    """Token ids of a text, or of chat messages through the tokenizer's chat template.

    Args:
      tokenizer: a transformers tokenizer.
      prompt: text, or messages.
      model: the model's name, for errors.

    Raises:
      ValueError: on text that is not Unicode, or messages that there is no template for or that it cannot render.
    """
    if isinstance(prompt, str):
        check_unicode(prompt, "prompt")
        return tokenizer.encode(prompt, verbose=False) if prompt else []
    if not all(isinstance(m, dict) and isinstance(m.get("role"), str) and "content" in m for m in prompt):
        raise ValueError("every message must be an object with a role (a string) and content")
    if not tokenizer.chat_template:
        raise ValueError(
            f"{model} has no chat template, so it cannot take messages, nor a prompt as one: give a prompt without --chat"
            f"{_who_chats()}"
        )
    try:
        text = tokenizer.apply_chat_template(list(prompt), add_generation_prompt=True, tokenize=False)
    except Exception as error:  # templates raise what they like
        raise ValueError(f"the chat template of {model} cannot render these messages: {_line(error)}") from error
    # the template writes special tokens itself
    return tokenizer.encode(text, add_special_tokens=False, verbose=False) if text else []


def _who_chats() -> str:
    """The shipped models with a chat template, as the end of an error; empty where there are none."""
    from specjax.models import shipped
    from specjax.models.tokenizer import load

    names = [name for name, folder in shipped().items() if getattr(load(folder), "chat_template", None)]
    return f", or choose a model that chats (shipped: {', '.join(names)})" if names else ""


def user_turn(prompt: Any, chat: bool) -> Any:
    """A prompt, as chat messages where it is a text and `chat` is set.

    >>> user_turn("Sort it.", chat=True)
    [{'role': 'user', 'content': 'Sort it.'}]
    """
    return [{"role": "user", "content": prompt}] if chat and isinstance(prompt, str) else prompt


def check_unicode(text: str, what: str) -> None:
    """Raises ValueError, naming `what`, where a text is not Unicode."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"the {what} is not valid Unicode: {error.reason} at character {error.start}") from error


def _line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


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
