"""The tree of observations and the programs that are written from it, apart from the model that is asked."""

import ast
import dataclasses
import itertools
import json
from collections.abc import Callable, Sequence

import numpy as np

Messages = list[dict[str, str]]
Ask = Callable[[list[Messages], float | None], list[str]]
"""From chats, and a temperature or None for the usual one, to a reply for each; an empty one if there is none."""

SYSTEM = "You are an expert at programming contests. You answer in a few clear words."
CODER = "You are an expert programmer. You write correct and fast programs."
PARSES = (0.0, 0.2, 0.4)
"""The temperatures at which a list is asked for as JSON, one after the other until it is one."""
FIRST = (
    "Here is a programming problem:\n\n{problem}\n\nDo not solve it yet. Give {count} observations that are true and help to "
    "solve it: properties of the input, special cases, ideas for an algorithm."
)
DERIVED = (
    "Here is a programming problem:\n\n{problem}\n\nThese observations about it are right:\n{observations}\n\nDo not solve it "
    "yet. Give new observations that follow from these, or that combine them."
)
LISTED = "Write these observations as a list, one per line, each with all that is needed to understand it alone."
USEFUL = "Leave out those that are wrong, trivial or of no use for the problem, and write the list again."
AS_JSON = "Write the list as a JSON list of strings and nothing else."
SKETCH = (
    "Here is a programming problem:\n\n{problem}\n\n{given}Write a solution in plain words, step by step and without code. "
    "Quote each observation word for word where you use it."
)
CRITICISM = (
    "Here is a programming problem:\n\n{problem}\n\nHere is a solution in plain words:\n\n{sketch}\n\nIs it right, and fast "
    "enough? Name every mistake."
)
FIX = "Write the solution in plain words again, without these mistakes."
PSEUDO = (
    "Here is a programming problem:\n\n{problem}\n\nHere is a solution in plain words:\n\n{sketch}\n\nWrite it as "
    "pseudo-code."
)
PROGRAM = (
    "Here is a programming problem:\n\n{problem}\n\nHere is a solution as pseudo-code:\n\n{pseudo}\n\nWrite the program in "
    "Python. Put it into one code block."
)


@dataclasses.dataclass(frozen=True)
class Program:
    """A program and how it came about.

    Attributes:
      code: the program.
      sketch: the solution in plain words that it follows.
      observations: what that solution began with.
    """

    code: str
    sketch: str
    observations: tuple[str, ...]


def programs(
    problem: str, ask: Ask, rng: np.random.Generator, *, observations: int, subset: int, layers: int
) -> list[Program]:
    """All programs for a problem, in random order.

    A set of observations, at first the empty one, is asked for further ones. Each subset of the answers, the empty one
    included, is a set of the next layer. Every distinct set gives a sketch and a corrected sketch, and each of these a
    program.

    Args:
      problem: its text.
      ask: asks the model.
      rng: shuffles.
      observations: how many are asked for at first.
      subset: the size of the largest subset.
      layers: how often sets are asked for further observations.
    """
    nodes: list[tuple[str, ...]] = [()]
    known: dict[tuple[str, ...], None] = {(): None}
    for layer in range(layers):
        if layer:
            chats = [_chat(SYSTEM, DERIVED.format(problem=problem, observations=_list(own))) for own in nodes]
        else:
            chats = [_chat(SYSTEM, FIRST.format(problem=problem, count=observations))]
        nodes = [own for found in _observed(chats, ask) for own in _subsets(found, subset, rng)]
        known |= dict.fromkeys(nodes)
    found = _written(problem, list(known), ask)
    return [found[at] for at in rng.permutation(len(found))]


def _observed(chats: list[Messages], ask: Ask) -> list[list[str]]:
    """The observations of every chat, in four turns; none where they never become a list."""
    for question in (LISTED, USEFUL, AS_JSON):
        chats = _go_on(chats, ask(chats, None), question)
    found: list[list[str] | None] = [None] * len(chats)
    for temperature in PARSES:
        left = [at for at, own in enumerate(found) if own is None]
        replies = ask([chats[at] for at in left], temperature) if left else []
        for at, reply in zip(left, replies, strict=True):
            found[at] = listed(reply)
    return [own or [] for own in found]


def _written(problem: str, sets: list[tuple[str, ...]], ask: Ask) -> list[Program]:
    """Two programs for every set of observations."""
    quoted = ["Use these observations:\n" + _list(own) + "\n\n" if own else "" for own in sets]
    sketches = ask([_chat(SYSTEM, SKETCH.format(problem=problem, given=own)) for own in quoted], None)
    chats = [_chat(SYSTEM, CRITICISM.format(problem=problem, sketch=own)) for own in sketches]
    fixed = ask(_go_on(chats, ask(chats, None), FIX), None)
    plans = [own for both in zip(sketches, fixed, strict=True) for own in both]
    pseudo = ask([_chat(CODER, PSEUDO.format(problem=problem, sketch=own)) for own in plans], None)
    code = ask([_chat(CODER, PROGRAM.format(problem=problem, pseudo=own)) for own in pseudo], None)
    origin = [own for own in sets for _ in range(2)]
    return [Program(block(own), plan, given) for own, plan, given in zip(code, plans, origin, strict=True)]


def _chat(system: str, user: str) -> Messages:
    return [{"role": "system", "content": system}, {"role": "user", "content": user}]


def _go_on(chats: list[Messages], replies: Sequence[str], question: str) -> list[Messages]:
    turns = lambda reply: [{"role": "assistant", "content": reply}, {"role": "user", "content": question}]
    return [[*chat, *turns(reply)] for chat, reply in zip(chats, replies, strict=True)]


def _list(observations: Sequence[str]) -> str:
    return "\n".join(f"- {own}" for own in observations)


def _subsets(found: Sequence[str], most: int, rng: np.random.Generator) -> list[tuple[str, ...]]:
    """All subsets of at most so many, in random order."""
    every = [own for size in range(min(most, len(found)) + 1) for own in itertools.combinations(found, size)]
    return [every[at] for at in rng.permutation(len(every))]


def block(reply: str) -> str:
    """The first code block of a reply; all of it if it has none.

    >>> block("So:\\n```python\\nprint(1)\\n```\\nDone.")
    'print(1)'
    """
    lines = reply.split("\n")
    fences = [at for at, line in enumerate(lines) if line.strip().startswith("```")]
    if not fences:
        return reply.strip()
    end = fences[1] if len(fences) > 1 else len(lines)
    return "\n".join(lines[fences[0] + 1 : end]).strip()


def listed(reply: str) -> list[str] | None:
    """The strings of a list in a reply, as JSON or Python writes one; None if there is no such list.

    >>> listed('Here: ["a", "b"].'), listed("['c']"), listed("[1]"), listed("a")
    (['a', 'b'], ['c'], None, None)
    """
    text = block(reply)
    text = text[text.find("[") : text.rfind("]") + 1]
    for read in (json.loads, ast.literal_eval):
        try:
            found = read(text)
        except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
            continue
        return found if isinstance(found, list) and all(isinstance(own, str) for own in found) else None
    return None
