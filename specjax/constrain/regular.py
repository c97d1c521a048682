"""From a regular expression to a minimal automaton over bytes. The package outlines-core compiles it."""

import dataclasses
import inspect
import marshal
import re
import subprocess
import sys
from typing import Any

import numpy as np

from specjax.constrain.table import NONE, distances, shown

MOST_STATES = 8192
"""States of an automaton over bytes."""
MOST_COUNT = MOST_STATES
"""Repetitions of a part: with more, no automaton fits."""
MOST_ATOMS = 100_000
"""Signs of an expression with all counted repetitions written out; classes of Unicode count several times."""
END = "\U0010ffff"
"""Stands after every text while it is compiled, and in none: it is no character. So no state that accepts has a step that
matters; outlines-core (0.2.14) forgets some of these: of `(ab)*` it makes an index of the empty text.
"""
BEGIN = "\U0010fffe"
"""Stands before every text while it is compiled. outlines-core also follows matches that begin later in a text, so the states
of `[1-9][0-9]{20}` would double with each digit. With the sign, a match begins nowhere else.
"""
_NO_PLACES = re.compile(r"\\[^AbBz]|\[\^")
SECONDS = 20
"""For which an expression may be compiled."""
_SPECIAL = frozenset("\\.+*?()|[]{}^$#&-~")


@dataclasses.dataclass(frozen=True)
class Automaton:
    """A deterministic automaton over bytes; state 0 is the first.

    Attributes:
      following: `[S, 256]` int32, the next state, -1 for none.
      accepts: `[S]` bool.
    """

    following: np.ndarray
    accepts: np.ndarray

    def holds(self, text: bytes) -> bool:
        """Whether a text is in the language."""
        state = 0
        for byte in text:
            state = self.following[state, byte] if state != NONE else NONE
        return state != NONE and bool(self.accepts[state])


def escaped(text: str) -> str:
    """An expression that matches a text alone."""
    return "".join(f"\\{sign}" if sign in _SPECIAL else sign for sign in text)


def automaton(pattern: str, line: str) -> Automaton:
    """The minimal automaton of the texts that an expression matches as a whole.

    Args:
      pattern: in the syntax of Rust's crate `regex`, without looking around.
      line: the constraint's line, for errors.

    Raises:
      ValueError: if it cannot be compiled, or is too large.
    """
    _outlines()
    check_size(pattern, line)
    pattern = pattern.removeprefix("^")
    if pattern.endswith("$") and (len(pattern) - len(pattern[:-1].rstrip("\\"))) % 2 == 1:
        pattern = pattern[:-1]
    begin = (
        "" if set(_NO_PLACES.sub("", pattern)) & {"^", "\\"} else BEGIN
    )  # `a|^b` is an error, and its ^ is before a text
    steps, first, finals = _index(f"{begin}(?:{pattern}){END}", line)
    for byte in begin.encode():
        first = steps.pop(first)[byte]
    names = [first, *sorted((steps.keys() | finals) - {first})]
    number = {name: at for at, name in enumerate(names)}
    check_states(len(names), line)
    following = np.full((len(names), 256), NONE, np.int32)
    for name, own in steps.items():
        for byte, after in own.items():
            if byte < 256:
                following[number[name], byte] = number[after]
    ended = np.isin(np.arange(len(names)), [number[name] for name in finals])
    return minimal(_without_end(following, ended))


