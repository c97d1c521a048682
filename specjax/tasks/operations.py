"""Operations on lists and their checks: ParallelBench's (Kang et al. 2025), and a few more.

Copying, reversing, sorting and edits at a given index have one right answer; a shuffle, or an edit at a random place, has many.
Indices count from 0.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

Items = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Operation:
    """An operation.

    Attributes:
      solve: computes a right answer from items, word, index and a generator (`integers(n)`, `permutation(n)`).
      right: says whether an answer is right, from the answer, a right one, items and word.
      word: whether an item to insert is given.
      places: how many places an index can have for n items; None: no index is given.
    """

    solve: Callable[[Items, Any, Any, Any], Items]
    right: Callable[[Items, Items, Items, Any], bool]
    word: bool = False
    places: Callable[[int], int] | None = None


def _exact(answer, expected, items, word):
    return answer == expected


def _shuffled(items, word, index, rng):
    while True:
        order = tuple(items[i] for i in rng.permutation(len(items)))
        if order != items:
            return order


def _inserted(items, word, index, rng):
    return (*items[:index], word, *items[index:])


def _removed(items, word, index, rng):
    return (*items[:index], *items[index + 1 :])


def _replaced(items, word, index, rng):
    return (*items[:index], word, *items[index + 1 :])


def _any_order(answer, expected, items, word):
    return sorted(answer) == sorted(items) and answer != items


def _any_insert(answer, expected, items, word):
    if word not in answer:
        return False
    at = answer.index(word)
    return (*answer[:at], *answer[at + 1 :]) == items


def _any_removal(answer, expected, items, word):
    return any(answer == _removed(items, None, i, None) for i in range(len(items)))


def _any_replacement(answer, expected, items, word):
    return any(answer == _replaced(items, word, i, None) for i in range(len(items)))


def _anywhere(edit: Callable[..., Items], places: Callable[[int], int]) -> Callable[..., Items]:
    return lambda items, word, index, rng: edit(items, word, int(rng.integers(places(len(items)))), rng)


_between, _one_of = (lambda n: n + 1), (lambda n: n)
OPERATIONS: dict[str, Operation] = {
    "copy": Operation(lambda items, *_: items, _exact),
    "reverse": Operation(lambda items, *_: items[::-1], _exact),
    "sort": Operation(lambda items, *_: tuple(sorted(items)), _exact),
    "dedupe": Operation(lambda items, *_: tuple(dict.fromkeys(items)), _exact),
    "shuffle": Operation(_shuffled, _any_order),
    "insert_index": Operation(_inserted, _exact, True, _between),
    "insert_random": Operation(_anywhere(_inserted, _between), _any_insert, True),
    "remove_index": Operation(_removed, _exact, places=_one_of),
    "remove_random": Operation(_anywhere(_removed, _one_of), _any_removal),
    "replace_index": Operation(_replaced, _exact, True, _one_of),
    "replace_random": Operation(_anywhere(_replaced, _one_of), _any_replacement, True),
}
