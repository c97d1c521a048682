"""Input lines, good and bad, and strict JSON out."""

import dataclasses
import json

import pytest

from specjax.jobs import jsonl


def parse(content):
    return jsonl.parse(7, content if isinstance(content, bytes) else json.dumps(content).encode())


def test_good_lines():
    line = parse({"prompt": "a", "id": 3, "seed": 5, "temperature": 1, "top_p": None, "colour": "red"})
    assert line == jsonl.Line(7, "a", "3", {"seed": 5, "temperature": 1}, ("colour",), None)
    assert parse({"prompt": [1, 2]}).prompt == [1, 2]
    messages = [{"role": "user", "content": "hi"}]
    assert parse({"messages": messages, "id": "x"}) == jsonl.Line(7, messages, "x")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"{", "not valid JSON"),
        (b'{"prompt": "\xff"}', "not valid UTF-8"),
        (b"[" * 100_000, "not valid JSON"),
        ([1, 2], "not a JSON object but a list with a number"),
        ("text", "not a JSON object but a string"),
        ({}, "one of prompt and messages, and has neither"),
        ({"prompt": "a", "messages": [{}]}, "and has both"),
        ({"prompt": ""}, "the prompt is empty"),
        ({"prompt": []}, "the prompt is empty"),
        ({"messages": []}, "the messages are empty"),
        ({"messages": "hi"}, "messages must be a list of objects, got a string"),
        ({"prompt": 5}, "prompt must be a string or a list of token ids, got a number"),
        ({"prompt": None}, "got null"),
        ({"prompt": [1, "a"]}, "got a list of mixed things"),
        ({"prompt": [True]}, "got a list with a boolean"),
        ({"prompt": [[1]]}, "got a list with a list"),
        ({"prompt": "a", "id": 1.5}, "id must be a string or an integer"),
        ({"prompt": "a", "id": True}, "id must be a string or an integer, got a boolean"),
        ({"prompt": "a", "id": "\ud800"}, "id is not valid Unicode"),
        ({"prompt": "a", "max_new_tokens": "5"}, "max_new_tokens must be an integer, got a string"),
        ({"prompt": "a", "max_new_tokens": 5.0}, "max_new_tokens must be an integer, got a number"),
        ({"prompt": "a", "temperature": "hot"}, "temperature must be a number, got a string"),
        ({"prompt": "a", "seed": True}, "seed must be an integer, got a boolean"),
        (b'{"prompt": [' + b"9" * 5000 + b"]}", "not valid JSON"),
        (b'{"prompt": ' + b"[" * 500 + b"]" * 500 + b"}", "nested more than 64 levels deep"),
        (
            b'{"messages": [{"role": "user", "content": ' + b"[" * 300 + b"]" * 300 + b"}]}",
            "nested more than 64 levels",
        ),
    ],
)
def test_bad_lines(content, said):
    line = parse(content)
    assert line.error is not None and said in line.error and line.number == 7
    json.dumps(dataclasses.asdict(line))


def test_read_counts_every_line_and_skips_blank_ones(tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\r\n\n  \nnope\n{"prompt": "b"}')
    assert [(line.number, line.error is None) for line in jsonl.read(path)] == [(1, True), (4, False), (5, True)]
    with pytest.raises(ValueError, match="cannot read the input file"):
        jsonl.read(tmp_path / "missing")
    with pytest.raises(ValueError, match="cannot read the input file"):
        jsonl.read(tmp_path)


def test_dumps_is_strict():
    line = jsonl.dumps({"a": [float("nan"), 1.5], "b": float("-inf"), "c": "é\n"})
    assert "\n" not in line and line.isascii()
    assert json.loads(line, parse_constant=lambda name: pytest.fail(name)) == {"a": [None, 1.5], "b": None, "c": "é\n"}
