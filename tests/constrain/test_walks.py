"""Masks along 10,000 random walks of each kind of constraint: tables have llguidance's, and grammars those of tables."""

import functools
import json

import numpy as np
import pytest
from support.constraints import vocabulary

from specjax.constrain import compiled
from specjax.constrain import grammar as grammar_module
from specjax.constrain.grammar import masks, token_set
from specjax.constrain.line import read
from specjax.constrain.regular import escaped
from specjax.constrain.schema import expression

pytestmark = [pytest.mark.slow, pytest.mark.covers("constrain", "constraint")]
pytest.importorskip("outlines_core")
guidance = pytest.importorskip("llguidance")
WALKS, STEPS = 10_000, 40
ROWS = 50
"""Walks that a grammar's masks are asked for together."""
WORDS = 48
SCHEMAS = (
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 6},
            "age": {"type": "integer", "minimum": 0, "maximum": 130},
        },
        "required": ["name"],
    },
    {"type": "array", "items": {"enum": ["red", "green", 3, None, True]}, "minItems": 1, "maxItems": 4},
    {"anyOf": [{"type": "number", "minimum": -2, "maximum": 12}, {"type": "string", "format": "date"}]},
    {"type": "object", "patternProperties": {"^x[a-c]{1,2}$": {"type": "boolean"}}, "additionalProperties": False},
)
REGEXES = (
    r"[a-z]+(, [a-z]+){2}\.", r'"([^"\\]|\\.){0,6}"', r"(yes|no|perhaps) [0-9]{1,3}%?", r"\p{Lu}\w* (is|was) .{3,10}",
    r"(?:[^a\x{10FFFF}]|ab?)*",
)  # fmt: skip
"""U+10FFFF is no character, and tables never write it; llguidance does."""
CHOICES = (
    ["yes", "no", "perhaps"],
    ["on", "one", "once", "only", "tone", "none"],
    [f"{n} apples" for n in range(0, 300, 7)],
    ["été", "étude", "naïve", "日本", "日", "🙂"],
)
GRAMMARS = (
    ('start: "[" (item ("," item)*)? "]"\nitem: /[0-9]{1,3}/\n', r"\[([0-9]{1,3}(,[0-9]{1,3})*)?\]"),
    ('start: word (" " word)* end\nword: /[a-z]{1,4}/\nend: "." | "!"\n', r"[a-z]{1,4}( [a-z]{1,4})*[.!]"),
    ('start: "a" start "b" | "c"\n', "|".join("a" * n + "c" + "b" * n for n in range(STEPS * 2))),
    ('start: ("yes" | "no" | "perhaps") (" " /[0-9]{1,3}/)?\n', r"(yes|no|perhaps)( [0-9]{1,3})?"),
)


class Steps:
    """A table with all its masks, and random steps in it."""

    def __init__(self, line):
        self.own = compiled(line, vocabulary())
        self.allowed = np.zeros((len(self.own.following), WORDS * 32), bool)
        for state, row in enumerate(self.allowed):
            row[: vocabulary().size] = self.own.allowed(state)
        self.bits = np.packbits(self.allowed, axis=1, bitorder="little").view(np.int32)

    @functools.cached_property
    def classes(self):
        """For each state, the allowed tokens by class."""
        each = []
        for row in self.allowed:
            found = np.flatnonzero(row)
            kinds = self.own.classes[found]
            each.append([found[kinds == kind].tolist() for kind in np.unique(kinds)])
        return each

    def drawn(self, state, rng):
        """A token; a class first, so that letters do not crowd the others out."""
        own = self.classes[state]
        own = own[int(rng.random() * len(own))]
        return own[int(rng.random() * len(own))]

    def agrees(self, state, bits, may):
        """Whether a mask is the table's. Where only one text may follow, llguidance has just that text's usual tokens in it,
        and the others are asked for one by one.
        """
        if np.array_equal(bits, self.bits[state]):
            return True
        masked = np.unpackbits(bits.view(np.uint8), bitorder="little").astype(bool)
        rest = np.flatnonzero(self.allowed[state] & ~masked).tolist()
        return masked.any() and not (masked & ~self.allowed[state]).any() and all(map(may, rest))


