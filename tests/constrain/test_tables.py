"""Tables of constraints: equal to enumeration over a small vocabulary, and to the masks of llguidance and outlines-core."""

import dataclasses
import functools
import itertools
import os.path
import re

import numpy as np
import pytest
from support.constraints import vocabulary

from specjax.constrain import compiled, read, regular
from specjax.constrain.regular import automaton
from specjax.constrain.tokens import table_of

pytest.importorskip("outlines_core")


@dataclasses.dataclass(frozen=True)
class Words:
    """A vocabulary of given texts; its last token ends a text."""

    tokens: tuple[bytes | None, ...]

    @property
    def size(self):
        return len(self.tokens)

    @property
    def eos(self):
        return (self.size - 1,)


SMALL = Words((b"a", b"b", b"ab", b"ba", b"\xc3", b"\xa9", "é".encode(), None))
"""Tokens that overlap, and a character in parts."""
PATTERNS = ("(ab)*", "a{2,3}b?", "(a|ba)+é?", "[^a]b|é{2}", "a*b*", "^ab|b$", "(a|b)*abb", "éa?|aaaaa")
LONGEST = 5


def texts(count):
    """All sequences of up to so many tokens of `SMALL`, without an end."""
    return (row for n in range(count + 1) for row in itertools.product(range(SMALL.size - 1), repeat=n))


def write(row):
    return b"".join(SMALL.tokens[token] for token in row)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_allowed_is_what_can_be_completed(pattern):
    """A token is allowed if and only if some sequence of tokens completes the text, and within the room that is left."""
    table = table_of(automaton(pattern, pattern), SMALL, pattern)
    inside = {row for row in texts(LONGEST) if _is_in(pattern, write(row))}
    shortest: dict[tuple[int, ...], int] = {}
    for row in inside:
        for cut in range(len(row) + 1):
            shortest[row[:cut]] = min(shortest.get(row[:cut], LONGEST), len(row) - cut)
    assert table.distance[0] == shortest[()]
    for row in texts(3):
        state = functools.reduce(lambda state, token: state if state < 0 else table.next(state, token), row, 0)
        if row in shortest:
            assert table.distance[state] == shortest[row]
        if state < 0:
            assert row not in shortest
            continue
        for room in range(1, LONGEST - len(row) + 1):
            want = [shortest.get((*row, token), LONGEST) < room for token in range(SMALL.size - 1)]
            assert table.allowed(state, room).tolist() == [*want, row in inside], (row, room)
    assert {row for row in texts(LONGEST) if table.accepts(row)} == inside


def _is_in(pattern, text):
    try:
        return re.fullmatch(pattern, text.decode()) is not None
    except UnicodeDecodeError:
        return False


@pytest.mark.parametrize("pattern", ("ab(a|b)aé", "abéab|b", "abab|ba", "b(ab)?"))
def test_guesses_are_what_every_text_goes_on_with(pattern):
    """The longest token of these; where only an end may come, that."""
    table, seen = table_of(automaton(pattern, pattern), SMALL, pattern), set()
    inside = [row for row in texts(LONGEST) if _is_in(pattern, write(row))]
    for before in {row[:cut] for row in inside for cut in range(len(row) + 1)}:
        state = functools.reduce(table.next, before, 0)
        rests = {write(row)[len(write(before)) :] for row in inside if row[: len(before)] == before}
        shared = os.path.commonprefix(sorted(rests)) if b"" not in rests else b""
        fits = [token for token, text in enumerate(SMALL.tokens) if text and shared.startswith(text)]
        want = max(fits, key=lambda token: len(SMALL.tokens[token])) if fits else SMALL.eos[0] if rests == {b""} else -1
        assert table.guess[state] == want, before
        assert table.forced((*before, SMALL.eos[0])) - table.forced(before) == (want != -1)
        seen.add(want)
    assert len(seen) > 2 and -1 in seen


def test_tables_are_small():
    """States are as few as the language needs, and tokens that act alike are one class."""
    table = table_of(automaton("(a|b)*abb", ""), SMALL, "")
    assert table.following.shape == (5, 5)  # four states and the end; a as ba, b, ab, the end, and all others
    letters = Words((*(bytes([byte]) for byte in range(97, 123)), None))
    assert table_of(automaton("[a-z]+", ""), letters, "").following.shape == (3, 2)


REGEXES = (
    r"[a-z]+(, [a-z]+){2}\.", r'"([^"\\]|\\.){0,12}"', r"(yes|no|perhaps) [0-9]{1,3}%?", r"\p{Lu}\w* (is|was) .{3,10}",
    r'\{"name": ?"[^"]*", ?"age": ?(0|[1-9][0-9]*)\}', r"(?:[^a]|ab?)*",
)  # fmt: skip


