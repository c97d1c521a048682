"""Oracle for SAM decoding: a suffix automaton, built token by token."""

import dataclasses


@dataclasses.dataclass
class State:
    """A set of substrings that end at the same places.

    Attributes:
      length: of the longest.
      link: the state of the longest suffix that ends at more places; -1 for the root.
      first: where the first of these places ends, counted from 1.
      following: the state after each token.
    """

    length: int
    link: int
    first: int
    following: dict[int, int]


class Automaton:
    """Oracle: a text's suffix automaton, and the longest suffix of the text that occurred before."""

    def __init__(self) -> None:
        self.states = [State(0, -1, 0, {})]
        self.last = 0
        self.cursor = (0, 0)

    def match(self, token: int) -> tuple[int, int]:
        """The state and the length of the longest match of the text and one more token within the text."""
        state, length = self.cursor
        while state and token not in self.states[state].following:
            state = self.states[state].link
            length = self.states[state].length
        if token not in self.states[state].following:
            return 0, 0
        return self.states[state].following[token], length + 1

    def add(self, token: int) -> None:
        """Extends the text."""
        self.cursor = self.match(token)
        states, new = self.states, len(self.states)
        states.append(State(states[self.last].length + 1, 0, states[self.last].length + 1, {}))
        at = self.last
        while at >= 0 and token not in states[at].following:
            states[at].following[token] = new
            at = states[at].link
        if at >= 0:
            other = states[at].following[token]
            if states[other].length == states[at].length + 1:
                states[new].link = other
            else:
                split = len(states)
                old = states[other]
                states.append(State(states[at].length + 1, old.link, old.first, dict(old.following)))
                while at >= 0 and states[at].following.get(token) == other:
                    states[at].following[token] = split
                    at = states[at].link
                old.link = states[new].link = split
        self.last = new
