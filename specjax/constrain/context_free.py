"""From a context-free grammar to an automaton over bytes: the texts whose rules come back to themselves `DEPTH` times at most.

The grammar is in the kind of Lark that llguidance reads, and every text of the automaton is in the language that llguidance
follows. Like llguidance, the automaton reads a text as terminals, each as long as can be: of `name: /[a-z]+/` and the
keyword `and`, the text `bigand` is one name. Only the terminals that the grammar allows at a place are looked for there.

The rules are a pushdown automaton whose stack holds what is left of each rule. A rule that ends with a call leaves nothing
on the stack, so repetitions and lists need no depth. Rules that begin with themselves are first turned round.
"""

import dataclasses
import functools
import re
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from specjax.constrain.regular import MOST_STATES, Automaton, automaton, check_states, escaped, minimal
from specjax.constrain.schema import DEPTH
from specjax.constrain.table import NONE, distances, shown

MOST_UNMERGED = 4 * MOST_STATES
"""States of the automaton before equal ones are merged."""
MOST_PLACES = 20_000
"""Places in the rules, each with its stack."""
SKIP = 0
"""The terminal of all that `%ignore` names."""
BEYOND = ((), frozenset())
"""In place of a stack: what the language has only with more depth. It allows every terminal and never ends, so a text is
never split where llguidance, which knows no depth, would go on with a terminal.
"""
_COMMON = {
    r'".*?(?<!\\)(\\\\)*?"': r'"(?:[^"\\]|\\.)*"',
    "/\\*(.|\n)*?\\*/": r"/\*[^*]*\*+(?:[^/*][^*]*\*+)*/",
}
"""Terminals of Lark's library `common` that look back or are lazy, and what they mean."""

Symbol = int | str | tuple[str, str]
"""A terminal's number, a rule's name, or a part of a rule that was turned round."""
Frame = tuple[tuple[Symbol, ...], frozenset[str]]
"""What is left of a rule, and the names of the rules that it is left of."""
Stack = tuple[Frame, ...]


def bounded(text: str, line: str) -> Automaton:
    """The minimal automaton of a grammar's texts.

    Args:
      text: the grammar, which llguidance can read.
      line: the constraint's line, for errors.

    Raises:
      ValueError: if a part has no automaton; if it is too large; if the grammar allows no text.
    """
    rules, terminals = _read(text, line)
    own = _product(_Places(_turned(rules), line), _Lexer(terminals), line)
    live = distances(own.following, own.accepts) != NONE
    if not live[0]:
        raise ValueError(
            f"{shown(line)}: the grammar allows no text, with each terminal as long as can be and rules in themselves {DEPTH} "
            "times at most"
        )
    following = np.where((own.following != NONE) & live[own.following], own.following, NONE)
    found = minimal(Automaton(following, own.accepts))
    check_states(len(found.accepts), line)
    return found


def _read(text: str, line: str) -> tuple[dict[str, list[tuple[Symbol, ...]]], list[Automaton]]:
    """The rules, and the automata of their terminals; the first one is of what is ignored."""
    lark = _lark()
    try:
        with warnings.catch_warnings():  # Python's expressions may change what Rust's keep
            warnings.simplefilter("ignore", FutureWarning)
            found = lark.Lark(text, parser="earley")
    except Exception as error:  # of lark, of Python's expressions, or of the package regex
        why = " ".join(str(error).split())[:100]
        raise ValueError(
            f"{shown(line)}: a canvas follows what the package lark reads too, not llguidance's own syntax: {why}"
        ) from error
    patterns = {own.name: _pattern(own.pattern) for own in found.terminals}
    ignored = "|".join(f"(?:{patterns.pop(name)})" for name in found.ignore_tokens)
    of = lambda name, pattern: _terminal(pattern, f"{line.partition(':')[0]}: terminal {name}")
    nothing = Automaton(np.full((1, 256), NONE, np.int32), np.zeros(1, bool))
    terminals = [of("%ignore", ignored) if ignored else nothing, *(of(*each) for each in patterns.items())]
    number = {name: at for at, name in enumerate(patterns, 1)}
    rules: dict[str, list[tuple[Symbol, ...]]] = {}
    for rule in found.rules:
        body = tuple(number[own.name] if own.is_term else str(own.name) for own in rule.expansion)
        rules.setdefault(str(rule.origin.name), []).append(body)
    return rules, terminals


