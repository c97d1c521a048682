"""Questions as chat messages, and the chat template that turns them into text."""

import functools

import jinja2.sandbox

from specjax.tasks.base import Question

ROLES = ("system", "user", "assistant")
TURN_TOKENS = ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>")
"""The template's special tokens. The last one ends a turn, so it is the end-of-text token of a chat model."""

CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message['role'] not in ['system', 'user', 'assistant'] -%}"
    "{{ raise_exception('a role is system, user or assistant, not ' + message['role']) }}"
    "{%- endif -%}"
    "{{ '<|' + message['role'] + '|> ' + message['content'] | trim + '<|end|>' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|assistant|>' }}{%- endif -%}"
)
"""The chat template. A turn is its role's token, a space, its text and the end token, so an answer begins with a space,
like copied words."""


def messages(question: Question, answered: bool = False) -> list[dict[str, str]]:
    """A question as chat messages; with `answered`, its first answer is included."""
    asked = [{"role": "user", "content": question.prompt}]
    return [*asked, {"role": "assistant", "content": question.answers[0]}] if answered else asked


def _refuse(words: str):
    raise ValueError(words)


@functools.cache
def _template() -> jinja2.Template:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(CHAT_TEMPLATE)


def render(said: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
    """Chat messages as text, as a tokenizer with this template renders them.

    >>> render([{"role": "user", "content": "Say yes."}])
    '<|user|> Say yes.<|end|><|assistant|>'

    Raises:
      ValueError: on an unknown role.
    """
    return _template().render(messages=said, add_generation_prompt=add_generation_prompt, raise_exception=_refuse)