def along_a_matcher(table, pattern, walks, rng):
    """Compares the masks along walks; their number."""
    from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask

    matcher = guidance.LLMatcher(token_set(vocabulary())[1], guidance.LLMatcher.grammar_from_regex(pattern))
    bits, compared = allocate_token_bitmask(1, WORDS * 32), 0
    may = lambda token: matcher.is_accepting() if token in vocabulary().eos else matcher.validate_tokens([token]) == 1
    for _ in range(walks):
        matcher.reset()
        state = 0
        for _ in range(STEPS):
            bits[:] = 0
            fill_next_token_bitmask(matcher, bits, 0)
            assert table.agrees(state, bits[0], may), (pattern, state)
            compared += 1
            token = table.drawn(state, rng)
            if token in vocabulary().eos:
                break
            assert matcher.consume_token(token)
            state = table.own.next(state, token)
        assert not matcher.is_error()
    return compared


PATTERNS = {
    "json": (lambda own: "json:" + json.dumps(own), lambda own: expression(own), SCHEMAS),
    "regex": (lambda own: f"regex:{own}", lambda own: own, REGEXES),
    "choice": (lambda own: read({"choice": own}), lambda own: "|".join(map(escaped, own)), CHOICES),
}
"""For each kind, its lines, their expressions and what is walked through."""


@pytest.mark.parametrize("kind", PATTERNS)
def test_masks_of_tables(kind, capsys):
    """llguidance follows derivatives of the expression, and knows no table."""
    line, pattern, languages = PATTERNS[kind]
    rng = np.random.default_rng(0)
    compared = sum(along_a_matcher(Steps(line(own)), pattern(own), WALKS // len(languages), rng) for own in languages)
    with capsys.disabled():
        print(f"\n{kind}: {compared} masks along {WALKS} walks")
    assert compared > 2 * WALKS


@pytest.mark.parametrize("grammar, pattern", GRAMMARS)
def test_masks_of_grammars(grammar, pattern, capsys):
    """Each language is regular, or finite as far as the walks go, so a table tells. Rows go on and begin again together."""
    table, own, rng = Steps(f"regex:{pattern}"), compiled({"grammar": grammar}, vocabulary()), np.random.default_rng(0)
    handles, begin, none = np.full(ROWS, own.handle), np.zeros(ROWS, np.int32), np.full((ROWS, 1, 0), -1, np.int32)
    left, compared, longest = WALKS // len(GRAMMARS), 0, 0
    tokens, length, states = np.zeros((ROWS, STEPS + 1), np.int32), np.zeros(ROWS, np.int32), [0] * ROWS
    while left > 0:
        found = masks(handles, tokens, begin, length, none, WORDS)[:, 0]
        for row in range(ROWS):
            text = tokens[row, : length[row]].tolist()
            assert table.agrees(states[row], found[row], lambda token, text=text: may_follow(own, text, token)), (
                grammar,
                text,
            )
            token = table.drawn(states[row], rng)
            if token in vocabulary().eos or length[row] == STEPS:
                left, length[row], states[row] = left - 1, 0, 0
            else:
                tokens[row, length[row]] = token
                length[row], states[row] = length[row] + 1, table.own.next(states[row], token)
            compared, longest = compared + 1, max(longest, int(length[row]))
    with capsys.disabled():
        print(f"\ngrammar: {compared} masks along {WALKS // len(GRAMMARS)} walks, of up to {longest} tokens")
    assert compared > WALKS // len(GRAMMARS)


def may_follow(own, text, token):
    """Whether a fresh matcher takes a token after a text."""
    matcher = guidance.LLMatcher(*grammar_module._OPEN[own.handle], log_level=0)
    assert matcher.try_consume_tokens(text) == len(text)
    return matcher.is_accepting() if token in vocabulary().eos else matcher.validate_tokens([token]) == 1