def _index(pattern: str, line: str) -> Any:
    """The steps by byte of each state, the first state and those that accept.

    Some expressions take outlines-core any time: its states double with each further `(a|b)` after `(a|b)*a`. So it runs in a
    process of its own, for at most `SECONDS`. Such a process starts in some 30 ms.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", _PROGRAM], input=pattern.encode(), capture_output=True, timeout=SECONDS
        )
    except subprocess.TimeoutExpired as error:
        raise ValueError(
            f"{shown(line)}: it takes longer than {SECONDS} seconds to compile: count less, or leave alternatives out"
        ) from error
    if done.returncode:
        why = done.stderr.decode(errors="replace").strip().splitlines()[-1:] or [
            f"its compiler ended with {done.returncode}"
        ]
        raise ValueError(f"{shown(line)}: the expression cannot be compiled: {why[0]}")
    said = marshal.loads(done.stdout)
    if isinstance(said, str):
        why = "it matches no text" if "incompatible" in said else " ".join(said.split())
        raise ValueError(f"{shown(line)}: the expression cannot be compiled: {why}")
    return said


def compile_index(pattern: str) -> Any:
    """See `_index`; or what the package says is wrong."""
    import outlines_core as core

    try:
        index = core.Index(pattern, core.Vocabulary(256, {bytes([byte]): [byte] for byte in range(256)}))
    except ValueError as error:
        return str(error)
    return index.get_transitions(), index.get_initial_state(), index.get_final_states()


_SOURCE = inspect.getsource(compile_index).replace(" -> Any", "")
_PROGRAM = f"""import marshal, sys
{_SOURCE}
sys.stdout.buffer.write(marshal.dumps(compile_index(sys.stdin.buffer.read().decode())))"""


def _without_end(following: np.ndarray, ended: np.ndarray) -> Automaton:
    """The automaton of texts without the sign `END` after them."""
    at = np.arange(len(following))
    for byte in END.encode()[:-1]:
        at = np.where(at == NONE, NONE, following[at, byte])
    last = END.encode()[-1]
    after = np.where(at == NONE, NONE, following[at, last])
    accepts = (after != NONE) & ended[after]
    following = np.where((following != NONE) & ended[following], NONE, following)
    live = distances(following, accepts) != NONE
    return Automaton(np.where((following != NONE) & live[following], following, NONE), accepts)


def minimal(own: Automaton) -> Automaton:
    """The same language with the fewest states: classes of states are refined until they agree on every byte (Moore).

    The first classes are those of equal distance to the end of a text, which equal states share. Two states' steps are
    compared by sums with random 64-bit weights.
    """
    columns = np.unique(own.following, axis=1)
    weights = np.random.default_rng(0).integers(1, 2**63, columns.shape[1] + 1, dtype=np.uint64) * np.uint64(
        2
    ) + np.uint64(1)
    classes, count = distances(own.following, own.accepts).astype(np.int64), 0
    while True:
        after = np.where(columns == NONE, 0, classes[columns] + 1).astype(np.uint64)
        sums = after @ weights[1:] + classes.astype(np.uint64) * weights[0]
        _, first, classes = np.unique(sums, return_index=True, return_inverse=True)
        if len(first) == count:
            break
        count = len(first)
    order = np.argsort(classes[first] != classes[0], kind="stable")  # the first state stays first
    number = np.argsort(order)[classes]
    kept = first[order]
    following = np.where(own.following[kept] == NONE, NONE, number[own.following[kept]]).astype(np.int32)
    return Automaton(following, own.accepts[kept])


def check_size(pattern: str, line: str) -> None:
    """Raises ValueError if an expression is so large that compiling it would take minutes."""
    sizes, last = [0], 0
    at = 0
    while at < len(pattern):
        sign = pattern[at]
        if sign == "\\":
            last = 60 if pattern[at + 1 : at + 2] in ("w", "W", "d", "D", "s", "S", "p", "P") else 1
            at += 1
        elif sign == "[":
            end = pattern.find("]", at + 2)
            own = pattern[at : end if end > 0 else len(pattern)]
            last = 60 if re_class(own) else 1
            at = end if end > 0 else len(pattern)
        elif sign == "(":
            sizes.append(0)
            last = 0
        elif sign == ")" and len(sizes) > 1:
            last = sizes.pop()
        elif sign == "{":
            end = pattern.find("}", at)
            counts = pattern[at + 1 : end].split(",") if end > 0 else []
            most = max([int(count) for count in counts if count.isdigit()], default=1)
            sizes[-1] += last * (most - 1) if most <= MOST_COUNT else MOST_ATOMS + 1
            last *= most
            at = (end if counts else at) + 1
            continue
        else:
            last = 8 if sign == "." else 1
        sizes[-1] += last if sign != "(" else 0
        at += 1
    if sum(sizes) > MOST_ATOMS:
        raise ValueError(
            f"{shown(line)}: with its repetitions written out, the expression has more than {MOST_ATOMS} signs: count less"
        )


def re_class(own: str) -> bool:
    """Whether a class of signs may hold many of Unicode."""
    return own.startswith("[^") or any(f"\\{kind}" in own for kind in "wWdDsSpP")


def check_states(count: int, line: str) -> None:
    if count > MOST_STATES:
        raise ValueError(
            f"{shown(line)}: its automaton has {count} states, and at most {MOST_STATES} fit: count less, or nest less"
        )


def _outlines():
    try:
        import outlines_core
    except ImportError as error:
        raise ValueError("constraints need the package outlines-core: pip install 'specjax[constrain]'") from error
    return outlines_core
