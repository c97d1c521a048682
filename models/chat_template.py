"""Chat templates that jinja2 alone renders, with the same result as transformers."""

import functools
from collections.abc import Sequence
from typing import Any

_GIVEN = {"messages", "add_generation_prompt", "raise_exception"}
"""The variables that a template may read. A template that reads anything else (tokens, tools, dates) is left to
transformers."""


def is_plain(template: Any) -> bool:
    """Whether a template reads messages and nothing that only transformers provides."""
    if not isinstance(template, str):
        return False
    from jinja2 import TemplateError, meta

    try:
        return meta.find_undeclared_variables(_environment().parse(template)) <= _GIVEN
    except TemplateError:  # for example, one of transformers' own tags
        return False


def are_plain(messages: Any) -> bool:
    """Whether there are messages, each with only a role and content, and the content is text or parts of text."""
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
    """Renders messages by a plain template; raises whatever the template raises.

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