def _pattern(own: Any) -> str:
    """The expression of a terminal, in Rust's syntax."""
    if own.type == "str" and not own.flags:
        return escaped(own.value)
    found = functools.reduce(lambda found, each: found.replace(*each), _COMMON.items(), own.to_regexp())
    spelled = lambda sign: f"\\x{ord(sign[1]):02x}" if sign[1].isspace() and ord(sign[1]) < 256 else sign[0]
    return re.sub(r"\\(.)", spelled, found, flags=re.DOTALL)


@functools.lru_cache(maxsize=256)
def _terminal(pattern: str, line: str) -> Automaton:
    return automaton(pattern, line)


def _turned(rules: Mapping[str, list[tuple[Symbol, ...]]]) -> dict[Symbol, list[tuple[Symbol, ...]]]:
    """Rules of which none begins with itself: `r: r a | b r | c` is any `b`, then `c`, then any `a`."""
    found: dict[Symbol, list[tuple[Symbol, ...]]] = {}
    for name, bodies in rules.items():
        bodies = [body for body in bodies if body != (name,)]
        after = [body[1:] for body in bodies if body[:1] == (name,)]
        if not after:
            found[name] = bodies
            continue
        head, tail = (name, "head"), (name, "tail")
        rest = [body for body in bodies if body[:1] != (name,)]
        found[name] = [(head,)]
        found[head] = [(*body[:-1], head) if body[-1:] == (name,) else (*body, tail) for body in rest]
        found[tail] = [(), *((*body, tail) for body in after)]
    return found


class _Places:
    """Sets of places in the rules, by number. The first one is 0, where a text begins.

    Attributes:
      allowed: for each set, the terminals that may follow.
      ends: for each set, whether a text may end.
    """

    def __init__(self, rules: Mapping[Symbol, list[tuple[Symbol, ...]]], line: str):
        self.rules, self.line = rules, line
        self.terminals = frozenset(
            own for bodies in rules.values() for body in bodies for own in body if type(own) is int
        )
        self.empty, self.first = _firsts(rules)
        self.allowed: list[frozenset[int]] = []
        self.ends: list[bool] = []
        self._steps: list[dict[int, set[Any]]] = []
        self._number: dict[frozenset[Any], int] = {}
        self._known: dict[Any, tuple[dict[int, set[Any]], bool]] = {}
        self._of(frozenset([((("start",), frozenset()),)]))

    def after(self, place: int, terminals: Iterable[int]) -> int:
        """The set after any of some terminals; -1 for none."""
        goes = frozenset(own for each in terminals for own in self._steps[place].get(each, ()))
        return self._of(goes) if goes - {BEYOND} else NONE

    def _of(self, stacks: frozenset[Any]) -> int:
        if stacks not in self._number:
            steps: dict[int, set[Any]] = {}
            ends = False
            for stack in stacks:
                own, ended = self._from(stack)
                ends = ends or ended
                for terminal, goes in own.items():
                    steps.setdefault(terminal, set()).update(goes)
            self._number[stacks] = len(self.allowed)
            self.allowed.append(frozenset(steps))
            self.ends.append(ends)
            self._steps.append(steps)
        return self._number[stacks]

    def _from(self, stack: Any) -> tuple[dict[int, set[Any]], bool]:
        """The stacks after each terminal that may follow, and whether a text may end."""
        if stack in self._known:
            return self._known[stack]
        if stack == BEYOND:
            return {terminal: {BEYOND} for terminal in self.terminals}, False
        steps: dict[int, set[Any]] = {}
        ends, seen, new = False, {stack}, [stack]
        while new:
            own = new.pop()
            if not own:
                ends = True
                continue
            head = own[-1][0][0]
            if type(head) is int:
                steps.setdefault(head, set()).add(_shortened(own))
                continue
            for after in self._entered(own, head, steps):
                if after not in seen:
                    seen.add(after)
                    new.append(after)
            if len(seen) + len(self._known) > MOST_PLACES:
                raise ValueError(
                    f"{shown(self.line)}: with its rules written out, the grammar has more than {MOST_PLACES} places: nest "
                    "less"
                )
        self._known[stack] = steps, ends
        return steps, ends

    def _entered(self, stack: Stack, rule: Symbol, steps: dict[int, set[Any]]) -> list[Stack]:
        """The stacks that begin the rule which is called; one too deep adds to `steps`, and may be empty."""
        (symbols, owners), below = stack[-1], stack[:-1]
        rest = symbols[1:]
        counted = isinstance(rule, str) and not rule.startswith("__")  # those are Lark's, for repetitions
        waiting = (*below, stack[-1]) if rest else below
        if counted and sum(rule in names for _, names in waiting) > DEPTH:
            for terminal in self.first[rule]:
                steps.setdefault(terminal, set()).add(BEYOND)
            return [_shortened(stack)] if rule in self.empty else []
        below = (*below, (rest, owners)) if rest else below
        names = (frozenset() if rest else owners) | ({rule} if counted else set())
        return [(*below, (body, names)) if body else below for body in self.rules.get(rule, [])]


