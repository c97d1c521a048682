"""Lines and results of the OpenAI batch API."""

import json

import pytest

from specjax import cli
from specjax.jobs import batch_api, jsonl
from specjax.jobs.batch_api import BatchForm, Results
from specjax.serve.request import Record

ASKED = [{"role": "user", "content": "Sort the words: pear apple fig"}]
OBJECT = {"type": "json_object"}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


def line(body, number=7, form=None, **more):
    return (form or BatchForm())(number, {"custom_id": "a", "method": "POST", "body": body, **more})


def test_a_chat_and_a_text():
    chat = line({"model": "m", "messages": ASKED, "max_completion_tokens": 4, "seed": 3, "user": None, "n": 1})
    assert chat == jsonl.Line(7, ASKED, "a", {"max_new_tokens": 4, "seed": 3}, ("model", "user"))
    text = line({"prompt": "x", "stop": ["."], "stream": False}, url="/v1/completions", priority=2)
    assert text == jsonl.Line(7, "x", "a", {"stop": ["."]}, ("priority",))


@pytest.mark.parametrize(
    ("form", "constraint"),
    [
        ({"type": "text"}, {}),
        (None, {}),
        ({"type": "json_object"}, {"constraint": {"json": {"type": "object"}}}),
        (
            {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": SCHEMA}},
            {"constraint": {"json": SCHEMA}},
        ),
    ],
)
def test_a_response_format_is_a_constraint(form, constraint):
    assert line({"messages": ASKED, "response_format": form}).options == constraint


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"messages": ASKED}, "needs a custom_id, which is a string"),
        ({"custom_id": 3, "body": {"messages": ASKED}}, "needs a custom_id, which is a string"),
        ({"custom_id": "b", "body": [1]}, "needs a body, which is an object"),
        ({"custom_id": "b", "url": ["x"], "body": {}}, "it asks for POST ['x']; there is"),
        (
            {
                "custom_id": "b",
                "body": {"messages": ASKED, "response_format": {"type": "json_object"}, "constraint": "regex:a"},
            },
            "it has response_format and constraint",
        ),
        ({"custom_id": "b", "url": "/v1/embeddings", "body": {}}, "POST /v1/embeddings; there is POST /v1/chat"),
        ({"custom_id": "b", "method": "GET", "body": {"messages": ASKED}}, "it asks for GET /v1/chat/completions"),
        (
            {"custom_id": "b", "url": "/v1/completions", "body": {"messages": ASKED}},
            "has prompt, and this one has messages",
        ),
        ({"custom_id": "b", "body": {}}, "one of prompt and messages, and has neither"),
        ({"custom_id": "b", "body": {"messages": ASKED, "n": 2}}, "give --num-return-sequences"),
        ({"custom_id": "b", "body": {"messages": ASKED, "logprobs": True}}, "give --logprobs"),
        ({"custom_id": "b", "body": {"messages": ASKED, "tools": [{"type": "function"}]}}, "no option tools here"),
        ({"custom_id": "b", "body": {"messages": ASKED, "response_format": {"type": "x"}}}, "response_format must be"),
        ({"custom_id": "b", "body": {"messages": ASKED, "response_format": "json"}}, "response_format must be"),
        ({"custom_id": "a", "body": {"messages": ASKED}}, "line 1 has the same custom_id"),
    ],
)
def test_bad_lines(content, said):
    form = BatchForm()
    assert line({"messages": ASKED}, 1, form).error is None
    assert said in (form(2, content).error or "")


def test_what_the_job_does_anyway_may_stand_in_a_line():
    form = BatchForm(count=2, logprobs=True)
    assert line({"messages": ASKED, "n": 2, "logprobs": True, "top_logprobs": 0}, form=form).options == {}
    assert "top_logprobs" in line({"messages": ASKED, "logprobs": True, "top_logprobs": 1}, 9, BatchForm(1, True)).error
    assert "logprobs" in line({"prompt": "x", "logprobs": 1}, 9, BatchForm(1, True)).error
    assert (
        "it asks for n 1, and --num-return-sequences is 2" in line({"messages": ASKED, "n": 1}, 8, BatchForm(2)).error
    )


class Words:
    """A tokenizer of three words."""

    def decode(self, ids):
        return "".join("abc"[own] for own in ids)