WALKS, STEPS = 12, 30


class Listed:
    """A vocabulary as llguidance reads one."""

    bos_token_id = None

    def __init__(self, own):
        self.tokens = [text or b"<>" for text in own.tokens]
        self.eos_token_id, self.encode = own.eos[0], own.tokenizer.encode
        self.special_token_ids = [token for token, text in enumerate(own.tokens) if text is None]

    def __call__(self, text):
        return self.encode(text.decode(), add_special_tokens=False)


@pytest.mark.parametrize("regex", REGEXES)
def test_masks_are_those_of_another_matcher(regex):
    """Along random walks. llguidance follows derivatives of the expression. Where only one text may follow, its masks hold
    just that text's usual tokens; for others it is asked one by one.
    """
    guidance = pytest.importorskip("llguidance")
    from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask

    own, table = vocabulary(), compiled(f"regex:{regex}", vocabulary())
    tokenizer, grammar = (
        guidance.LLTokenizer(guidance.TokenizerWrapper(Listed(own))),
        guidance.LLMatcher.grammar_from_regex(regex),
    )
    bits, rng, steps = allocate_token_bitmask(1, own.size), np.random.default_rng(0), 0
    for _ in range(WALKS):
        matcher, state = guidance.LLMatcher(tokenizer, grammar), 0
        for _ in range(STEPS):
            allowed = set(np.flatnonzero(table.allowed(state)).tolist())
            fill_next_token_bitmask(matcher, bits, 0)
            masked = set(np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little")[: own.size]).tolist())
            assert masked <= allowed and all(matcher.validate_tokens([token]) == 1 for token in allowed - masked)
            token = int(rng.choice(sorted(allowed)))
            if token in own.eos:
                break
            assert matcher.consume_token(token)
            state, steps = table.next(state, token), steps + 1
        assert not matcher.is_error()
    assert steps > 2 * WALKS


ERRORS = {
    "regex:(": "the expression cannot be compiled", "regex:a(?=b)": "the expression cannot be compiled",
    "regex:a|^b": "the expression cannot be compiled",
    "regex:[^\\x00-\\x{10FFFF}]": "it matches no text", "regex:a{900}": "905 states, and at most 512",
    "regex:(\\w{50}){90}": "more than 100000 signs", "choice:a||b": "a choice is empty",
    "json:{": "the schema is not JSON", "json:no/such.json": "no/such.json cannot be read (No such file or directory)",
}  # fmt: skip


@pytest.mark.parametrize("line", ERRORS)
def test_errors_are_one_line(line, monkeypatch):
    monkeypatch.setattr(regular, "MOST_STATES", 512)
    with pytest.raises(ValueError, match=re.escape(ERRORS[line])) as error:
        compiled(line, vocabulary())
    assert str(error.value).startswith("constraint ") and "\n" not in str(error.value) and len(str(error.value)) < 200


def test_a_language_that_the_tokens_cannot_write():
    with pytest.raises(ValueError, match="constraint c[+]: no sequence of this tokenizer's tokens"):
        table_of(automaton("c+", ""), SMALL, "c+")
    assert table_of(automaton("c+|ab", ""), SMALL, "").distance[0] == 1


def test_what_a_user_may_give():
    assert read({"choice": ["a|b", "c"]}) == 'choice:["a|b", "c"]' and read({"regex": "a+"}) == "regex:a+"
    assert read(()) == read("") == read(None) == ""
    table = compiled({"choice": ["yes|no", "(yes)"]}, vocabulary())
    assert table == compiled('choice:["yes|no", "(yes)"]', vocabulary()) == compiled(table, vocabulary())
    assert len({compiled(f"choice:{words}", vocabulary()) for words in ("a|b", "a|c", "b|a")}) == 3
    for wrong in (
        "yes",
        "yaml:a",
        "json:",
        "choice:",
        3,
        {"choice": "a"},
        {"json": 1},
        ["a"],
        {"regex": "a", "choice": []},
    ):
        with pytest.raises((ValueError, TypeError)):
            read(wrong)


def test_a_limit_or_a_vocabulary_that_does_not_fit():
    table = compiled("choice:perhaps|certainly", vocabulary())
    with pytest.raises(
        ValueError, match=f"its shortest text has {table.distance[0]} tokens, and the limit is 1: raise"
    ):
        compiled("choice:perhaps|certainly", vocabulary(), room=1)
    for change, said in (
        ({"eos": ()}, "needs a token that ends it"), ({"tokenizer": None}, "has no tokenizer"), ({"size": 99}, "has 99$"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=said):
            compiled(table, dataclasses.replace(vocabulary(), **change))