def _shortened(stack: Stack) -> Stack:
    """A stack without the symbol that comes next."""
    (symbols, owners), below = stack[-1], stack[:-1]
    return (*below, (symbols[1:], owners)) if len(symbols) > 1 else below


def _firsts(rules: Mapping[Symbol, list[tuple[Symbol, ...]]]) -> tuple[set[Symbol], dict[Symbol, set[int]]]:
    """The rules that may be empty, and the terminals with which each may begin."""
    empty: set[Symbol] = set()
    first: dict[Symbol, set[int]] = {name: set() for name in rules}
    while True:
        before = len(empty) + sum(map(len, first.values()))
        for name, bodies in rules.items():
            for body in bodies:
                for own in body:
                    first[name] |= {own} if type(own) is int else first.get(own, set())
                    if own not in empty:
                        break
                else:
                    empty.add(name)
        if len(empty) + sum(map(len, first.values())) == before:
            return empty, first


@dataclasses.dataclass
class _Lexer:
    """Reads terminals side by side. What it has read so far is a tuple of terminals, each with its automaton's state."""

    terminals: list[Automaton]

    def __post_init__(self):
        every = np.concatenate([own.following for own in self.terminals])
        _, self.bytes, self.kinds = np.unique(every, axis=1, return_index=True, return_inverse=True)
        self.kinds = self.kinds.reshape(-1)
        self.rows = [own.following[:, self.bytes].tolist() for own in self.terminals]
        self.step = functools.cache(self._step)
        self.matched = functools.cache(self._matched)

    def _step(self, states: tuple[tuple[int, int], ...], kind: int) -> tuple[tuple[int, int], ...]:
        """After a byte of a kind."""
        after = ((own, self.rows[own][state][kind]) for own, state in states)
        return tuple(each for each in after if each[1] != NONE)

    def _matched(self, states: tuple[tuple[int, int], ...]) -> tuple[int, ...]:
        """The terminals that may end here."""
        return tuple(own for own, state in states if self.terminals[own].accepts[state])


def _product(places: _Places, lexer: _Lexer, line: str) -> Automaton:
    """The automaton of places in the rules, each with what the lexer has read of the next terminal."""

    def begun(place: int) -> tuple[tuple[int, int], ...]:
        allowed = places.allowed[place]
        return tuple((own, 0) for own in sorted(allowed | {SKIP} if allowed else allowed))

    def ended(place: int, states: tuple[tuple[int, int], ...]) -> int:
        matched = lexer.matched(states)
        return place if SKIP in matched else places.after(place, matched)

    start = (0, tuple((own, 0) for own in sorted(places.allowed[0])))  # nothing is ignored before a text
    number, order = {start: 0}, [start]
    following, accepts = [], []
    while len(following) < len(order):
        place, states = order[len(following)]
        after = ended(place, states)
        accepts.append(after != NONE and places.ends[after] or place == 0 and states == start[1] and places.ends[0])
        fresh = begun(after) if after != NONE else ()
        row = np.full(len(lexer.bytes), NONE, np.int32)
        for kind in range(len(lexer.bytes)):
            goes = place, lexer.step(states, kind)
            if not goes[1]:
                goes = after, lexer.step(fresh, kind)
            if not goes[1]:
                continue
            if goes not in number:
                number[goes] = len(order)
                order.append(goes)
            row[kind] = number[goes]
        following.append(row)
        if len(order) > MOST_UNMERGED:
            raise ValueError(f"{shown(line)}: its automaton has more than {MOST_UNMERGED} states: nest less")
    return Automaton(np.stack(following)[:, lexer.kinds], np.asarray(accepts, bool))


def _lark() -> Any:
    try:
        import lark
    except ImportError as error:
        raise ValueError("grammars of canvases need the package lark: pip install 'specjax[constrain]'") from error
    return lark
