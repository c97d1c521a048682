"""Chat templates that jinja2 renders alone, with what transformers makes of them."""

import functools
from collections.abc import Sequence
from typing import Any

_GIVEN = {"messages", "add_generation_prompt", "raise_exception"}
"""What a template may read; one that reads anything else (tokens, tools, dates) is left to transformers."""


def is_plain(template: Any) -> bool:
    """Whether a template reads messages, and nothing that transformers alone knows of."""
    if not isinstance(template, str):
        return False
    from jinja2 import TemplateError, meta

    try:
        return meta.find_undeclared_variables(_environment().parse(template)) <= _GIVEN
    except TemplateError:  # a tag of transformers' own among others
        return False


def are_plain(messages: Any) -> bool:
    """Whether there are messages, and they have a role and content of text, or of parts of text, and nothing more."""
    return (
        bool(messages)
        and isinstance(messages, Sequence)
        and all(
            isinstance(message, dict)
            and {*message} == {"role", "content"}
            and isinstance(message["role"], str)
            and (isinstance(message["content"], str) or _are_parts(message["content"]))
            for message in messages
        )
    )


def _are_parts(content: Any) -> bool:
    return isinstance(content, list) and all(
        isinstance(part, dict) and {*part} == {"type", "text"} and all(isinstance(v, str) for v in part.values())
        for part in content
    )


def render(template: str, messages: Sequence[dict[str, Any]], add_generation_prompt: bool = False) -> str:
    """Messages in a plain template; raises what the template raises.

    >>> render("{% for m in messages %}{{ m.role }}: {{ m.content }} {% endfor %}", [{"role": "user", "content": "Hi"}])
    'user: Hi '
    """
    return _compiled(template).render(messages=messages, add_generation_prompt=add_generation_prompt)


@functools.cache
def _compiled(template: str) -> Any:
    return _environment().from_string(template)


def _environment() -> Any:
    from jinja2 import TemplateError
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    made: Any = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    made.globals["raise_exception"] = raise_exception
    return made
