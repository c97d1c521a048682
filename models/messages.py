"""Chat messages: their checks, and how a chat template writes them up to the point where the assistant continues."""

from collections.abc import Mapping, Sequence
from typing import Any

_OPEN = "\N{OBJECT REPLACEMENT CHARACTER}"
"""A marker that is put into a message to find its place in the rendered text."""
Messages = Sequence[Mapping[str, Any]]


def checked(tokenizer: Any, messages: Messages, model: str) -> list[dict[str, Any]]:
    """Checks messages, and returns them as the tokenizer's chat template reads them.

    Content is text, or a list of parts `{"type": "text", "text": ...}`: if the template does not read parts, their
    texts are joined. A message with `tool_calls` may have null content, which is left to the template.

    Args:
      tokenizer: a transformers tokenizer.
      messages: the messages.
      model: the model's name, for errors.

    Raises:
      ValueError: without a chat template; on a message without role or content, or content of another kind, such as an image.
    """
    if not all(isinstance(m, Mapping) and isinstance(m.get("role"), str) and "content" in m for m in messages):
        raise ValueError("every message must be an object with a role (a string) and content")
    if not tokenizer.chat_template:
        raise ValueError(
            f"{model} has no chat template, so it cannot take messages, nor a prompt as one: give a prompt without --chat"
            f"{_who_chats()}"
        )
    given = [{**message, "content": _content(message, n, model)} for n, message in enumerate(messages, start=1)]
    if not any(isinstance(message["content"], list) for message in given) or _reads_parts(tokenizer):
        return given
    return [{**message, "content": content_text(message)} for message in given]


def _who_chats() -> str:
    """The end of an error message that names the shipped models with a chat template; empty if there are none."""
    from specjax.models import shipped
    from specjax.models.tokenizer import load

    names = [name for name, folder in shipped().items() if getattr(load(folder), "chat_template", None)]
    return f", or choose a model that chats (shipped: {', '.join(names)})" if names else ""


def content_text(message: Mapping[str, Any]) -> Any:
    """The text of a message; the texts of parts are joined.

    >>> content_text({"role": "user", "content": [{"type": "text", "text": "Sort "}, {"type": "text", "text": "it."}]})
    'Sort it.'
    """
    content = message["content"]
    return "".join(part["text"] for part in content) if isinstance(content, list) else content


def _content(message: Mapping[str, Any], number: int, model: str) -> Any:
    content = message["content"]
    if isinstance(content, str) or content is None and message.get("tool_calls"):
        return content
    if not isinstance(content, (list, tuple)):
        raise ValueError(f"the content of message {number} must be text or a list of parts, not {content!r:.40}")
    for place, part in enumerate(content, start=1):
        kind = part.get("type") if isinstance(part, Mapping) else part
        if kind != "text":
            raise ValueError(
                f"part {place} of message {number} is {kind!r:.40}, and {model} reads text alone: give parts "
                '{"type": "text", "text": ...}, and leave the others out'
            )
        if not isinstance(part.get("text"), str):
            raise ValueError(f"part {place} of message {number} has no text")
    return [{"type": "text", "text": part["text"]} for part in content]


def _reads_parts(tokenizer: Any) -> bool:
    """Whether the template writes a text part in the same way as the text itself."""
    said = []
    for content in (_OPEN, [{"type": "text", "text": _OPEN}]):
        try:
            said.append(tokenizer.apply_chat_template([{"role": "user", "content": content}], tokenize=False))
        except Exception:  # templates raise what they like
            return False
    return said[0] == said[1]


def rendered(tokenizer: Any, messages: Messages, model: str, continue_last: bool | None = None, **options: Any) -> str:
    """Messages in the chat template, up to where the assistant is to write. A last message of the assistant's is continued, as
    `continue_final_message` of transformers does.

    Args:
      tokenizer: a transformers tokenizer.
      messages: see `checked`.
      model: the model's name, for errors.
      continue_last: whether the last message goes on; None: where it is the assistant's.
      **options: what else `apply_chat_template` takes, such as tools.

    Raises:
      ValueError: where the template cannot render them, or does not write the last message's end.
    """
    given = checked(tokenizer, messages, model)
    continue_last = given[-1]["role"] == "assistant" if continue_last is None else continue_last
    if not continue_last:
        return render(tokenizer, given, model, add_generation_prompt=True, **options)
    last = given[-1]
    own = last["content"] or ""
    marked = (
        f"{own}{_OPEN} " if isinstance(own, str) else [*own[:-1], {**own[-1], "text": f"{own[-1]['text']}{_OPEN} "}]
    )
    text = render(tokenizer, [*given[:-1], {**last, "content": marked}], model, **options)
    before, found, after = text.rpartition(_OPEN)
    if not found or (content_text(last) or "").strip() not in before:
        raise ValueError(
            f"the chat template of {model} does not write the last message in a way that can be continued: end with a "
            "message of the user's"
        )
    return before if after.startswith(" ") else before.rstrip()  # a template that trims ends it so


def next_turn(tokenizer: Any, question: str, reply: str, model: str) -> list[int]:
    """Token ids after an assistant's turn that is still open: they end it, ask in a user's turn, and begin to reply.

    Args:
      tokenizer: one with a chat template.
      question: what the user asks.
      reply: what the reply begins with.
      model: the model's name, for errors.

    Raises:
      ValueError: where the template cannot render such turns.
    """
    turns = (("user", _OPEN), ("assistant", _OPEN), ("user", question))
    text = rendered(tokenizer, [{"role": role, "content": content} for role, content in turns], model)
    return tokenizer.encode(text.rpartition(_OPEN)[2] + reply, add_special_tokens=False, verbose=False)


def render(tokenizer: Any, messages: Messages, model: str, **options: Any) -> str:
    """Messages in the chat template, as text.

    Raises:
      ValueError: where the template cannot render them.
    """
    try:
        return tokenizer.apply_chat_template(list(messages), tokenize=False, **options)
    except Exception as error:  # templates raise what they like
        said = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"the chat template of {model} cannot render these messages: {said}") from error