def test_results(tmp_path):
    own = {"tokens": [0, 2], "finish_reason": "length", "new_tokens": 2, "steps": 1, "tokens_per_step": 2.0}
    records = [
        Record("x", "ac", line=3, id="t", logprobs=[-1.0, -2.0], **own),
        Record(ASKED, "ac", line=1, id="c", sample=1, **own),
        Record(ASKED, "ac", line=1, id="c", sample=0, **{**own, "finish_reason": "eos"}, logprobs=[-1.0, -2.0]),
        Record.failed(None, "it has neither", id="b", line=2),
    ]
    journal = tmp_path / "records"
    journal.write_text("".join(f"{jsonl.dumps(record.to_json())}\n" for record in records))
    Results("m", {1: 5, 3: 1}, frozenset({1}), Words()).write(tmp_path / "out", journal)
    chat, bad, text = map(json.loads, (tmp_path / "out").read_text().splitlines())
    assert [own["custom_id"] for own in (chat, bad, text)] == ["c", "b", "t"]
    assert bad["response"] is None and bad["error"] == {"code": "invalid_request", "message": "it has neither"}
    assert chat["error"] is None and chat["response"]["status_code"] == 200
    body = chat["response"]["body"]
    assert body["object"] == "chat.completion" and body["model"] == "m"
    assert body["usage"] == {"prompt_tokens": 5, "completion_tokens": 4, "total_tokens": 9}
    first, second = body["choices"]
    assert first["message"] == {"role": "assistant", "content": "ac"} and first["finish_reason"] == "stop"
    assert [own["token"] for own in first["logprobs"]["content"]] == ["a", "c"] and second["logprobs"] is None
    assert (first["index"], second["index"], second["finish_reason"]) == (0, 1, "length")
    body = text["response"]["body"]
    assert body["object"] == "text_completion" and body["choices"][0]["text"] == "ac"
    assert body["choices"][0]["logprobs"] == {
        "tokens": ["a", "c"],
        "token_logprobs": [-1.0, -2.0],
        "top_logprobs": None,
    }


def test_what_needs_the_form_and_what_it_needs(tmp_path, capsys):
    file = tmp_path / "in.jsonl"
    file.write_text(json.dumps({"custom_id": "a", "body": {"messages": ASKED}}) + "\n")
    for words, said in (
        (["--output", "out.jsonl"], "give --format openai"),
        (["--format", "openai"], "give --input and --output FILE.jsonl"),
        (["--format", "openai", "--output", "-"], "give --input and --output FILE.jsonl"),
        (["--format", "openai", "--output", f"{tmp_path}/out.jsonl.gz"], "not compressed"),
    ):
        words = [word.replace("out.jsonl", f"{tmp_path}/out.jsonl") if word == "out.jsonl" else word for word in words]
        assert cli.main(["generate", "--input", str(file), *words]) == 2
        _, err = capsys.readouterr()
        assert said in err and err.count("\n") == 1


def test_the_types_of_their_own_package_read_the_results():
    types = pytest.importorskip("openai.types", reason="needs the package openai")
    own = {"tokens": [0, 2], "finish_reason": "length", "new_tokens": 2, "steps": 1, "tokens_per_step": 2.0}
    write = Results("m", {1: 5, 3: 1}, frozenset({1}), Words()).result
    for prompt, number in ((ASKED, 1), ("x", 3)):
        record = Record(prompt, "ac", line=number, id="a", logprobs=[-1.0, -2.0], **own).to_json()
        body = write([record], 0)["response"]["body"]
        kind = types.chat.ChatCompletion if number == 1 else types.Completion
        assert kind.model_validate(body).choices[0].finish_reason == "length"


@pytest.mark.slow
@pytest.mark.covers("batch_api", "jobs")
def test_a_job_writes_results_and_goes_on_after_a_kill(tmp_path, capsys):
    file, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    bodies = [
        {"model": "tiny", "messages": ASKED, "max_tokens": 16},
        {"messages": ASKED, "max_tokens": 24, "response_format": schema, "temperature": 0.7, "seed": 1},
        {"messages": ASKED, "n": 3},
        {"prompt": "def f(n):", "max_tokens": 4},
    ]
    file.write_text("".join(json.dumps({"custom_id": f"r{i}", "body": body}) + "\n" for i, body in enumerate(bodies)))
    words = ["generate", "--input", str(file), "--output", str(output), "--format", "openai", "--drafter", "none"]
    assert cli.main(words) == 1
    assert "fields without a meaning here are left out: 'model'" in capsys.readouterr()[1]
    whole = [json.loads(text) for text in output.read_text().splitlines()]
    assert [own["custom_id"] for own in whole] == ["r0", "r1", "r2", "r3"]
    assert "num-return-sequences" in whole[2]["error"]["message"]
    chats = [whole[at]["response"]["body"] for at in (0, 1)]
    assert chats[0]["choices"][0]["message"]["content"] and chats[0]["usage"]["prompt_tokens"] > 4
    assert isinstance(json.loads(chats[1]["choices"][0]["message"]["content"])["a"], int)
    journal = batch_api.journal(str(output))
    with open(journal, "r+") as records:
        records.truncate(len(records.readline()) + 5)
    output.unlink()
    assert cli.main(words) == 1
    again = [json.loads(text) for text in output.read_text().splitlines()]
    forget = lambda results: json.loads(json.dumps(results), object_hook=lambda own: {**own, "created": 0})
    assert forget(again) == forget(whole)
