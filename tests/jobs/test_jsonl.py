"""Input lines, good and bad, and strict JSON out."""

import dataclasses
import json

import pytest

from specjax.jobs import jsonl


def parse(content):
    return jsonl.parse(7, content if isinstance(content, bytes) else json.dumps(content).encode())


def test_good_lines():
    line = parse({"prompt": "a", "id": 3, "seed": 5, "temperature": 1, "top_p": None, "colour": "red"})
    assert line == jsonl.Line(7, "a", 3, {"seed": 5, "temperature": 1}, ("colour",), None)
    assert parse({"prompt": [1, 2]}).prompt == [1, 2]
    messages = [{"role": "user", "content": "hi"}]
    assert parse({"messages": messages, "id": "x"}) == jsonl.Line(7, messages, "x")


@pytest.mark.parametrize(
    ("own", "options"),
    [
        ({"max_new_tokens": 4.0, "seed": 5.0, "top_k": 3.0}, {"max_new_tokens": 4, "seed": 5, "top_k": 3}),
        ({"max_tokens": 4, "stop": ["a", "b"]}, {"max_new_tokens": 4, "stop": ["a", "b"]}),
        ({"max_completion_tokens": 4, "stop_strings": "a"}, {"max_new_tokens": 4, "stop": "a"}),
        ({"maxTokens": 4, "topP": 0.5, "Temperature": 1}, {"max_new_tokens": 4, "top_p": 0.5, "temperature": 1}),
        ({"n_predict": 4, "temp": 0.5, "typical": 0.9}, {"max_new_tokens": 4, "temperature": 0.5, "typical_p": 0.9}),
        ({"max_tokens": 4, "max_new_tokens": 4.0, "random_seed": 1}, {"max_new_tokens": 4, "seed": 1}),
        ({"do_sample": False, "logit_bias": {"5": -1}}, {"temperature": 0, "logit_bias": [[5, -1]]}),
        ({"n": 1, "best_of": 1, "echo": False, "tools": [], "num_beams": 1, "logprobs": None, "top_logprobs": 0}, {}),
    ],
)
def test_options_as_other_systems_write_them(own, options):
    line = parse({"prompt": "a", "messages": None, **own})
    assert line == jsonl.Line(7, "a", None, options)
    assert {type(value) for name, value in line.options.items() if name in ("max_new_tokens", "seed", "top_k")} <= {int}


def test_fields_of_data_and_of_records_are_none_of_these():
    """As when a file of records, or of a data set, is completed anew."""
    fields = {"text": "b", "new_tokens": 3, "logprobs": [-1.0], "finish_reason": "stop", "model": "x", "answer": 4}
    line = parse({"prompt": None, "messages": [{"role": "user", "content": "a"}], **fields})
    assert line.error is None and line.options == {} and {*line.unknown} == {*fields} - {"logprobs"}


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
        ({"prompt": None}, "and has neither"),
        ({"prompt": "a", "messages": "b"}, "and has both"),
        ({"prompt": "a", "max_new_tokens": 5.5}, "max_new_tokens must be an integer, got a number"),
        (
            {"prompt": "a", "n": 2},
            "n is an option of all prompts together: take it out, and give --num-return-sequences",
        ),
        ({"prompt": "a", "best_of": 4}, "best_of is an option of all prompts together"),
        ({"prompt": "a", "top_logprobs": 5}, "top_logprobs is an option of all prompts together"),
        ({"prompt": "a", "logprobs": True}, "give --logprobs"),
        ({"prompt": "a", "num_beams": 4}, "give --decode, in Python decode, such as beam:num_beams=4"),
        ({"prompt": "a", "verifier": "typical"}, "give --drafter, in Python drafter, such as eagle3:verifier=typical"),
        ({"prompt": "a", "sub_block": 8}, "give --decode, in Python decode, such as diffusion:sub_block=..."),
        ({"prompt": "a", "tools": [{}]}, "there is no option tools here, and it would not be applied"),
        ({"prompt": "a", "enable_thinking": False}, "there is no option enable_thinking here"),
        ({"prompt": "a", "no_repeat_ngram_size": 3}, "there is no option no_repeat_ngram_size here"),
        ({"prompt": "a", "do_sample": True}, "do_sample follows from the temperature"),
        ({"prompt": "a", "temprature": 0.5}, "no field 'temprature'; is temperature meant?"),
        ({"prompt": "a", "max_tokens": 3, "max_new_tokens": 4}, "another field that sets max_new_tokens differently"),
        ({"prompt": "a", "max_tokens": "3"}, "max_new_tokens must be an integer, got a string"),
        ({"prompt": [1, "a"]}, "got a list of mixed things"),
        ({"prompt": [True]}, "got a list with a boolean"),
        ({"prompt": [[1]]}, "got a list with a list"),
        ({"prompt": "a", "id": 1.5}, "id must be a string or an integer"),
        ({"prompt": "a", "id": True}, "id must be a string or an integer, got a boolean"),
        ({"prompt": "a", "id": "\ud800"}, "id is not valid Unicode"),
        ({"prompt": "a", "max_new_tokens": "5"}, "max_new_tokens must be an integer, got a string"),
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
        list(jsonl.read(tmp_path / "missing"))
    with pytest.raises(ValueError, match="cannot read the input file"):
        list(jsonl.read(tmp_path))


def test_dumps_is_strict():
    line = jsonl.dumps({"a": [float("nan"), 1.5], "b": float("-inf"), "c": "é\n"})
    assert "\n" not in line and line.isascii()
    assert json.loads(line, parse_constant=lambda name: pytest.fail(name)) == {"a": [None, 1.5], "b": None, "c": "é\n"}
