"""Grammars, which a matcher on the host follows: its masks at every node, and texts of engines."""

import functools
import itertools
import json
import re

import numpy as np
import pytest
from support.constraints import model, vocabulary

from specjax import Sampling
from specjax.constrain import Grammar, Vocabulary, compiled
from specjax.constrain import grammar as module
from specjax.constrain.grammar import masks
from specjax.decode import Plain, Speculate
from specjax.draft import Forced, PromptLookup, fuse
from specjax.serve.engine import Engine

guidance = pytest.importorskip("llguidance")
NESTED = 'start: item\nitem: "(" item* ")"\n'
VALUES = """
start: value
value: "[" (value ("," value)*)? "]" | /[0-9]{1,3}/
"""


def nested(text):
    """Whether a text is one pair of brackets with such pairs between them."""
    depth = 0
    for at, sign in enumerate(text):
        depth += 1 if sign == "(" else -1
        if depth <= 0 and at < len(text) - 1:
            return False
    return depth == 0 and len(text) > 0


def begins(text):
    """Whether a text can become nested."""
    return any(nested(text + ")" * count) for count in range(len(text) + 1)) or text == ""


def unpacked(words):
    return np.unpackbits(words.view(np.uint8), bitorder="little", axis=-1)[..., : vocabulary().size]


def test_masks_are_the_grammars_at_every_node():
    """Whatever was asked before: rows go on, go back and change their grammar."""
    own = vocabulary()
    only = [token for token, text in enumerate(own.tokens) if text and set(text) <= set(b"()")]
    grammar, rng = compiled({"grammar": NESTED}, own), np.random.default_rng(0)
    nodes = [row for n in range(3) for row in itertools.product(only[:3], repeat=n)]
    for _ in range(6):
        texts = [[int(own.size - 1)] * 3, [*rng.choice(only, rng.integers(0, 5))]]
        tokens = np.zeros((3, 8), np.int32)
        for row, text in enumerate(texts):
            tokens[row, 2 : 2 + len(text)] = text
        paths = np.full((3, len(nodes), 2), -1, np.int32)
        for node, path in enumerate(nodes):
            paths[:, node, : len(path)] = path
        lengths = np.asarray([2, 2 + len(texts[1]), 2])
        got = unpacked(
            masks(np.asarray([-1, grammar.handle, grammar.handle]), tokens, np.full(3, 2), lengths, paths, 48)
        )
        assert got[0].all()
        for row, text in ((1, texts[1]), (2, [])):
            if not begins(b"".join(own.tokens[int(token)] for token in text).decode()):
                assert not got[row].any()
                continue
            for node, path in enumerate(nodes):
                before = b"".join(own.tokens[int(token)] for token in [*text, *path]).decode()
                if not begins(before):
                    assert got[row, node].all()
                    continue
                want = {token for token in only if begins(before + own.tokens[token].decode())}
                allowed = set(np.flatnonzero(got[row, node]).tolist())
                assert allowed - {*own.eos} <= want and (own.eos[0] in allowed) == nested(before)
                assert want or allowed == {*own.eos}


def test_a_call_with_many_rows_keeps_its_matchers(monkeypatch):
    monkeypatch.setattr(module, "MOST_LANES", 1)
    monkeypatch.setattr(module, "_LANES", {})
    handles, none = np.full(3, compiled({"grammar": NESTED}, vocabulary()).handle), np.zeros(3, np.int32)
    ask = lambda: masks(handles, np.zeros((3, 1), np.int32), none, none, np.zeros((3, 1, 0), np.int32), 48)
    ask()
    before = dict(module._LANES)
    ask()
    assert len(before) == 3 and all(module._LANES[name] is lane for name, lane in before.items())


def test_whole_texts_and_first_masks():
    """However the tokens cut them; and a text may begin with what `masks` says."""
    own, grammar = vocabulary(), compiled({"grammar": NESTED}, vocabulary())
    only = [token for token, text in enumerate(own.tokens) if text and set(text) <= set(b"()")]
    rows = [row for n in range(7) for row in itertools.product(only, repeat=n)]
    write = lambda row: b"".join(own.tokens[token] for token in row).decode()
    assert [row for row in rows if grammar.accepts(row)] == [row for row in rows if nested(write(row))]
    assert {write(row) for row in rows if grammar.accepts(row)} >= {"()", "(())", "(()())"}
    allowed = set(np.flatnonzero(unpacked(grammar.first_mask())).tolist())
    assert allowed == {token for token in only if begins(own.tokens[token].decode())}


TREE = {"$ref": "#/$defs/t", "$defs": {"t": {"type": "array", "items": {"$ref": "#/$defs/t"}, "maxItems": 2}}}
PROMPTS = [[20, 30, 40, 50], "a b a b a b", "Is it?", "1 2 1 2 1"]
SAMPLINGS = [
    Sampling(constraint={"grammar": VALUES}, temperature=1.0, max_new_tokens=24),
    Sampling(temperature=1.0, max_new_tokens=12),
    Sampling(constraint="choice:yes|no|perhaps"),
    Sampling(constraint={"grammar": TREE}, temperature=2.0, max_new_tokens=24, seed=3),
]


@functools.cache
def plain():
    return Engine(model(), decode=Plain()).generate(PROMPTS, sampling=SAMPLINGS)


@pytest.mark.slow
def test_texts_obey_beside_rows_of_tables_and_free_ones():
    for record in (plain()[0], plain()[3]):
        assert record.finish_reason == "length" or json.loads(record.text) is not None
        assert set(record.text) <= set("[], 0123456789") and not record.error
    assert {plain()[0].finish_reason, plain()[3].finish_reason} & {"eos"} and plain()[2].text in (
        "yes",
        "no",
        "perhaps",
    )


@pytest.mark.slow
def test_the_text_is_that_of_plain_decoding():
    drafter = fuse(PromptLookup(length=4, min_ngram=1), Forced(length=2))
    records = Engine(model(), decode=Speculate((drafter, None))).generate(PROMPTS, sampling=SAMPLINGS)
    assert [own.tokens for own in records] == [own.tokens for own in plain()]
    assert sum(own.steps for own in records) < sum(own.steps for own in plain())


def test_what_is_no_grammar_is_one_line(tmp_path):
    (tmp_path / "own.lark").write_text(NESTED)
    own = compiled(f"grammar:{tmp_path / 'own.lark'}", vocabulary())
    assert isinstance(own, Grammar) and compiled(own, vocabulary()) is own
    meshed = Vocabulary(vocabulary().tokenizer, vocabulary().size, vocabulary().eos, meshed=True)
    other = Vocabulary(vocabulary().tokenizer, vocabulary().size, (7,))
    assert compiled({"grammar": TREE}, vocabulary()) == compiled(f"grammar:{json.dumps(TREE)}", vocabulary())
    for given, words, said in (
        ({"grammar": {"type": "integer", "multipleOf": "a"}}, vocabulary(), "the grammar cannot be read: "),
        ("grammar:{", vocabulary(), "the schema is not JSON: "),
        ({"grammar": "start: item"}, vocabulary(), "constraint grammar:start: item: the grammar cannot be read: "),
        ("grammar:no/such.lark", vocabulary(), "the grammar no/such.lark cannot be read (No such file or directory)"),
        (own, meshed, "a grammar is followed on the host of one device: give nested:..., or leave the mesh out"),
        (own, other, "it was made for another model's tokens: give its line"),
    ):
        with pytest.raises(ValueError, match=re.escape(said)) as error:
            compiled(given, words)
        assert "\n" not in str(error.value) and len(str(error.value)) < 250
